"""The one walk that every token takes: append, attend, observe, and, when held exceeds the budget, score, allocate,
select, encode, store. Prefill, every chunk of a chunked prefill, a later turn and decoding all go through
`Route.attend`.

`docs/route.md` tells it as the life of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.budget import total_tokens
from kvtailor.errors import CacheMisuse
from kvtailor.layer import LayerState, Pending
from kvtailor.observe import Evidence, observe
from kvtailor.ops.ragged import slots_of_part
from kvtailor.plan import Plan
from kvtailor.types import Held, Needs, Segment, Visibility

__all__ = ["Route"]


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """One layer on its way through the walk."""

    state: LayerState
    held: Held
    slots: list[Tensor]
    scores: Tensor
    floor: Tensor


class Route:
    """The walk of one cache.

    Args:
        plan: what to do.
        layers: how many layers of the model the plan compresses.
        window_elements: elements of one row that the model's own sliding windows hold, on the other layers.
    """

    def __init__(self, plan: Plan, layers: int, window_elements: int = 0):
        self.plan = plan
        self.window_elements = window_elements
        self.needs = plan.score.needs if plan.score is not None else Needs()
        self.states = [LayerState(index) for index in range(layers)]

    def append(self, state: LayerState, keys: Tensor, values: Tensor) -> None:
        """New keys (b, h, t, d) and values (b, h, t, dv) of one layer join its tail."""
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
        state.scaling = scaling
        attended = self.plan.attend.attend(
            query,
            state.parts(self.plan.store),
            visible,
            scaling,
            want_mass=self.needs.mass and not state.recording,
            real_queries=_real_queries(visible),
        )
        state.read = attended.read
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
            mass = self.plan.attend.attend(
                query,
                state.parts(self.plan.store),
                visible,
                state.scaling,
                want_mass=True,
                real_queries=_real_queries(visible),
            ).mass
        self._settle(state, query, visible, mass)

    def _settle(self, state: LayerState, query: Tensor, visible: Visibility, mass: Sequence[Tensor] | None) -> None:
        state.evidence = observe(self.needs, state.evidence, query, visible.first_column, mass)
        new = query.shape[2]
        if self.plan.evicts:
            state.due = new > 1 or self._past_slack(state)
            if self.plan.scope == "prompt":
                if state is self.states[-1] and any(s.due for s in self.states):
                    self._walk(self.states, visible)
            elif state.due:
                self._walk([state], visible)
        if new == 1 and self.plan.slack_tokens is None:
            state.evidence = state.evidence.without_queries()
        state.flush(self.plan, new, visible.real)

    def _past_slack(self, state: LayerState) -> bool:
        slack = self.plan.slack_tokens
        return slack is not None and (state.walk_at is None or state.tail_growth > state.walk_at)

    def _walk(self, states: Sequence[LayerState], visible: Visibility) -> None:
        plan = self.plan
        assert plan.score is not None
        seen = states[0].seen
        rows = states[0].rows
        real = visible.real
        tokens = torch.full((rows,), seen) if real is None else real[:, :seen].sum(-1).cpu()
        window_bytes = self.window_elements * states[0].sizes()[2]
        total = total_tokens(plan, tokens, layers=len(self.states), template=states[0], window_bytes=window_bytes)
        scored = [self._score(state, visible) for state in states]
        capacity = torch.stack([s.held.counts().cpu() for s in scored], 1)
        budgets = plan.allocate.allocate(
            BudgetRequest(
                total=total,
                row_tokens=tokens,
                capacity=capacity,
                floor=torch.minimum(torch.stack([s.floor for s in scored], 1), capacity),
                layers=tuple(s.state.index for s in scored),
                num_layers=len(self.states),
                scores=[s.scores for s in scored] if plan.allocate.needs_scores else None,
            )
        )
        for i, one in enumerate(scored):
            budget = budgets[:, i]
            one.state.due = False
            one.state.settled_seen = seen
            one.state.walk_at = plan.slack_tokens
            if bool((budget < capacity[:, i]).any()):
                keep = plan.select.select(one.scores, budget.to(one.scores.device))
                one.state.keep(plan, one.held, one.slots, keep)
            one.state.tail_growth = 0
        if plan.scope == "prompt":
            for state in states:
                state.flush(plan, visible.new_tokens, visible.real)

    def _score(self, state: LayerState, visible: Visibility) -> _Scored:
        assert self.plan.score is not None
        held, slots = _hold(state, visible, self.needs, len(self.states), self.plan)
        scores = self.plan.score.score(held)
        if bool((~torch.isfinite(scores) & held.valid).any()):
            finite = bool(torch.isfinite(held.keys).all())
            what = "no finite score" if finite else "NaN or infinity in its keys"
            raise CacheMisuse(
                f"layer {state.index} of the compressed layers has {what} for some tokens, so {self.plan} cannot "
                "rank them; check the model's inputs and dtype (float16 overflow is the usual cause)"
            )
        recent = held.recent(self.plan.score.recents)
        scores = scores.masked_fill(recent, float("inf")).masked_fill(~held.valid, float("-inf"))
        return _Scored(state=state, held=held, slots=slots, scores=scores, floor=recent.sum(-1).cpu())


def _real_queries(visible: Visibility) -> Tensor | None:
    if visible.real is None:
        return None
    return visible.real[:, visible.first_column : visible.first_column + visible.new_tokens]


def _hold(state: LayerState, visible: Visibility, needs: Needs, layers: int, plan: Plan) -> tuple[Held, list[Tensor]]:
    """What the layer holds as padded rows, and where each slot of each part stands in them."""
    parts = state.parts(plan.store)
    b, h, seen = state.rows, state.heads, state.seen
    device = parts[-1].decode()[0].device
    before = torch.zeros(b * h, dtype=torch.int64, device=device)
    slots = []
    for part in parts:
        slots.append(slots_of_part(part.layout, before))
        before = before + part.layout.counts().flatten().to(device)
    longest = int(before.max())
    positions = _padded(
        parts, slots, [p.layout.columns(device).expand(p.layout.lanes, -1) for p in parts], b * h, longest, -1
    )
    keys, values = _padded_states(parts, slots, b * h, longest)
    valid = (positions >= 0).view(b, h, -1)
    positions = positions.view(b, h, -1)
    first = torch.zeros(b, dtype=torch.int64, device=device)
    if visible.real is not None:
        real = visible.real[:, :seen].to(device)
        first = real.to(torch.int8).argmax(-1)
        row = torch.arange(b, device=device)[:, None, None]
        valid = valid & real[row, positions.clamp(min=0)]
    evidence: Evidence = state.evidence
    mass = None
    if needs.mass:
        mass = _padded(parts, slots, list(evidence.mass), b * h, longest, 0.0).view(b, h, -1)
    held = Held(
        keys=keys.view(b, h, longest, -1),
        values=values.view(b, h, longest, -1),
        positions=positions,
        valid=valid,
        first=first,
        seen=seen,
        layer=state.index,
        layers=layers,
        scaling=state.scaling,
        queries=evidence.queries,
        query_columns=evidence.columns,
        mass=mass,
    )
    return held, slots


def _padded_states(
    parts: Sequence[Segment], slots: Sequence[Tensor], owners: int, longest: int
) -> tuple[Tensor, Tensor]:
    decoded = [part.decode() for part in parts]
    if len(parts) == 1 and parts[0].layout.owner is None and parts[0].layout.lengths is None:
        return decoded[0]
    keys = _padded(parts, slots, [keys for keys, _ in decoded], owners, longest, 0.0)
    return keys, _padded(parts, slots, [values for _, values in decoded], owners, longest, 0.0)


def _padded(
    parts: Sequence[Segment],
    slots: Sequence[Tensor],
    pieces: Sequence[Tensor],
    owners: int,
    longest: int,
    filler: float,
) -> Tensor:
    """(b * h, longest, ...) in time order, from a piece (m, s, ...) for each part."""
    shape = (owners, longest, *pieces[0].shape[2:])
    whole = torch.full(shape, filler, dtype=pieces[0].dtype, device=pieces[0].device)
    for part, slot, piece in zip(parts, slots, pieces, strict=True):
        owner = part.layout.owners(piece.device)[:, None].expand_as(slot)
        filled = part.layout.filled(piece.device)
        if filled is None:
            whole[owner, slot] = piece
        else:
            whole[owner[filled], slot[filled]] = piece[filled]
    return whole
