"""What a layer holds after an eviction, as a tail alone, or as segments and a tail.

By a kept set: `compute_contents` computes what a layer holds afterwards; `apply_contents` lets the layer hold it.

By encoding: `encode_tail` encodes the oldest tokens of the tail, and encodes segments again that have grown old.

By age: `drop_middle` drops tokens behind a decoding layer's first ones in place. If a score ranks all tokens but the
first by age, all rows and heads of a layer drop the same slots of the tail. Then no score and no kept set is computed,
and only the few tokens in front move. With a codec, the oldest segment behind the first tokens loses its first slots,
and the tail is encoded when it has a block. The layer then holds what it would after an eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.engine.budget import waiting_tokens
from kvtailor.engine.state import LayerState, encode_parts, join_parts
from kvtailor.errors import CacheMisuse
from kvtailor.merge.contract import Merged
from kvtailor.merge.drop import Drop
from kvtailor.ops import huge_pages
from kvtailor.ops.lanes.kept import place_among_kept
from kvtailor.ops.lanes.ragged import Cut, cut_lanes, cut_of_part, gather_held, tokens_of_part
from kvtailor.ops.segments.around import Weighted, without_weight
from kvtailor.ops.segments.latent_keys import parted
from kvtailor.plan.registry import name_of
from kvtailor.store.recent_window import SPARE, Tail, capacity_for
from kvtailor.types import Held, Layout, Needs, PlainSegment, Segment
from kvtailor.types.checked_returns import (
    check_budgets,
    check_segment,
    check_tensor,
    contract_error,
    is_of_others,
)
from kvtailor.types.late_checks import all_finite, require_none, send
from kvtailor.types.visibility import first_real, real_before

if TYPE_CHECKING:
    from kvtailor.encode.contract import Codec
    from kvtailor.engine.budget import Budget
    from kvtailor.merge.contract import Merger
    from kvtailor.plan import Plan
    from kvtailor.select.contract import Selector
    from kvtailor.types import Visibility
    from kvtailor.types.late_checks import LateChecks

__all__ = [
    "HeadCounts",
    "LayerContents",
    "apply_contents",
    "drop_middle",
    "encode_tail",
    "first_counted",
    "count_first_tokens",
    "count_leaving",
    "has_unencoded",
    "may_stay_tail",
    "split_oldest",
    "count_waiting_in_tail",
    "compute_contents",
    "drop_first_slots",
]

_Seen = TypeVar("_Seen", Held, Merged)


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """How many tokens the rows and heads of a layer on this process hold before and after an eviction.

    Attributes:
        before: (b, h) int64 on the CPU: held before it.
        kept: (b, h) int64 on the CPU: held after it.
        newest: how many of the newest columns every head keeps, as far as it holds them, by what the scorer says.
        sure: every head held the newest columns that must stay, and the selector promises to keep them. If it breaks
            that promise, the cache raises an error before anything is read again.
    """

    before: Tensor
    kept: Tensor
    newest: int = 0
    sure: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerContents:
    """What a layer holds after an eviction.

    Attributes:
        segments: in time order.
        tail: replaces the whole tail; None: the newest `recent` tokens of the tail stay, and the others leave it.
        recent: how many of the newest columns every row and head holds in the tail.
        waits: the tail stays as it is, free slots included, until it has a block.
        run, anchor: see `Tail`, of a tail that is replaced.
        rewritten: keys (b * h, recent, d) and values (b * h, recent, dv) that replace those that stay in the tail;
            None: they do not change.
        mass: (m, s) float32 attention mass of each part that is held now, in time order; None where none is gathered.
    """

    segments: tuple[Segment, ...] = ()
    tail: PlainSegment | None = None
    recent: int = 0
    waits: bool = False
    run: int | None = None
    anchor: int = 0
    rewritten: tuple[Tensor, Tensor] | None = None
    mass: tuple[Tensor, ...] | None = None


def compute_contents(
    state: LayerState,
    plan: Plan,
    view: tuple[Held, Sequence[Tensor]],
    keep: Tensor,
    *,
    most: int,
    recent: int,
    encoding: bool = True,
    counts: HeadCounts | None = None,
) -> LayerContents:
    """Compute what a layer holds after an eviction: the kept set, with dropped tokens merged into it.

    Args:
        state: of the layer; it does not change.
        plan: its codec stores what leaves the tail.
        view: what `view_held` returned: the padded rows that were scored, and for each part the index of its slots
            along them.
        keep: (b, h, n) bool.
        most: how many tokens a head keeps at most.
        recent: the newest tokens that stay in every row and head.
        encoding: False if the same eviction will cut the layer again: tokens that are not encoded yet then stay so, and
            are encoded once, after the last cut. Layers that are encoded together wait for the last of them anyway.
        counts: how many tokens stay; None: they are counted here, and the host waits for the device.

    Raises:
        CacheMisuse: merging gives NaN or infinity.
        MethodError: the merger or the codec breaks its contract.
    """
    held, slots = view
    codec = state.codec(plan)
    if counts is None:
        counts = HeadCounts(before=held.counts().cpu(), kept=keep.sum(-1).cpu())
    recent = _common_recent(state, held, keep, recent, plan.select if counts.sure else None)
    merged = None
    if bool((counts.kept < counts.before).any()):
        merged = _merge(state, plan, replace(held, kept=counts.kept), slots, keep, recent, most)
    if may_stay_tail(plan, codec):
        whole = cut_lanes(keep, counts=counts.kept)
        # Every head keeps the same number: one lane for each (row, head), which a tail can hold.
        if whole is not None and whole.owner is None:
            return _as_tail(state, plan, held, keep, merged, whole, recent, counts)
    waits = encoding and _waits(state, plan, counts)
    recent = state.stored.tail.length if waits and state.stored.tail else recent
    # (b, h, n) bool: what leaves the tail, or has left it before.
    old = keep & ~held.recent(recent) if recent else keep
    # (b, h): how many those are. All heads keep the same recent window.
    leaving = counts.kept - recent
    cuts, segments = [], []
    front = _mark_first(plan, held)
    if not codec.exact:
        old, moved = _move_codes(state, plan, held, slots, old, front)
        cuts, segments = [cut for cut, _ in moved], [segment for _, segment in moved]
        for cut in cuts:
            leaving = leaving - cut.counts.view_as(leaving)
    rows = torch.ones(state.rows, dtype=torch.bool)
    if encoding and not state.layer_group:
        rows = _waiting_rows(state, plan, leaving)
    for row_waits in (False, True):
        if not bool((rows == row_waits).any()):
            continue
        mask, counted = _of_rows(rows == row_waits, old, leaving)
        runs: list[tuple[Tensor, Tensor, int]] = [(mask, counted, 0)]
        if not row_waits:
            runs = _make_runs(state, plan, held, mask, counted, recent)
        for those, number, newest in _split_runs(runs, front if plan.attend.in_cache_positions else None):
            fresh = cut_lanes(those, codec.lane_multiple, number)
            if fresh is not None:
                plain = _gather(state, held, keep, merged, fresh)
                stored = plain if row_waits else _encode(state, plan, held, plain, newest)
                segments.append(_add_weights(stored, held, keep, merged, fresh))
                cuts.append(fresh)
    rewritten = None
    if recent:
        staying = cut_lanes(keep & held.recent(recent), counts=torch.full_like(counts.kept, recent))
        assert staying is not None
        cuts.append(staying)
        if merged is not None:
            taken = _gather(state, held, keep, merged, staying)
            rewritten = taken.keys, taken.values
    return LayerContents(
        segments=tuple(segments), recent=recent, waits=waits, rewritten=rewritten, mass=_mass(held, cuts)
    )


def _as_tail(
    state: LayerState,
    plan: Plan,
    held: Held,
    keep: Tensor,
    merged: Merged | None,
    cut: Cut,
    recent: int,
    counts: HeadCounts,
) -> LayerContents:
    """Return contents that are a tail alone, in the lanes of `cut`: every head keeps the same number of tokens."""
    before = state.stored.tail
    known = min(counts.newest, (before.run or 0) if before else 0)
    return LayerContents(
        tail=_gather(state, held, keep, merged, cut),
        recent=recent,
        run=max(recent, known),
        anchor=_count_anchor(before, plan, held, counts),
        mass=_mass(held, [cut]),
    )


def apply_contents(
    state: LayerState, plan: Plan, kept: LayerContents, *, first: Tensor | None, encoding: bool = True
) -> None:
    """Let a layer hold what `compute_contents` returned, and join the segments that layers share.

    Args:
        state: of the layer.
        plan: see `compute_contents`.
        kept: what `compute_contents` returned.
        first: (b,) column of each row's first real token.
        encoding: see `compute_contents`.

    Raises:
        CacheMisuse: layers that share segments hold different tokens.
    """
    tail = state.stored.tail
    assert tail is not None
    if kept.tail is not None:
        tail.replace(kept.tail, kept.run, kept.anchor)
    else:
        if not kept.waits:
            tail.drop_oldest(tail.length - kept.recent)
        if kept.rewritten is not None:
            tail.rewrite(*kept.rewritten)
    state.stored.segments = list(kept.segments)
    if kept.tail is None and encoding and state.completes:
        group = state.layer_group
        for each, own in zip(group, join_parts([e.here() for e in group], state.codec(plan), first), strict=True):
            each.stored.segments = own
    if kept.mass is not None:
        state.observed.evidence = replace(state.observed.evidence, mass=kept.mass)


def has_unencoded(state: LayerState, plan: Plan) -> bool:
    """Return whether the layer holds segments that are not encoded yet; see `encoding` of `compute_contents`."""
    encoded = state.codec(plan).segment_type()
    return not all(isinstance(without_weight(segment), encoded) for segment in state.here())


def _mark_first(plan: Plan, held: Held) -> Tensor | None:
    """Return the first tokens (b, h, n) bool of each row if they become a segment of their own; else None.

    They do if the attention turns only their keys, by the number of tokens missing behind them; and if tokens behind
    them are dropped by age from codes that hold both.
    """
    first = None if plan.score is None else plan.score.first_kept
    if not first or not (plan.attend.in_cache_positions or count_first_tokens(plan) is not None):
        return None
    return held.positions < held.first.to(held.positions.device)[:, None, None] + first


def _split_runs(
    runs: Sequence[tuple[Tensor, Tensor, int]], front: Tensor | None
) -> Sequence[tuple[Tensor, Tensor, int]]:
    """Split runs of `_make_runs` so that the tokens `front` (b, h, n) bool have runs of their own."""
    if front is None:
        return runs
    # (runs, b, h) in one transfer.
    counts = torch.stack([(mask & front).sum(-1) for mask, _, _ in runs]).cpu()
    found = []
    for (mask, counted, newest), ahead in zip(runs, counts, strict=True):
        found += [(mask & front, ahead, newest), (mask & ~front, counted - ahead, newest)]
    return found


def _move_codes(
    state: LayerState, plan: Plan, held: Held, slots: Sequence[Tensor], old: Tensor, front: Tensor | None
) -> tuple[Tensor, list[tuple[Cut, Segment]]]:
    """Return the tokens of `old` (b, h, n) bool that are not encoded yet, and the encoded segments with their cuts.

    Codes are moved and never encoded again. Tokens in the tail, and those that wait to be encoded, are left to the
    codec.
    """
    codec = state.codec(plan)
    # fresh (b, h, n) bool.
    fresh, codes = torch.zeros_like(old), list[_Codes]()
    for stored, slot in zip(state.parts(), slots, strict=True):
        # mine (b, h, n) bool: tokens of this part that stay. lane_of, slot_of (b * h, n): where each stands in it.
        mine, lane_of, slot_of = tokens_of_part(stored.layout, slot, old)
        if not isinstance(without_weight(stored), codec.segment_type()):
            fresh |= mine
            continue
        masks = [mine] if front is None else [mine & front, mine & ~front]
        for mask in masks:
            codes.append(_Codes(stored, slot, mask, lane_of, slot_of, front=mask is not masks[-1]))
    # (parts, b, h): how many of each part stay, in one transfer.
    counts = torch.stack([each.mine.sum(-1) for each in codes]).cpu() if codes else ()
    moved, run = list[tuple[Cut, Segment]](), list[tuple[_Codes, Tensor]]()
    for each, count in zip(codes, counts, strict=True):
        if not bool(count.any()):
            continue
        whole = bool((count == each.stored.layout.counts()).all())
        if run and (whole or each.front != run[-1][0].front):
            moved += _move_together(run, codec.lane_multiple, held)
            run = []
        if whole:
            # All of it stays: nothing has to move.
            moved.append((cut_of_part(each.stored.layout, each.slots), each.stored))
        else:
            run.append((each, count))
    return fresh, moved + _move_together(run, codec.lane_multiple, held)


class _Codes(NamedTuple):
    """Tokens of an encoded segment that stay.

    Attributes:
        stored: the segment.
        slots: (m, s) int64 where its slots stand in the padded rows.
        mine: (b, h, n) bool: the tokens.
        lane, slot: (b * h, n) int64: where each stands in it.
        front: they are the first of each row, which become a segment of their own.
    """

    stored: Segment
    slots: Tensor
    mine: Tensor
    lane: Tensor
    slot: Tensor
    front: bool


def _move_together(run: Sequence[tuple[_Codes, Tensor]], multiple: int, held: Held) -> list[tuple[Cut, Segment]]:
    """Return what stays of adjacent segments, with its cuts, joined into one segment if their encoding allows it.

    Otherwise a segment would exist as long as one of its tokens, and evictions would leave many small ones.

    Args:
        run: the tokens, and their number for each row and head, (b, h) int64 on the CPU.
        multiple: see `cut_lanes`.
        held: of the layer.
    """
    if not run:
        return []
    rows, heads = held.keys.shape[:2]
    (first, counts), others, lanes = run[0], run[1:], 0
    mine, lane, slot = first.mine, first.lane, first.slot
    if others:
        for (before, _), (each, count) in pairwise(run):
            lanes += before.stored.layout.lanes
            here = each.mine.flatten(0, 1)
            lane, slot = torch.where(here, each.lane + lanes, lane), torch.where(here, each.slot, slot)
            mine, counts = mine | each.mine, counts + count
    cut = cut_lanes(mine, multiple, counts)
    assert cut is not None
    # (m', 1) and (m', s'): for each new slot the owner of its lane, and the token along n that fills it.
    at = cut.owners[:, None], cut.index
    layout = cut.layout(rows, heads, held.positions)
    if not others:
        return [(cut, first.stored.regather(lane[at], slot[at], layout))]
    found = first.stored.regather_with([each.stored for each, _ in others], lane[at], slot[at], layout)
    if found is not None:
        return [(cut, found)]
    return [each for alone in run for each in _move_together([alone], multiple, held)]


def _waiting_rows(state: LayerState, plan: Plan, leaving: Tensor) -> Tensor:
    """Return (b,) bool on the CPU: the rows whose tokens that are not encoded yet wait until there are more.

    Otherwise a plan that evicts at each decoded token would make a segment for each. A row does not wait for other
    rows, so that it is encoded as it would be alone.

    Args:
        state, plan: see `compute_contents`.
        leaving: (b, h) int64 on the CPU: how many tokens of each head are not encoded.
    """
    enough = waiting_tokens(plan, state.codec(plan)) if state.clock.decoding else 0
    # One answer for all heads of a row, whichever process has them.
    return leaving.amax(1) < enough if not enough else state.model.share.gather(leaving, 1).amax(1) < enough


def _waits(state: LayerState, plan: Plan, counts: HeadCounts) -> bool:
    """Return whether the tail stays as it is, because it has no block yet.

    The host must know that every head keeps all of it, and no older token may wait to be encoded.
    """
    block, tail = count_waiting_in_tail(plan, state.codec(plan)), state.stored.tail
    assert tail is not None
    if not 0 < tail.length < block or not state.clock.decoding or state.layer_group or has_unencoded(state, plan):
        return False
    return min(counts.newest, tail.run or 0) >= tail.length


def _of_rows(rows: Tensor, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens (b, h, n) bool and their counts (b, h) on the CPU, of the rows (b,) bool alone."""
    if bool(rows.all()):
        return tokens, counts
    return tokens & send(rows, tokens.device)[:, None, None], counts * rows[:, None]


def _make_runs(
    state: LayerState, plan: Plan, held: Held, old: Tensor, leaving: Tensor, recent: int
) -> list[tuple[Tensor, Tensor, int]]:
    """Split the tokens `old` (b, h, n) bool, `leaving` (b, h) of each head, along time as the codec asks.

    Each run has its number of tokens for each head, and its last column. The newest `recent` columns are in none.
    """
    codec, seen = state.codec(plan), state.stored.seen
    if not codec.ages or seen == recent:
        return [(old, leaving, seen - 1)]
    ends = [(seen - 1 - age, columns) for columns, age in codec.runs(seen - recent, recent, whole=True)]
    masks = [old & (held.positions > end - columns) & (held.positions <= end) for end, columns in ends]
    # (runs, b, h) in one transfer.
    counts = torch.stack([mask.sum(-1) for mask in masks]).cpu()
    return [(mask, each, end) for mask, each, (end, _) in zip(masks, counts, ends, strict=True)]


def _encode(state: LayerState, plan: Plan, held: Held, plain: PlainSegment, newest: int) -> Segment:
    first = first_counted(state, plan, held)
    codec, seen = state.encoder(plan, first), state.stored.seen
    found = codec.encode_aged(plain.layout, plain.keys, plain.values, first, newest=newest, seen=seen)
    check_segment(codec, found, codec.segment_type(), plain)
    return found


def _merge(
    state: LayerState, plan: Plan, held: Held, slots: Sequence[Tensor], keep: Tensor, recent: int, most: int
) -> Merged | None:
    """Return what the plan's merger makes of the kept tokens, at most `most` of a head; None: no change.

    At least one token is not kept.
    """
    # Of a lossy code the state behind it is gone: it moves, but nothing can be folded into it.
    exact = state.codec(plan).exact
    into = keep if exact else keep & ~_mark_codes(state, plan, slots, keep)
    if plan.merge.weighted and recent:
        into = into & ~held.recent(recent)
        # All heads keep the same recent window.
        held = replace(held, taking=held.kept - recent if exact and held.kept is not None else None)
    merged = plan.merge.merge(held.within(plan.merge.needs), keep, into)
    if merged is None:
        return None
    _check_merged(plan.merge, merged, held, most)
    said = (
        f"layer {state.index} of the compressed layers: {name_of(plan.merge)} folds dropped tokens into kept ones "
        f"and gets NaN or infinity, in {merged.values.dtype}; check the model's inputs and dtype (float16 overflow "
        "is the usual cause), or leave it out"
    )
    finite = all_finite(merged.keys) & all_finite(merged.values)
    require_none(~finite, partial(CacheMisuse, said))
    return merged


def _check_merged(merge: Merger, merged: object, held: Held, most: int) -> None:
    """Raise `MethodError` unless a merger returned the kept tokens, at most `most` of each head."""
    if not isinstance(merged, Merged):
        raise contract_error(merge, f"returned a {type(merged).__name__}, where Merged or None is due")
    for name, found, like in (("keys", merged.keys, held.keys), ("values", merged.values, held.values)):
        shape = (*held.positions.shape[:2], most, like.shape[-1])
        check_tensor(merge, f"merged {name}", found, shape, like.dtype, like.device)
    if merged.log_weight is not None:
        if not merge.weighted:
            raise contract_error(merge, "returned weights, and does not declare that it is `weighted`")
        shape = (*held.positions.shape[:2], most)
        check_tensor(merge, "log_weight", merged.log_weight, shape, torch.float32, held.keys.device)


def _mark_codes(state: LayerState, plan: Plan, slots: Sequence[Tensor], keep: Tensor) -> Tensor:
    """Return (b, h, n) bool: the kept tokens of which only a lossy code is left."""
    codec = state.codec(plan)
    found = torch.zeros_like(keep)
    for segment, slot in zip(state.here(), slots, strict=False):
        if isinstance(without_weight(segment), codec.segment_type()):
            found |= tokens_of_part(segment.layout, slot, keep)[0]
    return found


def _gather(state: LayerState, held: Held, keep: Tensor, merged: Merged | None, cut: Cut) -> PlainSegment:
    """Return the kept tokens in the lanes of a cut, as they are stored from now on."""
    if state.model.latents is not None:
        # The scorer saw one kv head of joined keys; what is stored are their two parts.
        held = _split_latents(held)
        merged = None if merged is None else _split_latents(merged)
    if merged is None:
        return gather_held(held, cut)
    # `merged` holds kept tokens alone, (b, h, k, d): index along n -> place among the kept ones of the same head.
    at = cut.owners[:, None], place_among_kept(keep).flatten(0, 1)[cut.owners[:, None], cut.index]
    layout = cut.layout(held.keys.shape[0], held.keys.shape[1], held.positions)
    keys, values = (huge_pages.picked(states.flatten(0, 1), at) for states in (merged.keys, merged.values))
    return PlainSegment(layout=layout, keys=keys, values=values)


def _split_latents(seen: _Seen) -> _Seen:
    """Return a copy with latents as keys and rotated keys as values."""
    keys, values = parted(seen.keys, seen.values)
    return replace(seen, keys=keys, values=values)


def _add_weights(segment: Segment, held: Held, keep: Tensor, merged: Merged | None, cut: Cut) -> Segment:
    """Return the segment of a cut with the weights of its tokens, if any token of the layer has one."""
    weights, index = held.log_weight, cut.index
    if merged is not None and merged.log_weight is not None:
        # The same change of index as in `_gather`.
        weights, index = merged.log_weight, place_among_kept(keep).flatten(0, 1)[cut.owners[:, None], cut.index]
    if weights is None:
        return segment
    log_weight = weights.flatten(0, 1)[cut.owners[:, None], index]
    return Weighted(layout=segment.layout, inner=segment, log_weight=log_weight)


def _common_recent(state: LayerState, held: Held, keep: Tensor, recent: int, promised: Selector | None) -> int:
    """Return how many of the newest columns can stay in the tail: `recent` if every row and head keeps them, else 0.

    A tail holds the same columns for all heads. If one head drops any of them, all kept tokens go into segments. If a
    selector has `promised` that all keep them (see `HeadCounts`), the host does not wait for the device to see it.
    """
    assert state.stored.tail is not None
    recent = min(recent, state.stored.tail.length, state.stored.seen)
    newest = (held.positions >= state.stored.seen - recent) & keep
    if promised is not None and keep.device.type != "cpu":
        said = f"kept fewer than the newest {recent} tokens, all of which must stay, in a row and head"
        require_none(newest.sum(-1) != recent, lambda: contract_error(promised, said))
        return recent
    # One answer for all heads of the layer, whichever process has them: else some would be encoded and others not.
    return recent if state.model.share.all(bool((newest.sum(-1) == recent).all())) else 0


def _count_anchor(before: Tail | None, plan: Plan, held: Held, counts: HeadCounts) -> int:
    """Return how many of the first columns the host knows that all heads keep; 0 with padding (see `Held.front`)."""
    first = count_first_tokens(plan)
    if first is None or held.front is None or before is None or before.anchor < first:
        return 0
    return first if int(counts.kept.min()) > first else 0


def _mass(held: Held, cuts: Sequence[Cut]) -> tuple[Tensor, ...] | None:
    """Return the mass of what is held now, (m, s) for each cut, from that of the padded rows (b, h, n)."""
    if held.mass is None:
        return None
    flat = held.mass.flatten(0, 1)
    return tuple(flat[cut.owners[:, None], cut.index] for cut in cuts)


def encode_tail(
    state: LayerState, plan: Plan, new_tokens: int, real: Tensor | None, late: LateChecks | None = None
) -> None:
    """Encode the oldest tokens of a layer's tail, and encode segments again that have grown old.

    Layers that are encoded together are all encoded at the call for the last one.

    After a prompt, a chunk or a turn, all tokens are encoded but those that the codec leaves in full precision, so that
    a row of a padded batch is encoded as it would be alone. While decoding, a block is encoded once it is complete.

    Args:
        state: of the layer.
        plan: whose codec encodes.
        new_tokens: of the forward that has just ended; 1 for decoded tokens, however many came at once.
        real: (b, columns) bool, False for padding, which is dropped here; None where nothing is padded.
        late: collects the codec's checks for later; None: they are made at once.
    """
    codec, tail, group = state.codec(plan), state.stored.tail, state.layer_group or (state,)
    waits = state.clock.due or state.pending is not None or (state.layer_group and not state.completes)
    if tail is None or codec.block == 0 or waits:
        return
    count = count_leaving(codec, tail.length, new_tokens)
    ages = bool(codec.ages) and (count > 0 or state.clock.growth == 0)
    if not count and not ages:
        return
    first = None if real is None else counted_from(codec, real)
    with nullcontext() if late is None else late.collecting():
        if ages:
            _renew(state, plan, first)
        if count:
            _encode_oldest(group, plan, count, real, first)


def first_counted(state: LayerState, plan: Plan, held: Held) -> Tensor:
    """Return from where positions of what a layer holds count for its codec, see `Codec.encode`."""
    return held.first if held.real is None else counted_from(state.codec(plan), held.real)


def counted_from(codec: Codec, real: Tensor) -> Tensor:
    """Return from where positions count, see `Codec.encode`, of `real` (b, columns) bool; False for padding."""
    columns, first, positions = torch.arange(real.shape[1], device=real.device), first_real(real), real_before(real)
    if is_of_others(codec) or bool((positions == columns - first[:, None])[real].all()):
        return first
    return columns - positions


def count_leaving(codec: Codec, length: int, new_tokens: int) -> int:
    """Return how many of a tail's oldest tokens are encoded after a forward, see `encode_tail`.

    Args:
        codec: as it is on the layer.
        length: tokens of the tail.
        new_tokens: of the forward.
    """
    more = max(0, length - codec.tail) if codec.block else 0
    return more // codec.block * codec.block if more and new_tokens == 1 else more


def may_stay_tail(plan: Plan, codec: Codec) -> bool:
    """Return whether what an eviction leaves stays a tail where every row and head keeps the same number of tokens."""
    return codec.exact and codec.block == 0 and not plan.merge.weighted


def _renew(state: LayerState, plan: Plan, first: Tensor | None) -> None:
    """Encode segments again that have grown old."""
    held, codec = state.here(), state.codec(plan)
    found = [_renew_segment(each, codec, state.stored.seen, first) for each in held]
    if any(new is not old for new, old in zip(found, held, strict=True)):
        state.stored.segments = found
        # What is carried of them was made from other codes.
        state.clock.reindex = True


def _renew_segment(segment: Segment, codec: Codec, seen: int, first: Tensor | None) -> Segment:
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
        state.stored.segments = [_encode_waiting(each, codec, first, seen) for each in state.here()]
    begin = 0
    for size, age in codec.runs(count, tail.length - count):
        leaving = [_take_oldest(each, begin, size, real, codec.lane_multiple) for each in group]
        begin += size
        if leaving[-1] is None:
            continue
        found = encode_parts(
            [part for part in leaving if part is not None], codec, first, newest=seen - 1 - age, seen=seen
        )
        for each, segment in zip(group, found, strict=True):
            each.stored.segments.append(segment)
    for each in group:
        _drop_oldest(each, count)


def _encode_waiting(segment: Segment, codec: Codec, first: Tensor | None, seen: int) -> Segment:
    """Return the segment, encoded if it was waiting for more tokens (`budget.waiting_tokens`).

    It is older than what is encoded now, and segments are in time order.
    """
    plain = without_weight(segment)
    if not isinstance(plain, PlainSegment) or issubclass(PlainSegment, codec.segment_type()):
        return segment
    newest = int(plain.layout.columns(plain.keys.device).max())
    stored = codec.encode_aged(plain.layout, plain.keys, plain.values, first, newest=newest, seen=seen)
    check_segment(codec, stored, codec.segment_type(), plain)
    return replace(segment, layout=stored.layout, inner=stored) if isinstance(segment, Weighted) else stored


def _take_oldest(state: LayerState, begin: int, count: int, real: Tensor | None, multiple: int) -> PlainSegment | None:
    """Take old tokens of the tail from slot `begin` on, without padding; their evidence becomes a part of its own.

    The slots before `begin` were taken already.
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


_LONG = 2
"""Blocks from which on the oldest segment behind the first tokens is split, so that little moves at each token."""


def count_first_tokens(plan: Plan) -> int | None:
    """Return how many first tokens a plan keeps beside the newest; None: it does not keep tokens by age alone.

    None as well if it evicts more rarely than a tail grows, since slots that become free in front would be held for too
    long; and with a codec for which no tokens wait (`waiting_tokens`), or which encodes old segments again.
    """
    score, allocate, slack, codec = plan.score, plan.allocate, plan.slack_tokens, plan.encode
    if score is None or score.first_kept is None or slack is None or slack >= SPARE or plan.scope != "layer":
        return None
    even = allocate.even_heads and allocate.even_layers and not allocate.needs_scores and allocate.needs == Needs()
    best = plan.select.exact and plan.select.takes_best
    plain = codec.exact and codec.block == 0
    waits = waiting_tokens(plan, codec) > 0 and not codec.ages and not score.recent and not plan.needs.mass
    return score.first_kept if even and best and (plain or waits) and type(plan.merge) is Drop else None


def count_waiting_in_tail(plan: Plan, codec: Codec) -> int:
    """Return how many tokens a layer's tail has when they are encoded as a block; 0: evictions leave none in it.

    Args:
        plan: of the layer.
        codec: the plan's, as it is on the layer.
    """
    return 0 if count_first_tokens(plan) is None or codec.ages else waiting_tokens(plan, codec)


def drop_middle(state: LayerState, plan: Plan, first: int, visible: Visibility, budget: Budget, layers: int) -> bool:
    """Cut a layer back to its budget by age alone; return False, and do nothing, if that is not possible.

    It is possible after decoded tokens without padding, if the tail holds everything, the first tokens of the text
    included; or if these are a segment of their own, and all tokens behind them are encoded or in the tail.

    Args:
        state: of the layer; an eviction is due.
        plan: its allocator says how many tokens stay.
        first: see `count_first_tokens`.
        visible: of the forward that has just ended.
        budget: of all layers.
        layers: how many layers the plan compresses.

    Raises:
        MethodError: the allocator breaks its contract.
    """
    tail, share, allocate = state.stored.tail, state.model.share, plan.allocate
    assert tail is not None and plan.score is not None
    if visible.real is not None or not state.clock.decoding:
        return False
    codec = state.codec(plan)
    block, held = count_waiting_in_tail(plan, codec), tail.length
    if block:
        if not plan.store.is_memory or state.layer_group or not _are_codes(state.stored.segments, codec):
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
    budgets = check_budgets(
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
    elif kept < first + tail.length or not _first_are_apart(state.stored.segments, first):
        return False
    else:
        _drop_behind_first(state, first, held - kept)
        if tail.length >= block:
            _encode_whole_tail(state, plan)
        split_oldest(state, plan)
    state.clock.reindex = True
    return True


def split_oldest(state: LayerState, plan: Plan) -> None:
    """Split the oldest block of codes behind the first tokens off a longer segment.

    Called after each eviction while decoding that has dropped tokens. Otherwise each later one would move the whole
    segment.
    """
    first, block, segments = (
        count_first_tokens(plan),
        count_waiting_in_tail(plan, state.codec(plan)),
        state.stored.segments,
    )
    at = 1 if first else 0
    if not block or not state.clock.decoding or len(segments) <= at:
        return
    oldest = segments[at]
    if not _is_even(oldest) or oldest.layout.size <= _LONG * block:
        return
    state.stored.segments = [*segments[:at], *(_pick_slots(oldest, *ends) for ends in ((0, block), (block, None)))]
    state.stored.segments += segments[at + 1 :]


def drop_first_slots(segment: Segment, count: int) -> Segment:
    """Return an encoded segment, one lane for each row and kv head, without the first `count` slots of each."""
    return _pick_slots(segment, count, None)


def _pick_slots(segment: Segment, begin: int, end: int | None) -> Segment:
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


def _is_even(segment: Segment) -> bool:
    """Whether a segment has one lane for each row and kv head, with all slots filled."""
    return segment.layout.owner is None and segment.layout.lengths is None


def _are_codes(segments: Sequence[Segment], codec: Codec) -> bool:
    """Whether all segments are codes, with equally many tokens in each row and head."""
    return all(_is_even(each) and isinstance(each, codec.segment_type()) for each in segments)


def _first_are_apart(segments: Sequence[Segment], first: int) -> bool:
    """Whether the text's first `first` tokens are a segment of their own, before all others."""
    if not first:
        return True
    if not segments or segments[0].layout.size != first:
        return False
    columns = segments[0].layout.columns(torch.device("cpu"))
    return bool((columns == torch.arange(first)).all())


def _drop_behind_first(state: LayerState, first: int, count: int) -> None:
    """Drop `count` codes behind the first tokens: whole segments, then the first slots of the next one."""
    at = 1 if first else 0
    segments = list(state.stored.segments)
    while count and segments[at].layout.size <= count:
        count -= segments.pop(at).layout.size
    if count:
        segments[at] = drop_first_slots(segments[at], count)
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
    check_segment(codec, found, codec.segment_type(), PlainSegment(layout=layout, keys=keys, values=values))
    state.stored.segments = [*state.stored.segments, found]
    tail.clear()
