"""The one walk that every token takes: append, attend, observe, and, when held exceeds the budget, score, allocate,
select, merge, encode, store. Prefill, every chunk of a chunked prefill, a later turn and decoding all go through
`Route.attend`.

`docs/route.md` tells it as the life of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvtailor.attend.contract import Attended, LayerFacts
from kvtailor.errors import CacheMisuse
from kvtailor.flush import flush
from kvtailor.layer import LayerState, Pending
from kvtailor.observe import observe
from kvtailor.plan import Plan
from kvtailor.repeat import Piece
from kvtailor.types import Layout, PlainSegment, Visibility
from kvtailor.walk import Walk

__all__ = ["Route"]


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
        self.needs = plan.needs
        self.states = [LayerState(index, layers) for index in range(layers)]
        for group in plan.encode.layers_together(layers):
            for index in group if len(group) > 1 else ():
                self.states[index].together = tuple(self.states[each] for each in group)
        self.holding = self.opened = False
        self.repeating: Piece | None = None
        self.passing: PlainSegment | None = None
        self.walk = Walk(plan, self.states, self._close, window_elements)

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
        before = state.carry
        attended = self._attended(state, query, visible, want_mass=self.needs.mass and not state.recording)
        state.read = attended.read
        state.carry = attended.carry
        if query.shape[2] > 1 or self.holding:
            state.moved = True
        if state.recording:
            state.pending = Pending(query=query.detach().clone(), visible=visible, carry=before)
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
        carry = state.carry
        if rejected:
            state.carry = pending.carry
        if accepted == 0:
            return
        query, visible = pending.query[:, :, :accepted], pending.visible.without_last(rejected)
        mass = None
        if self.needs.mass or (rejected and carry):
            # What rejected tokens left in mass or carry goes with them.
            state.carry = pending.carry
            attended = self._attended(state, query, visible, want_mass=self.needs.mass)
            state.carry, mass = attended.carry, attended.mass
        self._settle(state, query, visible, mass)

    def release(self, visible: Visibility) -> None:
        """Ends `holding`: walks all layers. `visible` describes all that came meanwhile, as if it had come at once."""
        self.holding = False
        for state in self.states:
            state.due = self.plan.evicts and visible.new_tokens > 1
        if any(state.due for state in self.states):
            for stage in self._stages():
                self.walk.run(stage, visible)
        for state in self.states:
            if self.plan.slack_tokens is None:
                state.reconstruction = None
            self._close(state, visible)

    def reset(self) -> None:
        """Forgets everything."""
        for state in self.states:
            state.reset()
        self.holding = self.opened = False
        self.repeating = self.passing = None
        self.walk.forget()

    def _attended(self, state: LayerState, query: Tensor, visible: Visibility, *, want_mass: bool) -> Attended:
        return self.plan.attend.attend(
            query,
            state.parts(self.plan.store),
            visible,
            state.scaling,
            want_mass=want_mass,
            real_queries=_real_queries(visible),
            facts=self._facts(state),
        )

    def _facts(self, state: LayerState) -> LayerFacts:
        return LayerFacts(
            layer=state.index,
            layers=len(self.states),
            rotation=state.rotation,
            reading=self.holding,
            carry=state.carry,
        )

    def _close(self, state: LayerState, visible: Visibility) -> None:
        """Encodes what leaves the tail, and lets the attention look at what is held now."""
        flush(state, self.plan, visible.new_tokens, visible.real)
        if state.moved and not state.due:
            state.moved = False
            state.carry = self.plan.attend.index(state.parts(self.plan.store), visible, self._facts(state))

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
                    self.walk.run([state], visible)
            elif self.plan.scope == "progressive":
                if any(s.due for s in self.states[: state.index + 1]):
                    self.walk.run(self.states[: state.index + 1], visible)
            elif state is self.states[-1] and any(s.due for s in self.states):
                self.walk.run(self.states, visible)
        if new == 1 and self.plan.slack_tokens is None and not self.plan.encode.needs.window:
            state.evidence = state.evidence.without_queries()
        self._close(state, visible)

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


def _real_queries(visible: Visibility) -> Tensor | None:
    if visible.real is None:
        return None
    return visible.real[:, visible.first_column : visible.first_column + visible.new_tokens]
