"""Eviction, when layers hold more than their budget: score, allocate, select; then merge, encode, store.

`score_layer` and `decide` compute what each layer keeps and change nothing. `Eviction` calls them and applies the
decision, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.engine.apply import (
    HeadCounts,
    apply_contents,
    compute_contents,
    count_first_tokens,
    drop_middle,
    first_counted,
    has_unencoded,
    split_oldest,
)
from kvtailor.engine.budget import Budget, CacheShape, make_budget, no_bytes, recent_tokens, warn_of_recent
from kvtailor.engine.state import LayerState
from kvtailor.engine.view import by_column, count_if_known, forget_evicted, view_held
from kvtailor.plan import Plan
from kvtailor.types import ALL_HEADS, HeadShare, Held, Needs, Visibility
from kvtailor.types.checked_returns import (
    check_budgets,
    check_counts,
    check_measured,
    check_scores,
    check_spent,
    check_tensor,
    is_of_others,
    ranking_error,
)
from kvtailor.types.late_checks import all_finite, require_none, send

__all__ = ["ScoredLayer", "LayerDecision", "Decision", "Eviction", "decide", "score_layer"]


@dataclass(frozen=True, kw_only=True)
class ScoredLayer:
    """One layer on its way through an eviction.

    Attributes:
        layer: 0-based among those that the plan compresses.
        scores: (b, h, n) float32, -inf where no token is, +inf for tokens that must stay; of this process's heads.
        counts: (b, H) int64 on the CPU: tokens held, by all heads of the layer, whichever process has them.
        floor: (b, H) int64 on the CPU: tokens that must stay.
        sure: the host knows `counts` and `floor` without waiting for the device: all heads hold the newest columns that
            must stay.
        measured: what the allocator measured of this layer.
        remembered: scores (b, h, n) or notes, and their columns, for the scorer's next call; None: it needs none.
        view: what `view_held` returned for the layer; None while it waits for others, so that not all layers are padded
            at once.
        cut_before: the same eviction has cut the layer before (scope "progressive").
    """

    layer: int
    scores: Tensor
    counts: Tensor
    floor: Tensor
    sure: bool = False
    measured: Tensor | None = None
    remembered: tuple[Tensor, Tensor] | None = None
    view: tuple[Held, list[Tensor]] | None = field(default=None, repr=False)
    cut_before: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerDecision:
    """What one layer keeps.

    Attributes:
        candidate: the layer.
        keep: (b, h, n) bool, of this process's heads; None: all heads keep everything.
        counts: (b, H) int64 on the CPU: how many tokens each head keeps, of all heads.
    """

    candidate: ScoredLayer
    keep: Tensor | None
    counts: Tensor


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What an eviction decided.

    Attributes:
        cuts: a decision for each layer, in order.
        budgets: (b, l, H) int64 on the CPU: what the allocator returned, for all heads.
        last: the same eviction will not cut these layers again.
        beyond: (b,) int64 what these layers got beyond the tokens that must stay; None where the allocator is
            kvtailor's own.
    """

    cuts: tuple[LayerDecision, ...]
    budgets: Tensor
    last: bool
    beyond: Tensor | None = None


def score_layer(
    state: LayerState, plan: Plan, needs: Needs, visible: Visibility, budget: Budget, *, layers: int, keep_view: bool
) -> ScoredLayer:
    """Score the tokens that a layer holds; the layer does not change.

    Args:
        state: of the layer.
        plan: whose scorer and allocator look at it.
        needs: the evidence to show.
        visible: of the forward that has just ended.
        budget: of all layers.
        layers: how many layers the plan compresses.
        keep_view: return the padded rows as well, for the cut that follows.

    Raises:
        CacheMisuse: a token has no finite score.
        MethodError: the scorer or the allocator breaks its contract.
    """
    scorer, share = plan.score, state.model.share
    assert scorer is not None
    held, slots = view_held(state, visible, needs, layers, budget.each)
    shown = held.within(scorer.needs)
    if needs.notes:
        b, h, n = held.positions.shape
        noted = check_tensor(
            scorer, "notes", scorer.note(shown), (b, h, needs.notes, n), torch.float32, held.keys.device
        )
        shown = replace(shown, noted=noted)
    scores = check_scores(scorer, scorer.score(shown), held.positions)
    window = recent_tokens(plan, budget.each)
    same = bool((window == scorer.recent).all())
    recent = shown.recent(scorer.recent if same else send(window, held.positions.device)[:, None, None])
    faulty = (~torch.isfinite(scores) & held.valid).any(-1)
    known = count_if_known(held, window)
    if known is None:
        found = torch.stack([held.counts(), recent.sum(-1), faulty.to(torch.int64)])
        # (3, b, H) in one transfer. Processes that share the heads refuse together, or some would wait for the others.
        counts, floor, faults = share.gather(found, 2).cpu()
        if bool(faults.any()):
            finite = torch.tensor(share.all(bool(all_finite(held.keys))))
            raise ranking_error(plan, state.index, finite)
    else:
        counts, floor = known
        # On the CPU the keys are looked at for the error alone; elsewhere they may be gone by then.
        keys = held.keys if held.keys.device.type == "cpu" else all_finite(held.keys)
        require_none(faulty, partial(ranking_error, plan, state.index, keys))
    remembered = by_column(scores if shown.noted is None else shown.noted, held) if needs.previous else None
    return ScoredLayer(
        layer=state.index,
        scores=scores.masked_fill(recent, float("inf")).masked_fill(~held.valid, float("-inf")),
        counts=counts,
        floor=floor,
        sure=known is not None,
        measured=check_measured(
            plan.allocate, plan.allocate.measure(held.within(plan.allocate.needs)), len(held.first)
        ),
        remembered=remembered,
        view=(held, slots) if keep_view else None,
    )


def decide(
    plan: Plan,
    candidates: Sequence[ScoredLayer],
    budget: Budget,
    *,
    layers: int,
    last: bool,
    calibration: Mapping[str, Tensor] | None = None,
    share: HeadShare = ALL_HEADS,
) -> Decision:
    """Decide what each layer keeps: allocate, then select. Pure: it reads its arguments alone and changes nothing.

    Budgets are for all heads of the model; each process selects for its own heads.

    Args:
        plan: whose allocator and selector decide.
        candidates: the layers, ascending.
        budget: of all layers.
        layers: how many layers the plan compresses.
        last: see `Decision`.
        calibration: the tensors of the allocator's calibration file.
        share: the heads of the model that this process holds and has scored.

    Raises:
        MethodError: the allocator or the selector breaks its contract.
    """
    allocate = plan.allocate
    capacity = torch.stack([each.counts for each in candidates], 1)
    floor = torch.minimum(torch.stack([each.floor for each in candidates], 1), capacity)
    measured = [each.measured for each in candidates if each.measured is not None]
    others = is_of_others(allocate)
    # Copies, since what a method gives is held against these.
    shown = [each.clone() if others else each for each in (budget.total, capacity, floor)]
    found = allocate.allocate(
        BudgetRequest(
            total=shown[0],
            row_tokens=budget.row_tokens,
            capacity=shown[1],
            floor=shown[2],
            layers=tuple(each.layer for each in candidates),
            num_layers=layers,
            scores=_gather_scores(candidates, share) if allocate.needs_scores else None,
            measured=measured if len(measured) == len(candidates) else None,
            calibration=calibration,
        )
    )
    # The share of a layer alone is not known here; heads that get the same leave less than a token for each.
    alike = capacity.shape[2] - 1 if allocate.even_heads else 0
    spare = alike if len(candidates) == layers else int(budget.total.max())
    budgets = share.of_first(check_budgets(allocate, found, budget.total, floor, capacity, settled=last, spare=spare))
    cuts = []
    for i, each in enumerate(candidates):
        keep, counts = None, each.counts
        # An inexact selector decides once for each layer, even where all tokens fit.
        decides = not plan.select.exact and not each.cut_before
        if decides or bool((budgets[:, i] < capacity[:, i]).any()):
            keep, counts = _selected(plan, each.scores, budgets[:, i], share)
        cuts.append(LayerDecision(candidate=each, keep=keep, counts=counts))
    beyond = (budgets - floor).sum((1, 2)) if others else None
    return Decision(cuts=tuple(cuts), budgets=budgets, last=last, beyond=beyond)


class Eviction:
    """Evicts tokens of one cache.

    Args:
        plan: of the cache.
        states: all layers that the plan compresses.
        other_bytes: maps the bytes of an element to the bytes that layers which the plan does not compress hold of one
            row.
        sizes: for each of `states` its number of kv heads, over all processes, and the sizes of a key and a value;
            empty if all layers are alike.

    Attributes:
        calibration: the tensors of the allocator's calibration file, over all layers; None where it has none.
        first: see `count_first_tokens`.
    """

    def __init__(
        self,
        plan: Plan,
        states: list[LayerState],
        other_bytes: Callable[[int], int] = no_bytes,
        sizes: Sequence[tuple[int, int, int]] = (),
    ):
        self.plan, self.states, self.other_bytes, self.sizes = plan, states, other_bytes, tuple(sizes)
        self.calibration: Mapping[str, Tensor] | None = None
        self._waiting: list[ScoredLayer] = []
        self._counted: tuple[Visibility, int, Tensor] | None = None
        self._warned, self.first = False, count_first_tokens(plan)
        self._spent: tuple[int, int, Tensor] | None = None

    def run(
        self, states: Sequence[LayerState], visible: Visibility, close: Callable[[LayerState, Visibility], None]
    ) -> None:
        """Cut layers back to their budget.

        Args:
            states: one layer under the scope "layer", all of them under "prompt", the first ones under "progressive",
                where all but the last were cut before in the same forward.
            visible: of the forward that has just ended.
            close: called with each layer that waited for others, and with `visible`, after its cut.
        """
        plan, needs, layers = self.plan, self.plan.needs, len(self.states)
        share = states[-1].model.share
        budget = self._budget(states[-1], visible)
        self._warned = self._warned or warn_of_recent(plan, budget)
        if self.first is not None and drop_middle(states[0], plan, self.first, visible, budget, layers):
            return self._settle(states[0], visible, close)
        progressive = plan.scope == "progressive"
        arrived = self._waiting if progressive and len(states) > 1 else []
        last = not progressive or states[-1] is self.states[-1]
        alone = last and len(states) == 1
        candidates = [*arrived]
        for state in states[len(arrived) :]:
            candidates.append(score_layer(state, plan, needs, visible, budget, layers=layers, keep_view=alone))
        decision = decide(plan, candidates, budget, layers=layers, last=last, calibration=self.calibration, share=share)
        if decision.beyond is not None and plan.scope == "layer":
            self._check_spent(states[0].index, decision.beyond, budget.total, heads=decision.budgets.shape[2])
        # Scores and kept sets of a layer are dropped as soon as it is cut.
        cuts = list(decision.cuts)
        del candidates, arrived, decision
        self._waiting = []
        while cuts:
            cut = self._apply(cuts.pop(0), last, visible, budget, close)
            if not last:
                self._waiting.append(cut)
        if states[-1] is self.states[-1]:
            self._counted = None

    def forget(self) -> None:
        """Forget layers that were cut and wait for later ones, and the counts made for them."""
        self._waiting, self._counted, self._spent = [], None, None

    def _check_spent(self, layer: int, beyond: Tensor, total: Tensor, *, heads: int) -> None:
        """Hold what layers of one eviction got so far against the total; one that comes before begins another."""
        before = self._spent
        count, so_far = (1, beyond) if before is None or layer <= before[0] else (before[1] + 1, before[2] + beyond)
        self._spent = layer, count, so_far
        check_spent(self.plan.allocate, so_far, total, layers=count, heads=heads)

    def _budget(self, newest: LayerState, visible: Visibility) -> Budget:
        # The tail of a layer that was cut in this eviction may be empty; the newest one has its new tokens.
        rows, element = newest.rows, newest.sizes()[2]
        shape = CacheShape.of(newest.sizes(), heads=newest.model.share.total(newest.heads), rows=rows)
        return make_budget(
            self.plan,
            self._row_tokens(newest, visible),
            layers=len(self.states),
            newest=shape,
            other_bytes=0 if self.plan.bytes is None else self.other_bytes(element),
            shapes=[CacheShape.of((key, value, element), heads=h, rows=rows) for h, key, value in self.sizes],
        )

    def _row_tokens(self, newest: LayerState, visible: Visibility) -> Tensor:
        """Return (b,) int64 on the CPU: real tokens seen. With padding the host waits for the device once a forward."""
        seen, real = newest.stored.seen, visible.real
        if real is None:
            return torch.full((newest.rows,), seen)
        if self._counted is None or self._counted[0] is not visible or self._counted[1] != seen:
            self._counted = visible, seen, real[:, :seen].sum(-1).cpu()
        return self._counted[2]

    def _apply(
        self,
        cut: LayerDecision,
        last: bool,
        visible: Visibility,
        budget: Budget,
        close: Callable[[LayerState, Visibility], None],
    ) -> ScoredLayer:
        """Apply the decision of one layer, and return the layer as the next cut sees it."""
        state, found, keep = self.states[cut.candidate.layer], cut.candidate, cut.keep
        if found.remembered is not None:
            state.observed.scored, state.observed.scored_columns = found.remembered
        if keep is None and last and has_unencoded(state, self.plan):
            # All of it stays; what waited for its encoding is encoded now.
            keep = found.scores > float("-inf")
        if keep is not None:
            held, slots = found.view or view_held(state, visible, self.plan.needs, len(self.states), budget.each)
            own = state.model.share.own(cut.counts, 1)
            most = int(own.max())
            forget_evicted(state, held, keep, most)
            recent = int(recent_tokens(self.plan, budget.each).min())
            before, sure = state.model.share.own(found.counts, 1), found.sure and self.plan.select.exact
            newest = (
                self.plan.score.newest_kept(int(own.min())) if self.plan.score and self.plan.select.takes_best else 0
            )
            counts = HeadCounts(before=before, kept=own, newest=newest, sure=sure)
            kept = compute_contents(
                state, self.plan, (held, slots), keep, most=most, recent=recent, encoding=last, counts=counts
            )
            apply_contents(state, self.plan, kept, first=first_counted(state, self.plan, held), encoding=last)
            split_oldest(state, self.plan)
            state.clock.reindex = True
            found = _as_cut(found, keep, cut.counts, longest=most)
        if last:
            self._settle(state, visible, close)
        return replace(found, view=None, remembered=None, cut_before=True)

    def _settle(self, state: LayerState, visible: Visibility, close: Callable[[LayerState, Visibility], None]) -> None:
        state.clock.settle(self.plan.slack_tokens, state.stored.seen)
        if self.plan.slack_tokens is None:
            state.observed.reconstruction = None
        if self.plan.scope != "layer":
            close(state, visible)


def _gather_scores(candidates: Sequence[ScoredLayer], share: HeadShare) -> list[Tensor]:
    """Return the scores of all heads of the layers, on the device of the first layer."""
    device = candidates[0].scores.device
    return [share.gather_padded(each.scores, 1, float("-inf")).to(device) for each in candidates]


def _selected(plan: Plan, scores: Tensor, budgets: Tensor, share: HeadShare) -> tuple[Tensor, Tensor]:
    """Return the kept set of this process's heads, and how many tokens all heads keep.

    Args:
        plan: whose selector decides.
        scores: (b, h, n), of this process's heads.
        budgets: (b, H) int64 on the CPU, of all heads.
        share: which of all heads `scores` are of.

    Returns:
        (b, h, n) bool, and (b, H) int64 on the CPU.
    """
    select, slots, every = plan.select, scores.shape[-1], budgets
    together = select.same_in_heads and share.ranks > 1
    if together:
        # One choice for all heads needs the scores of all; each process makes it, and keeps what is its own of it.
        scores = share.gather_padded(scores, 1, float("-inf"))
    else:
        budgets = share.own(budgets, 1)
    # On the CPU, so that a selector need not wait for the most that a head keeps.
    found = select.select(scores, budgets)
    keep = check_tensor(select, "a kept set", found, tuple(scores.shape), torch.bool, scores.device)
    counts = check_counts(select, keep, scores, budgets, exact=select.exact)
    if together:
        return share.own(keep, 1)[..., :slots], counts
    # An exact selector keeps what the budgets say, in the other processes too.
    return keep, every if select.exact else share.gather(counts, 1)


def _as_cut(one: ScoredLayer, keep: Tensor, counts: Tensor, *, longest: int) -> ScoredLayer:
    """Return a layer as the next cut sees it: its kept tokens in time order, with the scores that they had.

    Args:
        one: the layer before.
        keep: (b, h, n) bool.
        counts: (b, H) int64, of all heads.
        longest: the most tokens that one of the heads in `keep` keeps.
    """
    # A stable sort of "is dropped" puts kept tokens first, in time order; heads that keep fewer end in filler.
    order = torch.argsort((~keep).to(torch.uint8), dim=-1, stable=True)[..., :longest]
    filler = torch.arange(longest, device=keep.device) >= keep.sum(-1, keepdim=True)
    scores = one.scores.gather(-1, order).masked_fill(filler, float("-inf"))
    return replace(one, scores=scores, counts=counts)
