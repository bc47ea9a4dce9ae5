"""How the oldest tokens of a layer's tail become encoded segments, when nothing else moves them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.engine.layer_group import encoded
from kvtailor.ops.lanes.ragged import cut_lanes
from kvtailor.types import Layout, PlainSegment

if TYPE_CHECKING:
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.plan import Plan
    from kvtailor.types.late_checks import LateChecks

__all__ = ["encode_tail"]


def encode_tail(
    state: LayerState, plan: Plan, new_tokens: int, real: Tensor | None, late: LateChecks | None = None
) -> None:
    """Encodes the oldest tokens of a layer's tail.

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
    if count <= 0:
        return
    first = None if real is None else real.to(torch.int8).argmax(-1)
    leaving = [_oldest(each, count, real, codec.lane_multiple) for each in group]
    if leaving[-1] is not None:
        with nullcontext() if late is None else late.collecting():
            segments = encoded([part for part in leaving if part is not None], state.encoder(plan, first), first)
        for each, segment in zip(group, segments, strict=True):
            each.stored.segments.append(segment)
    for each in group:
        _drop_oldest(each, count)


def _oldest(state: LayerState, count: int, real: Tensor | None, multiple: int) -> PlainSegment | None:
    """The oldest tokens of the tail, padding left out, whose evidence is a part of its own from now on."""
    assert state.stored.tail is not None
    whole = state.stored.tail.as_segment()
    layout = whole.layout
    keys, values = whole.keys[:, :count], whole.values[:, :count]
    positions = None if layout.positions is None else layout.positions[:, :count].clone()
    block = Layout(rows=state.rows, heads=state.heads, size=count, start=layout.start, positions=positions)
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
