"""Evictions that follow from ages alone: a decoding layer drops the tokens behind its first ones, where they lie.

Where a score ranks all tokens but the first by age, all rows and heads of a layer drop the same slots of the tail: no
score has to be made, no kept set has to be found, and no token that stays has to move but the few in front. Beside a
codec the oldest segment behind the first tokens loses its first slots, and the tail is encoded when it is a block. What
is held is what `engine.evict` would leave, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.engine.budget import waiting_tokens
from kvtailor.merge.drop import Drop
from kvtailor.ops import huge_pages
from kvtailor.store.recent_window import SPARE, capacity_for
from kvtailor.types import Layout, Needs, Segment
from kvtailor.types.checked_returns import checked_budgets, checked_segment

if TYPE_CHECKING:
    from kvtailor.encode.contract import Codec
    from kvtailor.engine.budget import Budget
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.plan import Plan
    from kvtailor.types import Visibility

__all__ = ["drop_middle", "first_tokens", "split_oldest", "waits_in_tail", "without_first"]

_LONG = 2
"""Blocks from which on the oldest segment behind the first tokens is split, so that little moves at each token."""


def first_tokens(plan: Plan) -> int | None:
    """Return how many first tokens a plan holds beside the newest; None where more than ages decides what stays.

    None as well where it evicts more rarely than a tail grows: the slots that get free in front would then be held for
    longer than others of a tail. And beside a codec of which no tokens wait to be encoded (`waiting_tokens`), or which
    encodes anew what grows old.
    """
    score, allocate, slack, codec = plan.score, plan.allocate, plan.slack_tokens, plan.encode
    if score is None or score.first_kept is None or slack is None or slack >= SPARE or plan.scope != "layer":
        return None
    even = allocate.even_heads and allocate.even_layers and not allocate.needs_scores and allocate.needs == Needs()
    best = plan.select.exact and plan.select.takes_best
    plain = codec.exact and codec.block == 0
    waits = waiting_tokens(plan, codec) > 0 and not codec.ages and not score.recent and not plan.needs.mass
    return score.first_kept if even and best and (plain or waits) and type(plan.merge) is Drop else None


def waits_in_tail(plan: Plan, codec: Codec) -> int:
    """Return how many tokens a layer's tail holds when they are encoded, as a block; 0: evictions leave none in it.

    Args:
        plan: of the layer.
        codec: the plan's, as it is on the layer.
    """
    return 0 if first_tokens(plan) is None or codec.ages else waiting_tokens(plan, codec)


def drop_middle(state: LayerState, plan: Plan, first: int, visible: Visibility, budget: Budget, layers: int) -> bool:
    """Cut a layer back to its budget where ages decide what that leaves; return whether it could be done so.

    It can after decoded tokens without padding, where the tail has all that is held, and the first tokens of the text;
    or where these are a segment of their own, and all that is behind them is encoded or in the tail.

    Args:
        state: of the layer, for which an eviction is due.
        plan: whose allocator says how many tokens stay.
        first: see `first_tokens`.
        visible: of the forward that has just ended.
        budget: of all layers.
        layers: how many layers the plan compresses.

    Raises:
        MethodError: the allocator returns something else than its contract promises.
    """
    tail, share, allocate = state.stored.tail, state.model.share, plan.allocate
    assert tail is not None and plan.score is not None
    if visible.real is not None or not state.clock.decoding:
        return False
    codec = state.codec(plan)
    block, held = waits_in_tail(plan, codec), tail.length
    if block:
        if not plan.store.is_memory or state.layer_group or not _all_coded(state.stored.segments, codec):
            return False
        held += sum(each.layout.size for each in state.stored.segments)
    elif state.stored.segments or tail.anchor < first or tail.slots > capacity_for(tail.length):
        return False
    shape = (state.rows, 1, share.total(state.heads))
    capacity, floor = torch.full(shape, held), budget.each.clamp(max=plan.score.recent, min=0)
    floor = floor.clamp(max=held)[:, None, None].expand(shape)
    request = BudgetRequest(
        total=budget.total,
        row_tokens=budget.row_tokens,
        capacity=capacity,
        floor=floor,
        layers=(state.index,),
        num_layers=layers,
    )
    last = layers == 1
    budgets = checked_budgets(
        allocate,
        allocate.allocate(request),
        budget.total,
        floor,
        capacity,
        settled=True,
        spare=shape[2] - 1 if last else int(budget.total.max()),
    )
    kept = int(budgets.min())
    if kept <= first or kept != int(budgets.max()):
        return False
    if kept == held:
        return True
    if not block:
        tail.drop_behind(first, held - kept)
    elif kept < first + tail.length or not _parted(state.stored.segments, first):
        return False
    else:
        _drop_oldest(state, first, held - kept)
        if tail.length >= block:
            _encode_whole_tail(state, plan)
        split_oldest(state, plan)
    state.clock.reindex = True
    return True


def split_oldest(state: LayerState, plan: Plan) -> None:
    """Let the oldest block of codes behind the first tokens be a segment of its own, where it is part of a long one.

    Called where an eviction while decoding has dropped tokens, however it was made. The next ones would else move all
    of that segment, at each token.
    """
    first, block, segments = first_tokens(plan), waits_in_tail(plan, state.codec(plan)), state.stored.segments
    at = 1 if first else 0
    if not block or not state.clock.decoding or len(segments) <= at:
        return
    oldest = segments[at]
    if not _even(oldest) or oldest.layout.size <= _LONG * block:
        return
    state.stored.segments = [*segments[:at], *(_slots(oldest, *ends) for ends in ((0, block), (block, None)))]
    state.stored.segments += segments[at + 1 :]


def without_first(segment: Segment, count: int) -> Segment:
    """Return an encoded segment, one lane for each row and kv head, without the first `count` slots of each lane."""
    return _slots(segment, count, None)


def _slots(segment: Segment, begin: int, end: int | None) -> Segment:
    layout = segment.layout
    device = next(iter(segment.tensors().values())).device
    positions = layout.positions
    if positions is None:
        positions = layout.columns(device).to(torch.int32).expand(layout.lanes, -1)
    positions = positions[:, begin:end].contiguous()
    lane = torch.arange(layout.lanes, device=device)[:, None].expand(positions.shape)
    slot = torch.arange(layout.size, device=device)[begin:end].expand(positions.shape)
    part = Layout(rows=layout.rows, heads=layout.heads, size=positions.shape[1], positions=positions)
    return segment.regather(lane, slot, part)


def _even(segment: Segment) -> bool:
    """Whether it has one lane for each row and kv head, all of whose slots are filled."""
    return segment.layout.owner is None and segment.layout.lengths is None


def _all_coded(segments: Sequence[Segment], codec: Codec) -> bool:
    """Whether all segments are of a codec, with as many tokens in each row and head."""
    return all(_even(each) and isinstance(each, codec.segment_type()) for each in segments)


def _parted(segments: Sequence[Segment], first: int) -> bool:
    """Whether the text's `first` tokens are a segment of their own, ahead of all others."""
    if not first:
        return True
    if not segments or segments[0].layout.size != first:
        return False
    columns = segments[0].layout.columns(torch.device("cpu"))
    return bool((columns == torch.arange(first)).all())


def _drop_oldest(state: LayerState, first: int, count: int) -> None:
    """Drop so many codes behind the first tokens, of whole segments and of the first that keeps some."""
    at = 1 if first else 0
    segments = list(state.stored.segments)
    while count and segments[at].layout.size <= count:
        count -= segments.pop(at).layout.size
    if count:
        segments[at] = without_first(segments[at], count)
    state.stored.segments = segments


def _encode_whole_tail(state: LayerState, plan: Plan) -> None:
    tail, seen = state.stored.tail, state.stored.seen
    assert tail is not None
    plain = tail.as_segment()
    columns = plain.layout.columns(plain.keys.device).to(torch.int32).expand(plain.layout.lanes, -1).contiguous()
    layout = Layout(rows=state.rows, heads=state.heads, size=tail.length, positions=columns)
    first = torch.zeros(state.rows, dtype=torch.int64, device=plain.keys.device)
    keys, values = huge_pages.copied(plain.keys), huge_pages.copied(plain.values)
    codec = state.encoder(plan, first)
    found = codec.encode_aged(layout, keys, values, first, newest=seen - 1, seen=seen)
    checked_segment(codec, found, codec.segment_type(), layout)
    state.stored.segments = [*state.stored.segments, found]
    tail.clear()
