"""What is done when layers hold more than their budget: score, allocate, select, merge, encode, store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.budget import total_tokens
from kvtailor.errors import CacheMisuse
from kvtailor.hold import hold
from kvtailor.keep import keep_only, waits
from kvtailor.layer import LayerState
from kvtailor.plan import Plan
from kvtailor.types import Held, Visibility

__all__ = ["Walk"]


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """One layer on its way through the walk.

    Attributes:
        view: what `hold` shows of the layer; None where it waits for others, so that not all are unfolded at once.
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


class Walk:
    """The walks of one cache.

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

    def run(
        self, states: Sequence[LayerState], visible: Visibility, close: Callable[[LayerState, Visibility], None]
    ) -> None:
        """Cuts layers back to their budget.

        Args:
            states: one layer under the scope "layer", all under "prompt", the first so many under "progressive", where
                those before the newest were walked before, in the same forward.
            visible: of the forward that has just ended.
            close: called with each layer that waited for others, and `visible`, once it is cut.
        """
        plan = self.plan
        assert plan.score is not None
        # The tail of a layer that was cut in this walk may be empty; the newest one has its new tokens.
        newest, real = states[-1], visible.real
        seen, rows = newest.seen, newest.rows
        tokens = torch.full((rows,), seen) if real is None else real[:, :seen].sum(-1).cpu()
        window_bytes = self.window_elements * newest.sizes()[2]
        total = total_tokens(plan, tokens, layers=len(self.states), template=newest, window_bytes=window_bytes)
        each = total // (len(self.states) * newest.heads)
        arrived = self._arrived if plan.scope == "progressive" and len(states) > 1 else []
        last = plan.scope != "progressive" or states[-1] is self.states[-1]
        alone = last and len(states) == 1
        scored = arrived + [self._score(state, visible, each, alone=alone) for state in states[len(arrived) :]]
        capacity = torch.stack([s.counts for s in scored], 1)
        measured = [s.measured for s in scored if s.measured is not None]
        budgets = plan.allocate.allocate(
            BudgetRequest(
                total=total,
                row_tokens=tokens,
                capacity=capacity,
                floor=torch.minimum(torch.stack([s.floor for s in scored], 1), capacity),
                layers=tuple(s.state.index for s in scored),
                num_layers=len(self.states),
                scores=[s.scores for s in scored] if plan.allocate.needs_scores else None,
                measured=measured if len(measured) == len(scored) else None,
                calibration=self.calibration,
            )
        )
        for i, one in enumerate(scored):
            keep = None
            # An inexact selector has its say once for each layer, also where all tokens fit.
            asked = not plan.select.exact and i >= len(arrived)
            if asked or bool((budgets[:, i] < capacity[:, i]).any()):
                keep = plan.select.select(one.scores, budgets[:, i].to(one.scores.device))
            elif last and waits(one.state, plan):
                keep = one.scores > float("-inf")
            if keep is not None:
                self._cut(one, keep, visible, each, encoding=last)
                one.state.moved = True
                scored[i] = _shrunk(one, keep)
            if last:
                self._settled(one.state, visible, close)
        self._arrived = [] if last else scored

    def forget(self) -> None:
        """Forgets layers that were walked and wait for those that follow."""
        self._arrived = []

    def _settled(self, state: LayerState, visible: Visibility, close: Callable[[LayerState, Visibility], None]) -> None:
        state.due = False
        state.settled_seen = state.seen
        state.walk_at = self.plan.slack_tokens
        state.tail_growth = 0
        if state.walk_at is None:
            state.reconstruction = None
        if self.plan.scope != "layer":
            close(state, visible)

    def _score(self, state: LayerState, visible: Visibility, budget: Tensor, *, alone: bool) -> _Scored:
        assert self.plan.score is not None
        held, slots = self._hold(state, visible, budget)
        scores = self.plan.score.score(held.within(self.plan.score.needs))
        if bool((~torch.isfinite(scores) & held.valid).any()):
            finite = bool(torch.isfinite(held.keys).all())
            what = "no finite score" if finite else "NaN or infinity in its keys"
            raise CacheMisuse(
                f"layer {state.index} of the compressed layers has {what} for some tokens, so {self.plan} cannot "
                "rank them; check the model's inputs and dtype (float16 overflow is the usual cause)"
            )
        if self.needs.previous:
            state.scored, state.scored_columns = _by_column(scores, held)
        recent = held.recent(self.plan.score.recents)
        scores = scores.masked_fill(recent, float("inf")).masked_fill(~held.valid, float("-inf"))
        return _Scored(
            state=state,
            view=(held, slots) if alone else None,
            scores=scores,
            counts=held.counts().cpu(),
            floor=recent.sum(-1).cpu(),
            measured=self.plan.allocate.measure(held.within(self.plan.allocate.needs)),
        )

    def _cut(self, one: _Scored, keep: Tensor, visible: Visibility, budget: Tensor, *, encoding: bool) -> None:
        held, slots = one.view or self._hold(one.state, visible, budget)
        _forget_evicted(one.state, held, keep)
        keep_only(one.state, self.plan, held, slots, keep, encoding=encoding)

    def _hold(self, state: LayerState, visible: Visibility, budget: Tensor) -> tuple[Held, list[Tensor]]:
        return hold(state, visible, self.needs, len(self.states), self.plan, budget)


def _shrunk(one: _Scored, keep: Tensor) -> _Scored:
    """What a layer that was cut is for the next stage: fewer tokens in time order, and the scores that they had."""
    counts = keep.sum(-1)
    longest = int(counts.max())
    order = torch.argsort((~keep).to(torch.uint8), dim=-1, stable=True)[..., :longest]
    filler = torch.arange(longest, device=keep.device) >= counts[..., None]
    scores = one.scores.gather(-1, order).masked_fill(filler, float("-inf"))
    return replace(one, view=None, scores=scores, counts=counts.cpu())


def _by_column(scores: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """Scores (b, h, n) and the columns they belong to, valid tokens first; filler's columns lie past all others."""
    far = torch.iinfo(torch.int32).max
    columns = held.positions.to(torch.int32).masked_fill(~held.valid, far)
    columns, order = columns.sort(dim=-1, stable=True)
    return scores.gather(-1, order), columns


def _forget_evicted(state: LayerState, held: Held, keep: Tensor) -> None:
    """Of what the scorer said, a layer remembers what was said of the tokens (b, h, n) that stay."""
    if state.scored is None or state.scored_columns is None:
        return
    said = held.looked_back(state.scored_columns, state.scored)
    scored, columns = _by_column(said, replace(held, valid=held.valid & keep))
    longest = int(keep.sum(-1).max())
    state.scored, state.scored_columns = scored[..., :longest].clone(), columns[..., :longest].clone()
