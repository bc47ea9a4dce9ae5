"""How a kept set becomes what a layer holds: the tail itself, or segments and a tail of the newest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.ops.ragged import Cut, cut_lanes, gather_held, tokens_of_part
from kvtailor.types import Held, Segment

if TYPE_CHECKING:
    from kvtailor.layer import LayerState
    from kvtailor.plan import Plan

__all__ = ["keep_only", "waits"]


def keep_only(
    state: LayerState, plan: Plan, held: Held, slots: list[Tensor], keep: Tensor, *, encoding: bool = True
) -> None:
    """Lets a layer hold only a kept set.

    Args:
        state: of the layer.
        plan: whose codec stores what leaves the tail.
        held: the padded rows that were scored.
        slots: for each part the index of its slots along them.
        keep: (b, h, n) bool.
        encoding: False where the layer will be cut again in the same walk: then what is not encoded yet waits as it
            is, so that it is encoded once, for what stays in the end.
    """
    codec = state.codec(plan)
    if codec.exact and codec.block == 0:
        cut = cut_lanes(keep)
        if cut is not None and cut.owner is None:
            assert state.tail is not None
            state.tail.replace(gather_held(held, cut))
            state.segments = []
            _take_mass(state, held, [cut])
            return
    assert state.tail is not None and plan.score is not None
    newest = _common_newest(state, held, keep, plan.score.recents)
    old = keep & ~held.recent(newest) if newest else keep
    cuts: list[Cut] = []
    segments: list[Segment] = []
    if not codec.exact:
        # What is encoded moves as codes; only what waits or still is in the tail is encoded now.
        fresh = torch.zeros_like(old)
        parts = state.segments if not state.tail.length else [*state.segments, state.tail.as_segment()]
        for segment, slot in zip(parts, slots, strict=True):
            mine, lane_of, slot_of = tokens_of_part(segment.layout, slot, old)
            stored = plan.store.get(segment)
            if not isinstance(stored, codec.segment_type()):
                fresh |= mine
                continue
            cut = cut_lanes(mine, codec.lane_multiple)
            if cut is not None:
                layout = cut.layout(held.keys.shape[0], held.keys.shape[1], held.positions)
                lane, place = lane_of[cut.owners[:, None], cut.index], slot_of[cut.owners[:, None], cut.index]
                segments.append(plan.store.put(stored.regather(lane, place, layout)))
                cuts.append(cut)
        old = fresh
    cut = cut_lanes(old, codec.lane_multiple)
    if cut is not None:
        segment = gather_held(held, cut)
        if encoding:
            segment = codec.encode(segment.layout, segment.keys, segment.values, held.first)
        segments.append(plan.store.put(segment))
        cuts.append(cut)
    state.tail.drop_oldest(state.tail.length - newest)
    if newest:
        recent = cut_lanes(keep & held.recent(newest))
        assert recent is not None
        cuts.append(recent)
    state.segments = segments
    _take_mass(state, held, cuts)


def waits(state: LayerState, plan: Plan) -> bool:
    """Whether the layer holds segments that are not encoded yet; see `keep_only`."""
    encoded = state.codec(plan).segment_type()
    return not all(isinstance(plan.store.get(segment), encoded) for segment in state.segments)


def _common_newest(state: LayerState, held: Held, keep: Tensor, recents: int) -> int:
    """How many of the newest columns can stay a tail: all the recents if every row and head keeps them all."""
    assert state.tail is not None
    recents = min(recents, state.tail.length, state.seen)
    newest = (held.positions >= state.seen - recents) & keep
    return recents if bool((newest.sum(-1) == recents).all()) else 0


def _take_mass(state: LayerState, held: Held, cuts: list[Cut]) -> None:
    if held.mass is not None:
        flat = held.mass.flatten(0, 1)
        mass = tuple(flat[cut.owners[:, None], cut.index] for cut in cuts)
        state.evidence = replace(state.evidence, mass=mass)
