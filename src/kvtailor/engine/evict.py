"""What is done when layers hold more than their budget: score, allocate, select, merge, encode, store."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.engine.apply_kept import apply_kept, waits
from kvtailor.engine.budget import only_recent, recent_tokens, total_tokens
from kvtailor.engine.layer_state import LayerState
from kvtailor.engine.view import view_held
from kvtailor.errors import CacheMisuse
from kvtailor.plan import Plan
from kvtailor.types import Held, Visibility
from kvtailor.types.checked_returns import checked_budgets, checked_counts, checked_scores, checked_tensor, refuse

__all__ = ["Eviction"]


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """One layer on its way through an eviction.

    Attributes:
        view: what `view_held` shows of the layer; None where it waits for others, so that not all are unfolded at once.
        scores: (b, h, n) float32, -inf where no token is, +inf for tokens that must stay.
        counts: (b, h) int64 on the CPU: tokens held.
        floor: (b, h) int64 on the CPU: tokens that must stay.
        measured: what the allocator measured of this layer.
    """

    state: LayerState
    view: tuple[Held, list[Tensor]] | None
    scores: Tensor
    counts: Tensor
    floor: Tensor
    measured: Tensor | None


class Eviction:
    """The evictions of one cache.

    Args:
        plan: what to do.
        states: all layers that the plan compresses.
        window_elements: elements of one row that the model's own sliding windows hold, on the other layers.

    Attributes:
        calibration: the tensors of the allocator's calibration file, over all layers; None where it has none.
    """

    def __init__(
        self,
        plan: Plan,
        states: list[LayerState],
        window_elements: int = 0,
    ):
        self.plan, self.states, self.window_elements = plan, states, window_elements
        self.needs = plan.needs
        self.calibration: Mapping[str, Tensor] | None = None
        self._arrived: list[_Scored] = []
        self._said = False

    def run(
        self, states: Sequence[LayerState], visible: Visibility, close: Callable[[LayerState, Visibility], None]
    ) -> None:
        """Cuts layers back to their budget.

        Args:
            states: one layer under the scope "layer", all under "prompt", the first so many under "progressive", where
                those before the newest were cut before, in the same forward.
            visible: of the forward that has just ended.
            close: called with each layer that waited for others, and `visible`, once it is cut.
        """
        plan = self.plan
        assert plan.score is not None
        # The tail of a layer that was cut in this eviction may be empty; the newest one has its new tokens.
        newest, real = states[-1], visible.real
        seen, rows = newest.seen, newest.rows
        tokens = torch.full((rows,), seen) if real is None else real[:, :seen].sum(-1).cpu()
        window_bytes = self.window_elements * newest.sizes()[2]
        total = total_tokens(plan, tokens, layers=len(self.states), template=newest, window_bytes=window_bytes)
        each = total // (len(self.states) * newest.heads)
        self._say_if_only_recent(each, tokens)
        arrived = self._arrived if plan.scope == "progressive" and len(states) > 1 else []
        last = plan.scope != "progressive" or states[-1] is self.states[-1]
        alone = last and len(states) == 1
        scored = arrived + [self._score(state, visible, each, alone=alone) for state in states[len(arrived) :]]
        capacity = torch.stack([s.counts for s in scored], 1)
        measured = [s.measured for s in scored if s.measured is not None]
        floor = torch.minimum(torch.stack([s.floor for s in scored], 1), capacity)
        budgets = plan.allocate.allocate(
            BudgetRequest(
                total=total,
                row_tokens=tokens,
                capacity=capacity,
                floor=floor,
                layers=tuple(s.state.index for s in scored),
                num_layers=len(self.states),
                scores=[s.scores for s in scored] if plan.allocate.needs_scores else None,
                measured=measured if len(measured) == len(scored) else None,
                calibration=self.calibration,
            )
        )
        # A layer alone has a share that nobody else knows; heads that get the same leave less than a token for each.
        alike = newest.heads - 1 if plan.allocate.even_heads else 0
        spare = alike if len(scored) == len(self.states) else int(total.max())
        budgets = checked_budgets(plan.allocate, budgets, total, floor, capacity, settled=last, spare=spare)
        for i, one in enumerate(scored):
            keep, counts = None, one.counts
            # An inexact selector has its say once for each layer, also where all tokens fit.
            asked = not plan.select.exact and i >= len(arrived)
            if asked or bool((budgets[:, i] < capacity[:, i]).any()):
                keep, counts = self._selected(one.scores, budgets[:, i])
            elif last and waits(one.state, plan):
                keep = one.scores > float("-inf")
            if keep is not None:
                self._cut(one, keep, counts, visible, each, encoding=last)
                one.state.moved = True
                scored[i] = _shrunk(one, keep, counts)
            if last:
                self._settled(one.state, visible, close)
        self._arrived = [] if last else scored

    def forget(self) -> None:
        """Forgets layers that were cut and wait for those that follow."""
        self._arrived = []

    def _say_if_only_recent(self, each: Tensor, tokens: Tensor) -> None:
        """Warns once of rows whose budgets (b,) leave nothing to the score, of the tokens (b,) that they have seen."""
        assert self.plan.score is not None
        recent = self.plan.score.recent
        rows = ((each <= recent) & (tokens > each)).nonzero()[:, 0]
        if self._said or not recent or not len(rows):
            return
        self._said = True
        held, seen = int(each[rows[0]]), int(tokens[rows[0]])
        where = f"{len(rows)} of {len(each)} rows: " if len(each) > 1 else ""
        warnings.warn(f"{self.plan}: {where}{only_recent(seen=seen, held=held, recent=recent)}", stacklevel=2)

    def _settled(self, state: LayerState, visible: Visibility, close: Callable[[LayerState, Visibility], None]) -> None:
        state.due = False
        state.settled_seen = state.seen
        state.evict_at = self.plan.slack_tokens
        state.tail_growth = 0
        if state.evict_at is None:
            state.reconstruction = None
        if self.plan.scope != "layer":
            close(state, visible)

    def _score(self, state: LayerState, visible: Visibility, budget: Tensor, *, alone: bool) -> _Scored:
        assert self.plan.score is not None
        held, slots = self._view(state, visible, budget)
        scorer = self.plan.score
        scores = checked_scores(scorer, scorer.score(held.within(scorer.needs)), held.positions)
        if bool((~torch.isfinite(scores) & held.valid).any()):
            finite = bool(torch.isfinite(held.keys).all())
            what = "no finite score" if finite else "NaN or infinity in its keys"
            raise CacheMisuse(
                f"layer {state.index} of the compressed layers has {what} for some tokens, so {self.plan} cannot "
                "rank them; check the model's inputs and dtype (float16 overflow is the usual cause)"
            )
        if self.needs.previous:
            state.scored, state.scored_columns = _by_column(scores, held)
        window = recent_tokens(self.plan, budget)
        same = bool((window == self.plan.score.recent).all())
        recent = held.recent(self.plan.score.recent if same else window[:, None, None].to(held.positions.device))
        scores = scores.masked_fill(recent, float("inf")).masked_fill(~held.valid, float("-inf"))
        return _Scored(
            state=state,
            view=(held, slots) if alone else None,
            scores=scores,
            counts=held.counts().cpu(),
            floor=recent.sum(-1).cpu(),
            measured=self._measured(held),
        )

    def _measured(self, held: Held) -> Tensor | None:
        allocate = self.plan.allocate
        measured = allocate.measure(held.within(allocate.needs))
        if measured is not None and (not isinstance(measured, Tensor) or measured.shape[:1] != held.first.shape):
            shape = getattr(measured, "shape", type(measured).__name__)
            raise refuse(allocate, f"measured {shape}, where a tensor of {held.first.shape[0]} rows is due")
        return measured

    def _selected(self, scores: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """The kept set (b, h, n), and (b, h) how many it holds, on the CPU as the budgets are."""
        select = self.plan.select
        found = select.select(scores, budgets.to(scores.device))
        keep = checked_tensor(select, "a kept set", found, tuple(scores.shape), torch.bool, scores.device)
        return keep, checked_counts(select, keep, scores, budgets, exact=select.exact)

    def _cut(
        self, one: _Scored, keep: Tensor, counts: Tensor, visible: Visibility, budget: Tensor, *, encoding: bool
    ) -> None:
        held, slots = one.view or self._view(one.state, visible, budget)
        most = int(counts.max())
        _forget_evicted(one.state, held, keep, most)
        recent = int(recent_tokens(self.plan, budget).min())
        apply_kept(one.state, self.plan, held, slots, keep, most=most, recent=recent, encoding=encoding)

    def _view(self, state: LayerState, visible: Visibility, budget: Tensor) -> tuple[Held, list[Tensor]]:
        return view_held(state, visible, self.needs, len(self.states), self.plan, budget)


def _shrunk(one: _Scored, keep: Tensor, counts: Tensor) -> _Scored:
    """What a layer that was cut is for the next stage: `counts` tokens in time order, and the scores that they had."""
    longest = int(counts.max())
    order = torch.argsort((~keep).to(torch.uint8), dim=-1, stable=True)[..., :longest]
    filler = torch.arange(longest, device=keep.device) >= keep.sum(-1, keepdim=True)
    scores = one.scores.gather(-1, order).masked_fill(filler, float("-inf"))
    return replace(one, view=None, scores=scores, counts=counts)


def _by_column(scores: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """Scores (b, h, n) and the columns they belong to, valid tokens first; filler's columns lie past all others."""
    far = torch.iinfo(torch.int32).max
    columns = held.positions.to(torch.int32).masked_fill(~held.valid, far)
    columns, order = columns.sort(dim=-1, stable=True)
    return scores.gather(-1, order), columns


def _forget_evicted(state: LayerState, held: Held, keep: Tensor, longest: int) -> None:
    """Of what the scorer said, a layer remembers what was said of the tokens (b, h, n) that stay, so many at most."""
    if state.scored is None or state.scored_columns is None:
        return
    said = held.looked_back(state.scored_columns, state.scored)
    scored, columns = _by_column(said, replace(held, valid=held.valid & keep))
    state.scored, state.scored_columns = scored[..., :longest].clone(), columns[..., :longest].clone()
