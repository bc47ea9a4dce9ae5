"""One layer as fields and tensors of a saved cache, and back. Each part of the layer says itself; see `layer_parts`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
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
    if state.stored.tail is not None:
        fields["held"] = int(state.counts().sum())
    # What a reader compares before the layer is taken for what it was.
    fields["tensors"] = {
        name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape] for name, tensor in sorted(tensors.items())
    }
    return fields, tensors


def restore(
    state: LayerState,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    plan: Plan,
    kv_heads: int,
    dtype: torch.dtype | None,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Make a layer what `state_of` described.

    Args:
        state: of the layer, which is reset.
        fields, tensors: what `state_of` returned.
        plan: of the cache.
        kv_heads: h, of the model.
        dtype: of the cache; None: the layer holds nothing yet.
        sizes: channels of the keys and values that the layer holds; None: not known.

    Raises:
        ValueError: a number, a layout or a segment is none that a layer can have, or fields and tensors are not what
            `state_of` says of the layer that they make.
        LookupError, TypeError, RuntimeError: something is missing, or of another kind.
    """
    state.reset()
    state.clock = Clock.from_state(fields)
    state.model.take_state(fields)
    state.stored.seen = seen = whole_number(fields, "seen")
    if "tail" not in fields:
        _check_again(state, fields, tensors)
        return
    if dtype is None or not dtype.is_floating_point:
        raise ValueError(f"a layer holds tokens, and its dtype is said to be {dtype}")
    rows, heads = fields["rows"], fields["heads"]
    if heads != kv_heads:
        raise ValueError(f"a layer has {heads} kv heads, and the model {kv_heads}")
    state.stored.tail = _tail(rows, heads, fields["tail"], under("tail.", tensors), seen, dtype, sizes)
    for i, saved in enumerate(fields["segments"]):
        mine = under(f"segment.{i}.", tensors)
        own = under("layout.", mine)
        layout = Layout(rows=rows, heads=heads, size=saved["layout"]["size"], start=saved["layout"]["start"], **own)
        check_layout(layout, seen)
        state.codec(plan)
        segment = state.restored(saved["codec"], layout, saved["fields"], mine)
        if segment.codec != saved["codec"]:
            raise ValueError(f"a segment is said to be of {saved['codec']}, and the plan makes {segment.codec}")
        check_segment(segment, dtype, sizes)
        state.stored.segments.append(segment)
    state.rejoin()
    state.observed = Observed.from_state(fields, tensors)
    _check_clock(state, plan)
    _check_observed(state, dtype)
    _check_again(state, fields, tensors)


def _check_again(state: LayerState, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise where a layer would be saved otherwise than it was: parts that are left over, or that are not there."""
    own, kept = state_of(state)
    here, there = ({name: (t.dtype, tuple(t.shape)) for name, t in each.items()} for each in (kept, tensors))
    if here != there:
        odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        raise ValueError(f"its fields describe other tensors than there are: {', '.join(odd[:3])}")
    own = json.loads(json.dumps(own))
    # Files of earlier versions lack some fields.
    odd = sorted(name for name in fields if name not in own or own[name] != fields[name])
    if set(odd) - {"dtype", "states"}:
        raise ValueError(f"its fields are not those of the layer that they make: {', '.join(odd[:3])}")


def _check_clock(state: LayerState, plan: Plan) -> None:
    """Raise where a layer's clock tells other times than its tokens and its plan."""
    clock, seen = state.clock, state.stored.seen
    slack = plan.slack_tokens
    early = max(clock.settled_seen, clock.prompt, clock.growth) <= seen
    as_planned = clock.evict_at is None or (clock.evict_at == slack and clock.growth == seen - clock.settled_seen)
    if not early or not as_planned:
        raise ValueError(
            f"a layer that saw {seen} tokens has a clock of {clock.settled_seen}, {clock.growth} and {clock.prompt}, "
            f"and its next eviction after {clock.evict_at}"
        )


def _check_observed(state: LayerState, dtype: torch.dtype) -> None:
    """Raise where what a layer remembers is not of its rows, heads, parts or dtype."""
    rows, heads, evidence = state.rows, state.heads, state.observed.evidence
    sizes = [(each.layout.lanes, each.layout.size) for each in state.parts()]
    if len(evidence.mass) > len(sizes):
        raise ValueError(f"a layer has {len(sizes)} parts, and the attention of {len(evidence.mass)} is remembered")
    for mass, part in zip(evidence.mass, sizes, strict=False):
        _check_shape("attention", mass, torch.float32, part)
    queries, sampled = evidence.queries, evidence.sampled
    of_queries = (queries, sampled, evidence.moments_mean)
    q_heads = {each.shape[1] for each in of_queries if each is not None and each.ndim > 1}
    if len(q_heads) > 1 or any(count % heads for count in q_heads):
        raise ValueError(f"queries of {sorted(q_heads)} heads are remembered for {heads} kv heads")
    count = next(iter(q_heads), 0)
    for name, states, columns in (
        ("queries", queries, evidence.columns),
        ("sampled queries", sampled, evidence.sampled_columns),
    ):
        if (states is None) != (columns is None):
            raise ValueError(f"{name} are remembered without their columns, or these without them")
        if states is not None and columns is not None:
            size = states.shape[-1] if states.ndim else 0
            _check_shape(name, states, dtype, (rows, count, columns.shape[-1] if columns.ndim else 0, size))
            _check_shape(
                f"columns of {name}", columns, torch.int64, (*([rows] if columns.ndim > 1 else []), columns.shape[-1])
            )
    moments = (evidence.moments_count, evidence.moments_mean, evidence.moments_spread)
    if any(each is None for each in moments) != all(each is None for each in moments):
        raise ValueError("the moments of queries are not all there")
    for name, moment, dimensions in zip(("count", "mean", "spread"), moments, (1, 3, 4), strict=True):
        if moment is not None:
            size = moment.shape[-1] if moment.ndim else 0
            _check_shape(f"{name} of queries", moment, torch.float32, (rows, count, size, size)[:dimensions])
    for name, memory in state.observed.memories().items():
        known = (torch.int32, torch.int64) if name == "scored_columns" else (torch.float32, dtype)
        if memory.dtype not in known or tuple(memory.shape[:2]) != (rows, heads):
            raise ValueError(
                f"{name} are {memory.dtype} of shape {tuple(memory.shape)}, of {rows} rows and {heads} heads"
            )
    scored, columns = state.observed.scored, state.observed.scored_columns
    if (scored is None) != (columns is None) or (
        scored is not None and columns is not None and scored.shape[-1] != columns.shape[-1]
    ):
        raise ValueError("scores are remembered of other tokens than their columns")
    for name, carried in state.observed.carry.items():
        if carried.ndim < 1 or carried.shape[0] != rows:
            raise ValueError(f"{name} is carried for {tuple(carried.shape)}, and there are {rows} rows")


def _check_shape(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"the {name} are {tensor.dtype} of shape {tuple(tensor.shape)} and not {dtype} of {shape}")


def _tail(
    rows: int,
    heads: int,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    seen: int,
    dtype: torch.dtype,
    sizes: tuple[int, int] | None,
) -> Tail:
    whole_number(fields, "length")
    if any(tensor.ndim < 2 for tensor in tensors.values()) or bool(tensors) > {"keys", "values"}.issubset(tensors):
        raise ValueError(f"a tail has {', '.join(f'{name} {tuple(t.shape)}' for name, t in tensors.items())}")
    tail = Tail.from_state(rows, heads, fields, tensors)
    slots = {tensor.shape[1] for tensor in tensors.values()}
    if slots - {tail.length} or bool(tail.length) > bool(slots):
        raise ValueError(f"a tail is said to hold {tail.length} tokens, and has {sorted(slots)} slots")
    if tail.length:
        held = tail.as_segment()
        check_layout(held.layout, seen)
        check_segment(held, dtype, sizes)
    tail.look(seen)
    return tail
