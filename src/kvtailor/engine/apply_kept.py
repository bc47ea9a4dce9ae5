"""How a kept set becomes what a layer holds: the tail itself, or segments and the recent window.

`what_stays` works it out and changes nothing; `apply_kept` puts the result in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvtailor.engine.budget import waiting_tokens
from kvtailor.engine.ends.drop_middle import first_tokens, waits_in_tail
from kvtailor.engine.layer_group import joined
from kvtailor.errors import CacheMisuse
from kvtailor.merge.contract import Merged
from kvtailor.ops import huge_pages
from kvtailor.ops.lanes.kept import place_among_kept
from kvtailor.ops.lanes.ragged import Cut, cut_lanes, cut_of_part, gather_held, tokens_of_part
from kvtailor.ops.segments.latent_keys import parted
from kvtailor.ops.segments.weighted import Weighted, without_weight
from kvtailor.plan.registry import name_of
from kvtailor.types import Held, PlainSegment, Segment
from kvtailor.types.checked_returns import checked_segment, checked_tensor, refuse
from kvtailor.types.late_checks import require_none, sent

if TYPE_CHECKING:
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.merge.contract import Merger
    from kvtailor.plan import Plan
    from kvtailor.select.contract import Selector
    from kvtailor.store.recent_window import Tail

_Seen = TypeVar("_Seen", Held, Merged)

__all__ = ["HeadCounts", "Kept", "apply_kept", "has_unencoded", "what_stays"]


@dataclass(frozen=True, kw_only=True)
class HeadCounts:
    """Numbers of tokens of a layer's rows and heads, of this process, which the host knows at an eviction.

    Attributes:
        before: (b, h) int64 on the CPU: held before it.
        kept: (b, h) int64 on the CPU: kept.
        newest: so many of the newest columns, if they were held, are kept by every head, as the scorer knows.
        sure: every head held the newest columns that must stay, and its selector promised to keep them. Where it broke
            that promise, the cache raises an error before anything is read again.
    """

    before: Tensor
    kept: Tensor
    newest: int = 0
    sure: bool = False


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a layer holds after an eviction.

    Attributes:
        segments: in time order.
        tail: what the tail becomes as a whole; None: its newest `recent` tokens stay in it, and the others leave.
        recent: so many of the newest columns are held by every row and head, in the tail.
        waits: these are all of the tail, which stays as it is until they are a block, free slots included.
        run, anchor: see `Tail`, of a tail that is replaced.
        rewritten: keys (b * h, recent, d) and values (b * h, recent, dv) in place of those of the tail that stay; None
            where they are as they were.
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


def what_stays(
    state: LayerState,
    plan: Plan,
    view: tuple[Held, Sequence[Tensor]],
    keep: Tensor,
    *,
    most: int,
    recent: int,
    encoding: bool = True,
    counts: HeadCounts | None = None,
) -> Kept:
    """Return what a layer holds once only a kept set stays, with what the plan's merger folds into it.

    Args:
        state: of the layer; nothing of it changes.
        plan: whose codec stores what leaves the tail.
        view: what `view_held` shows: the padded rows that were scored, and for each part the index of its slots along
            them.
        keep: (b, h, n) bool.
        most: how many a head keeps at most.
        recent: the newest tokens that stay in every row and head.
        encoding: False where the layer will be cut again in the same eviction: then what is not encoded yet waits as it
            is, so that it is encoded once, for what stays in the end. A layer that is encoded together with others
            waits for the last of them in any case.
        counts: how many tokens that leaves; None: they are counted here, and waited for.

    Raises:
        CacheMisuse: what was folded gives NaN or infinity.
        MethodError: the merger or the codec returns something else than its contract promises.
    """
    held, slots = view
    codec = state.codec(plan)
    if counts is None:
        counts = HeadCounts(before=held.counts().cpu(), kept=keep.sum(-1).cpu())
    recent = _common_recent(state, held, keep, recent, plan.select if counts.sure else None)
    merged = None
    if bool((counts.kept < counts.before).any()):
        merged = _merged(state, plan, replace(held, kept=counts.kept), slots, keep, recent, most)
    if codec.exact and codec.block == 0 and not plan.merge.weighted:
        whole = cut_lanes(keep, counts=counts.kept)
        # Every head keeps the same number: one lane for each (row, head), which a tail can hold.
        if whole is not None and whole.owner is None:
            tail = _gathered(state, held, keep, merged, whole)
            before = state.stored.tail
            known = min(counts.newest, (before.run or 0) if before else 0)
            run, mass = max(recent, known), _mass(held, [whole])
            return Kept(tail=tail, recent=recent, run=run, anchor=_anchor(before, plan, held, counts), mass=mass)
    waits = encoding and _waits(state, plan, counts)
    recent = state.stored.tail.length if waits and state.stored.tail else recent
    # (b, h, n) bool: what leaves the tail, or has left it before.
    old = keep & ~held.recent(recent) if recent else keep
    # (b, h): how many those are. All heads keep the same recent window.
    leaving = counts.kept - recent
    cuts, segments = [], []
    front = _front(plan, held)
    if not codec.exact:
        old, moved = _moved_codes(state, plan, held, slots, old, front)
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
            runs = _runs(state, plan, held, mask, counted, recent)
        for those, number, newest in _apart(runs, front if plan.attend.in_cache_positions else None):
            fresh = cut_lanes(those, codec.lane_multiple, number)
            if fresh is not None:
                plain = _gathered(state, held, keep, merged, fresh)
                stored = plain if row_waits else _encoded_now(state, plan, held, plain, newest)
                segments.append(_weighed(stored, held, keep, merged, fresh))
                cuts.append(fresh)
    rewritten = None
    if recent:
        staying = cut_lanes(keep & held.recent(recent), counts=torch.full_like(counts.kept, recent))
        assert staying is not None
        cuts.append(staying)
        if merged is not None:
            taken = _gathered(state, held, keep, merged, staying)
            rewritten = taken.keys, taken.values
    return Kept(segments=tuple(segments), recent=recent, waits=waits, rewritten=rewritten, mass=_mass(held, cuts))


def apply_kept(state: LayerState, plan: Plan, kept: Kept, *, first: Tensor | None, encoding: bool = True) -> None:
    """Let a layer hold what `what_stays` found; the layers that share segments with it join them again.

    Args:
        state: of the layer.
        plan: see `what_stays`.
        kept: what it holds from now on.
        first: (b,) column of each row's first real token.
        encoding: see `what_stays`.

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
        for each, own in zip(group, joined([e.here() for e in group], state.codec(plan), first), strict=True):
            each.stored.segments = own
    if kept.mass is not None:
        state.observed.evidence = replace(state.observed.evidence, mass=kept.mass)


def has_unencoded(state: LayerState, plan: Plan) -> bool:
    """Return whether the layer holds segments that are not encoded yet; see `encoding` of `what_stays`."""
    encoded = state.codec(plan).segment_type()
    return not all(isinstance(without_weight(segment), encoded) for segment in state.here())


def _front(plan: Plan, held: Held) -> Tensor | None:
    """Return the first tokens (b, h, n) bool of each row where they become a segment of their own; else None.

    They do where the attention turns their keys, by what is missing behind them, and those of no others. And where what
    is behind them goes by age, from codes that hold both.
    """
    first = None if plan.score is None else plan.score.first_kept
    if not first or not (plan.attend.in_cache_positions or first_tokens(plan) is not None):
        return None
    return held.positions < held.first.to(held.positions.device)[:, None, None] + first


def _apart(runs: Sequence[tuple[Tensor, Tensor, int]], front: Tensor | None) -> Sequence[tuple[Tensor, Tensor, int]]:
    """Return runs as `_runs` gives them, the tokens `front` (b, h, n) bool in runs of their own."""
    if front is None:
        return runs
    # (runs, b, h) in one transfer.
    counts = torch.stack([(mask & front).sum(-1) for mask, _, _ in runs]).cpu()
    found = []
    for (mask, counted, newest), ahead in zip(runs, counts, strict=True):
        found += [(mask & front, ahead, newest), (mask & ~front, counted - ahead, newest)]
    return found


def _moved_codes(
    state: LayerState, plan: Plan, held: Held, slots: Sequence[Tensor], old: Tensor, front: Tensor | None
) -> tuple[Tensor, list[tuple[Cut, Segment]]]:
    """Return what is still to be encoded of `old` (b, h, n) bool, and the encoded segments that stay, with their cuts.

    What is encoded moves as codes and is never encoded again. What waits for its encoding, and what is in the tail, is
    left for the codec.
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
            moved += _moved_together(run, codec.lane_multiple, held)
            run = []
        if whole:
            # All of it stays: nothing has to move.
            moved.append((cut_of_part(each.stored.layout, each.slots), each.stored))
        else:
            run.append((each, count))
    return fresh, moved + _moved_together(run, codec.lane_multiple, held)


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


def _moved_together(run: Sequence[tuple[_Codes, Tensor]], multiple: int, held: Held) -> list[tuple[Cut, Segment]]:
    """Return what stays of segments that follow each other, with its cuts: in one where their encoding allows it.

    A segment of which each eviction leaves fewer tokens would else be there for as long as one of them is.

    Args:
        run: the tokens, and how many of each row and head (b, h) int64 on the CPU.
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
    return [each for alone in run for each in _moved_together([alone], multiple, held)]


def _waiting_rows(state: LayerState, plan: Plan, leaving: Tensor) -> Tensor:
    """Return (b,) bool on the CPU: rows of which what is not encoded yet waits until there is more of it.

    A plan that evicts at each decoded token would else encode each token alone, and have a segment for each. A row
    waits for itself alone, so that it is encoded as it would be without the others.

    Args:
        state, plan: see `what_stays`.
        leaving: (b, h) int64 on the CPU: how many tokens of each head are not encoded.
    """
    enough = waiting_tokens(plan, state.codec(plan)) if state.clock.decoding else 0
    # One answer for all heads of a row, whichever process has them.
    return leaving.amax(1) < enough if not enough else state.model.share.gather(leaving, 1).amax(1) < enough


def _waits(state: LayerState, plan: Plan, counts: HeadCounts) -> bool:
    """Return whether all of the tail stays in it, since it is no block yet: where the host knows that every head keeps
    all of it, and nothing older waits."""
    block, tail = waits_in_tail(plan, state.codec(plan)), state.stored.tail
    assert tail is not None
    if not 0 < tail.length < block or not state.clock.decoding or state.layer_group or has_unencoded(state, plan):
        return False
    return min(counts.newest, tail.run or 0) >= tail.length


def _of_rows(rows: Tensor, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens (b, h, n) bool and their counts (b, h) on the CPU without those of other rows than these (b,)."""
    if bool(rows.all()):
        return tokens, counts
    return tokens & sent(rows, tokens.device)[:, None, None], counts * rows[:, None]


def _runs(
    state: LayerState, plan: Plan, held: Held, old: Tensor, leaving: Tensor, recent: int
) -> list[tuple[Tensor, Tensor, int]]:
    """Return the tokens `old` (b, h, n) bool, `leaving` (b, h) of each head, as the codec cuts them along time.

    Each run comes with the number of each head, and with its last column. The newest `recent` columns are in none.
    """
    codec, seen = state.codec(plan), state.stored.seen
    if not codec.ages or seen == recent:
        return [(old, leaving, seen - 1)]
    ends = [(seen - 1 - age, columns) for columns, age in codec.runs(seen - recent, recent, whole=True)]
    masks = [old & (held.positions > end - columns) & (held.positions <= end) for end, columns in ends]
    # (runs, b, h) in one transfer.
    counts = torch.stack([mask.sum(-1) for mask in masks]).cpu()
    return [(mask, each, end) for mask, each, (end, _) in zip(masks, counts, ends, strict=True)]


def _encoded_now(state: LayerState, plan: Plan, held: Held, plain: PlainSegment, newest: int) -> Segment:
    codec, seen = state.encoder(plan, held.first), state.stored.seen
    found = codec.encode_aged(plain.layout, plain.keys, plain.values, held.first, newest=newest, seen=seen)
    checked_segment(codec, found, codec.segment_type(), plain.layout)
    return found


def _merged(
    state: LayerState, plan: Plan, held: Held, slots: Sequence[Tensor], keep: Tensor, recent: int, most: int
) -> Merged | None:
    """Return what the plan's merger makes of the kept tokens, `most` in a head; None where they stay as they are.

    At least one token is not kept.
    """
    # Of a lossy code the state behind it is gone: it moves, but nothing can be folded into it.
    exact = state.codec(plan).exact
    into = keep if exact else keep & ~_only_codes(state, plan, slots, keep)
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
    finite = torch.isfinite(merged.keys).all() & torch.isfinite(merged.values).all()
    require_none(~finite, partial(CacheMisuse, said))
    return merged


def _check_merged(merge: Merger, merged: object, held: Held, most: int) -> None:
    """Raise `MethodError` where a merger returns something else than the kept tokens, `most` of each head."""
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


def _only_codes(state: LayerState, plan: Plan, slots: Sequence[Tensor], keep: Tensor) -> Tensor:
    """Return (b, h, n) bool: kept tokens of which there is only a lossy code, where the codec is one."""
    codec = state.codec(plan)
    found = torch.zeros_like(keep)
    for segment, slot in zip(state.here(), slots, strict=False):
        if isinstance(without_weight(segment), codec.segment_type()):
            found |= tokens_of_part(segment.layout, slot, keep)[0]
    return found


def _gathered(state: LayerState, held: Held, keep: Tensor, merged: Merged | None, cut: Cut) -> PlainSegment:
    """Return the kept tokens in the lanes of a cut, as they are stored from now on."""
    if state.model.latents is not None:
        # The scorer saw one kv head of joined keys; what is stored are their two parts.
        held = _parted(held)
        merged = None if merged is None else _parted(merged)
    if merged is None:
        return gather_held(held, cut)
    # `merged` holds kept tokens alone, (b, h, k, d): index along n -> place among the kept ones of the same head.
    at = cut.owners[:, None], place_among_kept(keep).flatten(0, 1)[cut.owners[:, None], cut.index]
    layout = cut.layout(held.keys.shape[0], held.keys.shape[1], held.positions)
    keys, values = (huge_pages.picked(states.flatten(0, 1), at) for states in (merged.keys, merged.values))
    return PlainSegment(layout=layout, keys=keys, values=values)


def _parted(seen: _Seen) -> _Seen:
    """Return the same with latents in the place of keys and rotated keys in that of values."""
    keys, values = parted(seen.keys, seen.values)
    return replace(seen, keys=keys, values=values)


def _weighed(segment: Segment, held: Held, keep: Tensor, merged: Merged | None, cut: Cut) -> Segment:
    """Return the segment of a cut with the weights of its tokens, where any token of the layer has one."""
    weights, index = held.log_weight, cut.index
    if merged is not None and merged.log_weight is not None:
        # The same change of index as in `_gathered`.
        weights, index = merged.log_weight, place_among_kept(keep).flatten(0, 1)[cut.owners[:, None], cut.index]
    if weights is None:
        return segment
    log_weight = weights.flatten(0, 1)[cut.owners[:, None], index]
    return Weighted(layout=segment.layout, inner=segment, log_weight=log_weight)


def _common_recent(state: LayerState, held: Held, keep: Tensor, recent: int, promised: Selector | None) -> int:
    """Return how many of the newest columns can stay a tail: the recent window if every row and head keeps all of it.

    A tail holds the same columns for all heads. Where one head drops any of them, all that is kept goes into segments.
    Where a selector has `promised` that all keep them (see `HeadCounts`), the host does not wait to see it.
    """
    assert state.stored.tail is not None
    recent = min(recent, state.stored.tail.length, state.stored.seen)
    newest = (held.positions >= state.stored.seen - recent) & keep
    if promised is not None and keep.device.type != "cpu":
        said = f"kept fewer than the newest {recent} tokens, all of which must stay, in a row and head"
        require_none(newest.sum(-1) != recent, lambda: refuse(promised, said))
        return recent
    # One answer for all heads of the layer, whichever process has them: else some would be encoded and others not.
    return recent if state.model.share.all(bool((newest.sum(-1) == recent).all())) else 0


def _anchor(before: Tail | None, plan: Plan, held: Held, counts: HeadCounts) -> int:
    """Return how many of the first columns the host knows all heads to keep; without padding (`Held.front`) alone."""
    first = first_tokens(plan)
    if first is None or held.front is None or before is None or before.anchor < first:
        return 0
    return first if int(counts.kept.min()) > first else 0


def _mass(held: Held, cuts: Sequence[Cut]) -> tuple[Tensor, ...] | None:
    """Return the mass of what is held now, (m, s) for each cut, from that of the padded rows (b, h, n)."""
    if held.mass is None:
        return None
    flat = held.mass.flatten(0, 1)
    return tuple(flat[cut.owners[:, None], cut.index] for cut in cuts)
