"""One layer as fields and tensors of a saved cache, and back. Each part of the layer says itself; see `layer_parts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvtailor.engine.layer_parts import Clock, Observed, whole_number
from kvtailor.engine.layer_state import LayerState
from kvtailor.errors import CacheMisuse
from kvtailor.ops.segments.coded import under
from kvtailor.ops.segments.stored_parts import check_layout, check_segment
from kvtailor.plan import Plan
from kvtailor.store.recent_window import Tail
from kvtailor.types import Layout

__all__ = ["restore", "state_of"]


def state_of(state: LayerState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return JSON-able fields and tensors from which `restore` makes a layer again.

    Raises:
        CacheMisuse: the layer is between a recorded forward and its crop.
    """
    if state.pending is not None:
        raise CacheMisuse("a cache cannot be saved between a recorded forward and its crop")
    fields: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for own, kept in (
        state.stored.state(state.here()),
        state.clock.state(),
        state.model.state(),
        state.observed.state(),
    ):
        fields |= own
        tensors |= kept
    return fields, tensors


def restore(
    state: LayerState, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], plan: Plan, kv_heads: int
) -> None:
    """Make a layer what `state_of` described.

    Args:
        state: of the layer, which is reset.
        fields, tensors: what `state_of` returned.
        plan: of the cache.
        kv_heads: h, of the model.

    Raises:
        ValueError: a number, a layout or a segment is none that a layer can have.
        LookupError, TypeError, RuntimeError: something is missing, or of another kind.
    """
    state.reset()
    state.clock = Clock.from_state(fields)
    state.model.take_state(fields)
    state.stored.seen = seen = whole_number(fields, "seen")
    if "tail" not in fields:
        return
    rows, heads = fields["rows"], fields["heads"]
    if heads != kv_heads:
        raise ValueError(f"a layer has {heads} kv heads, and the model {kv_heads}")
    state.stored.tail = _tail(rows, heads, fields["tail"], under("tail.", tensors), seen)
    for i, saved in enumerate(fields["segments"]):
        mine = under(f"segment.{i}.", tensors)
        own = under("layout.", mine)
        layout = Layout(rows=rows, heads=heads, size=saved["layout"]["size"], start=saved["layout"]["start"], **own)
        check_layout(layout, seen)
        state.codec(plan)
        segment = state.restored(saved["codec"], layout, saved["fields"], mine)
        if segment.codec != saved["codec"]:
            raise ValueError(f"a segment is said to be of {saved['codec']}, and the plan makes {segment.codec}")
        check_segment(segment)
        state.stored.segments.append(segment)
    state.rejoin()
    state.observed = Observed.from_state(fields, tensors)


def _tail(rows: int, heads: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], seen: int) -> Tail:
    tail = Tail.from_state(rows, heads, fields, tensors)
    slots = {tensor.shape[1] for tensor in tensors.values()}
    if slots - {tail.length} or bool(tail.length) > bool(slots):
        raise ValueError(f"a tail is said to hold {tail.length} tokens, and has {sorted(slots)} slots")
    if tail.length:
        held = tail.as_segment()
        check_layout(held.layout, seen)
        check_segment(held)
    tail.look(seen)
    return tail
