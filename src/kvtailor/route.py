"""The one walk that every token takes: append, attend, observe, and, when held exceeds the budget, score, allocate,
select, encode, store. Prefill, every chunk of a chunked prefill, a later turn and decoding all go through
`Route.attend`.

`docs/route.md` tells it as the life of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.attend.contract import Attended, LayerFacts
from kvtailor.budget import total_tokens
from kvtailor.errors import CacheMisuse
from kvtailor.hold import hold
from kvtailor.keep import keep_only, waits
from kvtailor.layer import LayerState, Pending
from kvtailor.observe import observe
from kvtailor.plan import Plan
from kvtailor.repeat import Piece
from kvtailor.types import Held, Layout, PlainSegment, Visibility

__all__ = ["Route"]


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


class Route:
    """The walk of one cache.

    Args:
        plan: what to do.
        layers: how many layers of the model the plan compresses.
        window_elements: elements of one row that the model's own sliding windows hold, on the other layers.

    Attributes:
        holding: nothing is evicted or encoded until `release`, whatever comes.
        opened: a plan whose context must be read twice has begun to, or there is none.
        repeating: the forwards of now repeat a piece of the context, and leave no trace but what they say of it.
        passing: keys and values of such a forward, of the layer whose attention comes next.
    """

    def __init__(self, plan: Plan, layers: int, window_elements: int = 0):
        self.plan = plan
        self.window_elements = window_elements
        self.needs = plan.needs
        self.states = [LayerState(index) for index in range(layers)]
        self.holding = self.opened = False
        self.repeating: Piece | None = None
        self.passing: PlainSegment | None = None
        self._arrived: list[_Scored] = []

    def append(self, state: LayerState, keys: Tensor, values: Tensor) -> None:
        """New keys (b, h, t, d) and values (b, h, t, dv) of one layer join its tail."""
        if self.repeating is not None:
            layout = Layout(rows=keys.shape[0], heads=keys.shape[1], size=keys.shape[2], start=state.seen)
            self.passing = PlainSegment(layout=layout, keys=keys.flatten(0, 1), values=values.flatten(0, 1))
            return
        if state.pending is not None:
            self.commit(state, rejected=0)
            state.recording = False
        will_walk = self.plan.evicts and keys.shape[2] > 1 and not state.recording
        state.append(keys, values, exactly=will_walk)

    def attend(self, state: LayerState, query: Tensor, visible: Visibility, scaling: float) -> Tensor:
        """Attention of the new tokens of one layer, then whatever the plan does about what is held.

        Args:
            query: (b, q, t, d) post-RoPE queries of the tokens that were appended last.
            visible: what each of them may see.
            scaling: the model's own factor before the softmax.

        Returns:
            (b, q, t, dv).
        """
        if self.repeating is not None:
            assert self.passing is not None
            passing, self.passing = self.passing, None
            return self.repeating.attend(state, passing, query, visible, scaling)
        state.scaling = scaling
        attended = self._attended(state, query, visible, want_mass=self.needs.mass and not state.recording)
        state.read = attended.read
        state.carry = attended.carry
        if state.recording:
            state.pending = Pending(query=query.detach().clone(), visible=visible)
        else:
            self._settle(state, query, visible, attended.mass)
        return attended.output

    def commit(self, state: LayerState, rejected: int) -> None:
        """Ends a recorded forward: forgets its last `rejected` tokens, then does what was put off for the rest."""
        pending, state.pending = state.pending, None
        if pending is None:
            state.crop(rejected, exact=not self.needs.mass)
            return
        accepted = pending.query.shape[2] - rejected
        if accepted < 0:
            raise CacheMisuse(
                f"asked to take back {rejected} tokens; the last forward brought {pending.query.shape[2]}, and what "
                "came before it is already compressed. Crop no more than the last forward."
            )
        state.forget_newest(rejected)
        if accepted == 0:
            return
        query, visible = pending.query[:, :, :accepted], pending.visible.without_last(rejected)
        mass = None
        if self.needs.mass:
            mass = self._attended(state, query, visible, want_mass=True).mass
        self._settle(state, query, visible, mass)

    def release(self, visible: Visibility) -> None:
        """Ends `holding`: walks all layers. `visible` describes all that came meanwhile, as if it had come at once."""
        self.holding = False
        for state in self.states:
            state.due = self.plan.evicts and visible.new_tokens > 1
        if any(state.due for state in self.states):
            for stage in self._stages():
                self._walk(stage, visible)
        for state in self.states:
            if self.plan.slack_tokens is None:
                state.reconstruction = None
            state.flush(self.plan, visible.new_tokens, visible.real)

    def reset(self) -> None:
        """Forgets everything."""
        for state in self.states:
            state.reset()
        self.holding = self.opened = False
        self.repeating = self.passing = None
        self._arrived = []

    def _attended(self, state: LayerState, query: Tensor, visible: Visibility, *, want_mass: bool) -> Attended:
        return self.plan.attend.attend(
            query,
            state.parts(self.plan.store),
            visible,
            state.scaling,
            want_mass=want_mass,
            real_queries=_real_queries(visible),
            facts=LayerFacts(layer=state.index, layers=len(self.states), rotation=state.rotation, carry=state.carry),
        )

    def _settle(self, state: LayerState, query: Tensor, visible: Visibility, mass: Sequence[Tensor] | None) -> None:
        state.evidence = observe(
            self.needs,
            state.evidence,
            query,
            visible.first_column,
            mass,
            real=visible.real,
            rotation=state.rotation,
        )
        new = query.shape[2]
        if self.holding:
            return
        if self.plan.evicts:
            state.due = new > 1 or self._past_slack(state)
            if self.needs.reconstruction and state.reconstruction is None:
                # What came after the context was never repeated, and nobody can say what it is worth.
                state.due = False
            if self.plan.scope == "layer":
                if state.due:
                    self._walk([state], visible)
            elif self.plan.scope == "progressive":
                if any(s.due for s in self.states[: state.index + 1]):
                    self._walk(self.states[: state.index + 1], visible)
            elif state is self.states[-1] and any(s.due for s in self.states):
                self._walk(self.states, visible)
        if new == 1 and self.plan.slack_tokens is None:
            state.evidence = state.evidence.without_queries()
        state.flush(self.plan, new, visible.real)

    def _stages(self) -> list[list[LayerState]]:
        """The layers that walk together, in the order in which they do."""
        if self.plan.scope == "layer":
            return [[state] for state in self.states]
        if self.plan.scope == "progressive":
            return [self.states[: i + 1] for i in range(len(self.states))]
        return [self.states]

    def _past_slack(self, state: LayerState) -> bool:
        slack = self.plan.slack_tokens
        return slack is not None and (state.walk_at is None or state.tail_growth > state.walk_at)

    def _walk(self, states: Sequence[LayerState], visible: Visibility) -> None:
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
                scored[i] = _shrunk(one, keep)
            if last:
                self._settled(one.state, visible)
        self._arrived = [] if last else scored

    def _settled(self, state: LayerState, visible: Visibility) -> None:
        state.due = False
        state.settled_seen = state.seen
        state.walk_at = self.plan.slack_tokens
        state.tail_growth = 0
        if state.walk_at is None:
            state.reconstruction = None
        if self.plan.scope != "layer":
            state.flush(self.plan, visible.new_tokens, visible.real)

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


def _real_queries(visible: Visibility) -> Tensor | None:
    if visible.real is None:
        return None
    return visible.real[:, visible.first_column : visible.first_column + visible.new_tokens]
