"""What every token goes through: append, attend, observe, and, when held exceeds the budget, score, allocate,
select, merge, encode, store. Prefill, every chunk of a chunked prefill, a later turn and decoding all go through
`Engine.attend`.

`docs/route.md` tells it as the life of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvtailor.attend.contract import Attended, AttentionContext, AttentionRequest, IndexRequest
from kvtailor.engine.encode_tail import encode_tail
from kvtailor.engine.evict import Eviction
from kvtailor.engine.layer_state import LayerState
from kvtailor.engine.observe import observe
from kvtailor.engine.pending import Pending
from kvtailor.engine.reconstruct import ReconstructionPass
from kvtailor.errors import TierError
from kvtailor.plan import Plan
from kvtailor.types import Layout, PlainSegment, Visibility
from kvtailor.types.checked_returns import check_attended

__all__ = ["Engine"]


class Engine:
    """The engine of one cache.

    Args:
        plan: what to do.
        layers: how many layers of the model the plan compresses.
        window_elements: elements of one row that the model's own sliding windows hold, on the other layers.

    Attributes:
        holding: nothing is evicted or encoded until `release`, whatever comes.
        opened: a plan whose context must be read twice has begun to, or there is none.
        reconstructing: the forwards of now repeat a piece of the context, and leave no trace but what they say of it.
        passing: keys and values of such a forward, of the layer whose attention comes next.
        speculating: recorded forwards join until they settle, and their tokens are then taken as decoded ones, however
            many came at once; see `rollback`.
        assisted: columns of the prompt, while transformers' assisted decoding runs; None outside of it.
        keeps_queries: the newest queries stay in the evidence, though no eviction of this plan needs them.
    """

    def __init__(self, plan: Plan, layers: int, window_elements: int = 0):
        self.plan = plan
        self.needs = plan.needs
        self._groups = plan.encode.layer_groups(layers)
        self.offload = plan.store.open(self._groups)
        self.states = [LayerState(index, layers, self.offload) for index in range(layers)]
        self._join_groups()
        self.holding = self.opened = self.speculating = self.keeps_queries = False
        self._taken: dict[int, int] = {}
        self.assisted: int | None = None
        self.reconstructing: ReconstructionPass | None = None
        self.passing: PlainSegment | None = None
        self.eviction = Eviction(plan, self.states, window_elements)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a deep copy, whose layers must know each other and not the originals."""
        self.__dict__.update(state)
        self._join_groups()

    def _join_groups(self) -> None:
        for group in self._groups:
            for index in group if len(group) > 1 else ():
                self.states[index].layer_group = tuple(self.states[each] for each in group)

    def append(self, state: LayerState, keys: Tensor, values: Tensor) -> None:
        """New keys (b, h, t, d) and values (b, h, t, dv) of one layer join its tail."""
        if self.reconstructing is not None:
            layout = Layout(rows=keys.shape[0], heads=keys.shape[1], size=keys.shape[2], start=state.seen)
            self.passing = PlainSegment(layout=layout, keys=keys.flatten(0, 1), values=values.flatten(0, 1))
            return
        will_evict = self.plan.evicts and keys.shape[2] > 1 and not self.can_be_taken_back(state)
        state.append(keys, values, exactly=will_evict)

    def attend(self, state: LayerState, query: Tensor, visible: Visibility, scaling: float) -> Tensor:
        """Attention of the new tokens of one layer, then whatever the plan does about what is held.

        Args:
            query: (b, q, t, d) post-RoPE queries of the tokens that were appended last.
            visible: what each of them may see.
            scaling: the model's own factor before the softmax.

        Returns:
            (b, q, t, dv).
        """
        if self.reconstructing is not None:
            assert self.passing is not None
            passing, self.passing = self.passing, None
            return self.reconstructing.attend(state, passing, query, visible, scaling)
        state.scaling = scaling
        before = state.carry
        gathers = self.needs.mass and not self.can_be_taken_back(state)
        attended = self.attended(state, query, visible, want_mass=gathers)
        state.read = attended.tokens_read
        state.carry = attended.carry
        if (query.shape[2] > 1 and not self.speculating) or self.holding:
            state.moved = True
        if not self.can_be_taken_back(state):
            self._settle(state, query, visible, attended.mass, decoded=self.speculating or query.shape[2] == 1)
        elif state.pending is not None:
            state.pending = state.pending.followed_by(query.detach(), visible)
        else:
            state.pending = Pending(
                query=query.detach().clone(), visible=visible, carry=before, decoded=self.speculating
            )
        self.leave(state)
        return attended.output

    def prefill_shared(self, state: LayerState, query: Tensor, visible: Visibility, scaling: float) -> None:
        """What `attend` does about new tokens, where nobody asks for the output. Of a prompt or a part of it."""
        if self.needs.mass or not self.plan.attend.reads_alike:
            self.attend(state, query, visible, scaling)
            return
        state.scaling = scaling
        state.moved = True
        self._settle(state, query, visible, None, decoded=False)
        self.leave(state)

    def replayed(self, state: LayerState, tokens: int, visible: Visibility) -> None:
        """Does what follows new tokens that were written into a layer's free slots and attended elsewhere, one by one.

        Args:
            tokens: no more than `LayerState.tokens_until_action` gave before they came.
            visible: what the last of them may see.
        """
        state.filled(tokens)
        state.read = None
        self._act(state, 1, visible)
        self.leave(state)

    def commit(self, state: LayerState, rejected: int) -> None:
        """Ends a recorded forward: forgets its last `rejected` tokens, then does what was put off for the rest."""
        pending, state.pending = state.pending, None
        if pending is None:
            state.crop(rejected, exact=not self.needs.mass)
            return
        accepted = pending.query.shape[2] - rejected
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
            attended = self.attended(state, query, visible, want_mass=self.needs.mass)
            state.carry, mass = attended.carry, attended.mass
        self._settle(state, query, visible, mass, decoded=pending.decoded)
        self.leave(state)

    def release(self, visible: Visibility) -> None:
        """Ends `holding`: evicts on all layers. `visible` describes all that came meanwhile as one forward."""
        self.holding = False
        for state in self.states:
            state.due = self.plan.evicts and visible.new_tokens > 1
        if any(state.due for state in self.states):
            for stage in self._stages():
                self.eviction.run(stage, visible, self._close)
        for state in self.states:
            if self.plan.slack_tokens is None:
                state.reconstruction = None
            self._close(state, visible)
            self.leave(state)

    def reset(self) -> None:
        """Forgets everything."""
        for state in self.states:
            state.reset()
        self.holding = self.opened = self.speculating = False
        self.assisted = None
        self.offload.reset()
        self._taken = {}
        self.reconstructing = self.passing = None
        self.eviction.forget()

    def can_be_taken_back(self, state: LayerState) -> bool:
        """Whether tokens that come now wait for a crop; the prompt of assisted decoding does not."""
        return state.recording and (self.speculating or self.assisted is None)

    def attended(self, state: LayerState, query: Tensor, visible: Visibility, *, want_mass: bool) -> Attended:
        """Attention of the tokens that were appended last; nothing but the tiers changes."""
        parts = state.parts()
        self.offload.prefetch(state.index)
        self._check_limit(state)
        request = AttentionRequest(
            query=query,
            parts=parts,
            visible=visible,
            scaling=state.scaling,
            want_mass=want_mass,
            real_queries=_real_queries(visible),
            context=self._context(state),
        )
        attended = self.plan.attend.attend(request)
        check_attended(self.plan.attend, attended, query, parts, want_mass=want_mass)
        return attended

    def _context(self, state: LayerState) -> AttentionContext:
        return AttentionContext(
            layer=state.index,
            layers=len(self.states),
            rotation=state.rotation,
            deferred=self.holding,
            carry=state.carry,
        )

    def _close(self, state: LayerState, visible: Visibility, *, decoded: bool = False) -> None:
        """Encodes what leaves the tail, and lets the attention look at what is held now."""
        encode_tail(state, self.plan, 1 if decoded else visible.new_tokens, visible.real)
        if state.moved and not state.due:
            state.moved = False
            request = IndexRequest(parts=state.parts(), visible=visible, context=self._context(state))
            state.carry = self.plan.attend.index(request)
        if not state.due:
            state.put_away()

    def leave(self, state: LayerState) -> None:
        """Nobody reads this layer any more, nor those that it is encoded together with."""
        if not state.layer_group or state.completes:
            self.offload.rest()

    def _check_limit(self, state: LayerState) -> None:
        limit = self.plan.store.limit
        if limit is None:
            return
        self._taken[state.index] = state.device_bytes()
        taken = sum(self._taken.values()) + self.offload.device_bytes()
        if taken > limit:
            raise TierError(
                f"{self.plan} allows {limit} bytes on the device, and after {state.seen} tokens, at layer "
                f"{state.index} of the compressed layers, the cache takes {taken}; allow more, hold less, feed a long "
                "prompt in chunks, or let more layers leave the device"
            )

    def _settle(
        self,
        state: LayerState,
        query: Tensor,
        visible: Visibility,
        mass: Sequence[Tensor] | None,
        *,
        decoded: bool,
    ) -> None:
        """Gathers the evidence of new tokens and lets the plan act on them, as decoded ones or as a prompt or turn."""
        state.evidence = observe(
            self.needs, state.evidence, query, visible.first_column, mass, real=visible.real, rotation=state.rotation
        )
        if not self.holding:
            self._act(state, 1 if decoded else query.shape[2], visible)

    def _act(self, state: LayerState, new: int, visible: Visibility) -> None:
        close = partial(self._close, decoded=new == 1)
        if self.plan.evicts:
            state.due = new > 1 or self._past_slack(state)
            if self.needs.reconstruction and state.reconstruction is None:
                # What came after the context was never repeated, and nobody can say what it is worth.
                state.due = False
            if self.plan.scope == "layer":
                if state.due:
                    self.eviction.run([state], visible, close)
            elif self.plan.scope == "progressive":
                if any(s.due for s in self.states[: state.index + 1]):
                    self.eviction.run(self.states[: state.index + 1], visible, close)
            elif state is self.states[-1] and any(s.due for s in self.states):
                self.eviction.run(self.states, visible, close)
        if new == 1 and not self._asks_again:
            state.evidence = state.evidence.without_queries()
        close(state, visible)

    @property
    def listens(self) -> bool:
        """What new tokens attend to while decoding is evidence that a later eviction may need."""
        needs = self.needs
        return needs.mass or (self._asks_again and bool(needs.window or needs.rows or needs.moments))

    @property
    def _asks_again(self) -> bool:
        return self.plan.slack_tokens is not None or self.plan.encode.needs.window > 0 or self.keeps_queries

    def _stages(self) -> list[list[LayerState]]:
        """The layers that are cut together, in the order in which they do."""
        if self.plan.scope == "layer":
            return [[state] for state in self.states]
        if self.plan.scope == "progressive":
            return [self.states[: i + 1] for i in range(len(self.states))]
        return [self.states]

    def _past_slack(self, state: LayerState) -> bool:
        slack = self.plan.slack_tokens
        return slack is not None and (state.evict_at is None or state.tail_growth > state.evict_at)


def _real_queries(visible: Visibility) -> Tensor | None:
    if visible.real is None:
        return None
    return visible.real[:, visible.first_column : visible.first_column + visible.new_tokens]
