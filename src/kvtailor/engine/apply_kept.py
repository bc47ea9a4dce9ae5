"""How a kept set becomes what a layer holds: the tail itself, or segments and a tail of the newest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.engine.layer_group import join
from kvtailor.errors import CacheMisuse
from kvtailor.merge.contract import Merged
from kvtailor.ops.lanes.kept import place_among_kept
from kvtailor.ops.lanes.ragged import Cut, cut_lanes, gather_held, tokens_of_part
from kvtailor.ops.segments.weighted import Weighted, without_weight
from kvtailor.plan.registry import name_of
from kvtailor.types import Held, PlainSegment, Segment
from kvtailor.types.checked_returns import checked_segment, checked_tensor, refuse

if TYPE_CHECKING:
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.merge.contract import Merger
    from kvtailor.plan import Plan

__all__ = ["apply_kept", "waits"]


def apply_kept(
    state: LayerState,
    plan: Plan,
    held: Held,
    slots: list[Tensor],
    keep: Tensor,
    *,
    most: int,
    recent: int,
    encoding: bool = True,
) -> None:
    """Lets a layer hold only a kept set, with what the plan's merger folds into it.

    Args:
        state: of the layer.
        plan: whose codec stores what leaves the tail.
        held: the padded rows that were scored.
        slots: for each part the index of its slots along them.
        keep: (b, h, n) bool.
        most: how many a head keeps at most.
        recent: the newest tokens that stay in every row and head.
        encoding: False where the layer will be cut again in the same eviction: then what is not encoded yet waits as it
            is, so that it is encoded once, for what stays in the end. A layer that is encoded together with others
            waits for the last of them.

    Raises:
        CacheMisuse: what was folded gives NaN or infinity.
    """
    assert state.tail is not None
    codec = state.codec(plan)
    newest = _common_newest(state, held, keep, recent)
    merged = _merged(state, plan, held, slots, keep, newest, most)
    if codec.exact and codec.block == 0 and not plan.merge.weighted:
        cut = cut_lanes(keep)
        if cut is not None and cut.owner is None:
            state.tail.replace(_gather(held, keep, merged, cut))
            state.segments = []
            _take_mass(state, held, [cut])
            return
    old = keep & ~held.recent(newest) if newest else keep
    cuts: list[Cut] = []
    segments: list[Segment] = []
    if not codec.exact:
        # What is encoded moves as codes; only what waits or still is in the tail is encoded now.
        fresh = torch.zeros_like(old)
        for stored, slot in zip(state.parts(), slots, strict=True):
            mine, lane_of, slot_of = tokens_of_part(stored.layout, slot, old)
            if not isinstance(without_weight(stored), codec.segment_type()):
                fresh |= mine
                continue
            cut = cut_lanes(mine, codec.lane_multiple)
            if cut is not None:
                layout = cut.layout(held.keys.shape[0], held.keys.shape[1], held.positions)
                lane, place = lane_of[cut.owners[:, None], cut.index], slot_of[cut.owners[:, None], cut.index]
                segments.append(stored.regather(lane, place, layout))
                cuts.append(cut)
        old = fresh
    cut = cut_lanes(old, codec.lane_multiple)
    if cut is not None:
        plain = _gather(held, keep, merged, cut)
        now = encoding and not state.layer_group
        seeing = state.encoder(plan, held.first)
        fresh_part: Segment = plain
        if now:
            fresh_part = seeing.encode(plain.layout, plain.keys, plain.values, held.first)
            checked_segment(seeing, fresh_part, codec.segment_type(), plain.layout)
        segments.append(_weighed(fresh_part, held, keep, merged, cut))
        cuts.append(cut)
    state.tail.drop_oldest(state.tail.length - newest)
    if newest:
        staying = cut_lanes(keep & held.recent(newest))
        assert staying is not None
        cuts.append(staying)
        if merged is not None:
            taken = _gather(held, keep, merged, staying)
            state.tail.rewrite(taken.keys, taken.values)
    state.segments = segments
    if encoding and state.completes:
        everything = [each.here() for each in state.layer_group]
        join(everything, codec, held.first)
        for each, own in zip(state.layer_group, everything, strict=True):
            each.segments = own
    _take_mass(state, held, cuts)


def waits(state: LayerState, plan: Plan) -> bool:
    """Whether the layer holds segments that are not encoded yet; see `apply_kept`."""
    encoded = state.codec(plan).segment_type()
    return not all(isinstance(without_weight(segment), encoded) for segment in state.here())


def _merged(
    state: LayerState, plan: Plan, held: Held, slots: list[Tensor], keep: Tensor, newest: int, most: int
) -> Merged | None:
    """What the plan's merger makes of the kept tokens, `most` in a head; None where they stay as they are."""
    if not bool((held.valid & ~keep).any()):
        return None
    into = keep & ~_encoded(state, plan, slots, keep)
    if plan.merge.weighted and newest:
        into &= ~held.recent(newest)
    merged = plan.merge.merge(held.within(plan.merge.needs), keep, into)
    if merged is not None:
        _check_merged(plan.merge, merged, held, most)
    if merged is not None and not bool(torch.isfinite(merged.keys).all() & torch.isfinite(merged.values).all()):
        raise CacheMisuse(
            f"layer {state.index} of the compressed layers: {name_of(plan.merge)} folds dropped tokens into kept ones "
            f"and gets NaN or infinity, in {merged.values.dtype}; check the model's inputs and dtype (float16 overflow "
            "is the usual cause), or leave it out"
        )
    return merged


def _check_merged(merge: Merger, merged: object, held: Held, most: int) -> None:
    """Raises `MethodError` where a merger returns something else than the kept tokens, `most` of each head."""
    if not isinstance(merged, Merged):
        raise refuse(merge, f"returned a {type(merged).__name__}, where Merged or None is due")
    for name, found, like in (("keys", merged.keys, held.keys), ("values", merged.values, held.values)):
        shape = (*held.positions.shape[:2], most, like.shape[-1])
        checked_tensor(merge, f"merged {name}", found, shape, like.dtype, like.device)
    if merged.log_weight is not None:
        if not merge.weighted:
            raise refuse(merge, "returned weights, and does not declare that it is `weighted`")
        shape = (*held.positions.shape[:2], most)
        checked_tensor(merge, "log_weight", merged.log_weight, shape, torch.float32, held.keys.device)


def _encoded(state: LayerState, plan: Plan, slots: list[Tensor], keep: Tensor) -> Tensor:
    """(b, h, n) bool: kept tokens of which there is only a lossy code, which moves but is never written again."""
    codec = state.codec(plan)
    found = torch.zeros_like(keep)
    if not codec.exact:
        for segment, slot in zip(state.here(), slots, strict=False):
            if isinstance(without_weight(segment), codec.segment_type()):
                found |= tokens_of_part(segment.layout, slot, keep)[0]
    return found


def _gather(held: Held, keep: Tensor, merged: Merged | None, cut: Cut) -> PlainSegment:
    """The kept tokens in the lanes of a cut, as they are from now on."""
    if merged is None:
        return gather_held(held, cut)
    at = cut.owners[:, None], place_among_kept(keep).flatten(0, 1)[cut.owners[:, None], cut.index]
    layout = cut.layout(held.keys.shape[0], held.keys.shape[1], held.positions)
    return PlainSegment(layout=layout, keys=merged.keys.flatten(0, 1)[at], values=merged.values.flatten(0, 1)[at])


def _weighed(segment: Segment, held: Held, keep: Tensor, merged: Merged | None, cut: Cut) -> Segment:
    """The segment of a cut with the weights of its tokens, where any token of the layer has one."""
    weights, index = held.log_weight, cut.index
    if merged is not None and merged.log_weight is not None:
        weights, index = merged.log_weight, place_among_kept(keep).flatten(0, 1)[cut.owners[:, None], cut.index]
    if weights is None:
        return segment
    log_weight = weights.flatten(0, 1)[cut.owners[:, None], index]
    return Weighted(layout=segment.layout, inner=segment, log_weight=log_weight)


def _common_newest(state: LayerState, held: Held, keep: Tensor, recent: int) -> int:
    """How many of the newest columns can stay a tail: all the recent window if every row and head keeps them all."""
    assert state.tail is not None
    recent = min(recent, state.tail.length, state.seen)
    newest = (held.positions >= state.seen - recent) & keep
    return recent if bool((newest.sum(-1) == recent).all()) else 0


def _take_mass(state: LayerState, held: Held, cuts: list[Cut]) -> None:
    if held.mass is not None:
        flat = held.mass.flatten(0, 1)
        mass = tuple(flat[cut.owners[:, None], cut.index] for cut in cuts)
        state.evidence = replace(state.evidence, mass=mass)
