"""How the oldest tokens of a layer's tail become encoded segments, when nothing else moves them, and how those age."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.engine.layer_group import encoded
from kvtailor.ops.lanes.ragged import cut_lanes
from kvtailor.ops.segments.weighted import Weighted, without_weight
from kvtailor.types import Layout, PlainSegment, Segment
from kvtailor.types.checked_returns import checked_segment

if TYPE_CHECKING:
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.plan import Plan
    from kvtailor.plan.registry import Codec
    from kvtailor.types.late_checks import LateChecks

__all__ = ["encode_tail"]


def encode_tail(
    state: LayerState, plan: Plan, new_tokens: int, real: Tensor | None, late: LateChecks | None = None
) -> None:
    """Encodes the oldest tokens of a layer's tail. Then, and after an eviction, what has grown old is encoded anew.

    Layers that are encoded together all do it at the call of the last one.

    After a prompt, a chunk or a turn: all but what the codec leaves in full precision, so that a row of a padded
    batch is encoded as it would be alone. While decoding: a whole block, once there is one.

    Args:
        state: of the layer.
        plan: whose codec encodes.
        new_tokens: of the forward that has just ended; 1 for decoded tokens, however many came at once.
        real: (b, columns) bool, False for padding, which is dropped here; None where nothing is padded.
        late: collects the codec's checks; None: they are made at once.
    """
    codec, tail, group = state.codec(plan), state.stored.tail, state.layer_group or (state,)
    waits = state.clock.due or state.pending is not None or (state.layer_group and not state.completes)
    if tail is None or codec.block == 0 or waits:
        return
    count = tail.length - codec.tail
    if new_tokens == 1:
        count = count // codec.block * codec.block
    ages = bool(codec.ages) and (count > 0 or state.clock.growth == 0)
    if count <= 0 and not ages:
        return
    first = None if real is None else real.to(torch.int8).argmax(-1)
    with nullcontext() if late is None else late.collecting():
        if ages:
            _renew(state, plan, first)
        if count > 0:
            _encode_oldest(group, plan, count, real, first)


def _renew(state: LayerState, plan: Plan, first: Tensor | None) -> None:
    """Encode anew what has grown old."""
    held, codec = state.here(), state.codec(plan)
    found = [_renewed(each, codec, state.stored.seen, first) for each in held]
    if any(new is not old for new, old in zip(found, held, strict=True)):
        state.stored.segments = found
        # What is carried of them was made from other codes.
        state.clock.reindex = True


def _renewed(segment: Segment, codec: Codec, seen: int, first: Tensor | None) -> Segment:
    if not isinstance(segment, Weighted):
        return codec.renewed(segment, seen, first)
    inner = codec.renewed(segment.inner, seen, first)
    return segment if inner is segment.inner else replace(segment, inner=inner)


def _encode_oldest(
    group: Sequence[LayerState], plan: Plan, count: int, real: Tensor | None, first: Tensor | None
) -> None:
    """Encode the oldest tokens of the tails of layers that are encoded together, or of one layer."""
    state = group[-1]
    codec, tail, seen = state.encoder(plan, first), state.stored.tail, state.stored.seen
    assert tail is not None
    if len(group) == 1:
        state.stored.segments = [_no_longer_waiting(each, codec, first, seen) for each in state.here()]
    begin = 0
    for size, age in codec.runs(count, tail.length - count):
        leaving = [_oldest(each, begin, size, real, codec.lane_multiple) for each in group]
        begin += size
        if leaving[-1] is None:
            continue
        found = encoded([part for part in leaving if part is not None], codec, first, newest=seen - 1 - age, seen=seen)
        for each, segment in zip(group, found, strict=True):
            each.stored.segments.append(segment)
    for each in group:
        _drop_oldest(each, count)


def _no_longer_waiting(segment: Segment, codec: Codec, first: Tensor | None, seen: int) -> Segment:
    """The segment, encoded where it was left as it is for more to come (`budget.waiting_tokens`).

    It is older than what is encoded now, and segments are in time order.
    """
    plain = without_weight(segment)
    if not isinstance(plain, PlainSegment) or issubclass(PlainSegment, codec.segment_type()):
        return segment
    newest = int(plain.layout.columns(plain.keys.device).max())
    stored = codec.encode_aged(plain.layout, plain.keys, plain.values, first, newest=newest, seen=seen)
    checked_segment(codec, stored, codec.segment_type(), plain.layout)
    return replace(segment, layout=stored.layout, inner=stored) if isinstance(segment, Weighted) else stored


def _oldest(state: LayerState, begin: int, count: int, real: Tensor | None, multiple: int) -> PlainSegment | None:
    """Old tokens of the tail from `begin` on, padding left out, whose evidence is a part of its own from now on.

    What is before them has had its turn.
    """
    assert state.stored.tail is not None
    whole = state.stored.tail.as_segment()
    layout, end = whole.layout, begin + count
    keys, values = whole.keys[:, begin:end], whole.values[:, begin:end]
    positions = None if layout.positions is None else layout.positions[:, begin:end].clone()
    start = None if layout.start is None else layout.start + begin
    block = Layout(rows=state.rows, heads=state.heads, size=count, start=start, positions=positions)
    mass = list(state.observed.evidence.mass)
    if mass:
        last = mass.pop()
        mass += [last[:, :count].clone(), last[:, count:].clone()]
    if real is not None:
        columns = block.columns(keys.device).expand(block.lanes, -1).view(state.rows, state.heads, -1)
        row = torch.arange(state.rows, device=keys.device)[:, None, None]
        cut = cut_lanes(real.to(keys.device)[row, columns], multiple)
        if cut is None:
            if mass:
                del mass[-2]
            state.observed.evidence = replace(state.observed.evidence, mass=tuple(mass))
            return None
        at = cut.owners[:, None], cut.index
        block, keys, values = cut.layout(state.rows, state.heads, columns), keys[at], values[at]
        if mass:
            mass[-2] = mass[-2][at]
    state.observed.evidence = replace(state.observed.evidence, mass=tuple(mass))
    return PlainSegment(layout=block, keys=keys, values=values)


def _drop_oldest(state: LayerState, count: int) -> None:
    assert state.stored.tail is not None
    state.stored.tail.drop_oldest(count)
    if state.observed.evidence.mass and not state.stored.tail.length:
        state.observed.evidence = replace(state.observed.evidence, mass=state.observed.evidence.mass[:-1])
