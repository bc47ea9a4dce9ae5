"""What every token goes through: append, attend, observe; past the budget score, allocate, select, merge, encode.

A forward makes two calls for each layer: `Engine.attend`, which changes nothing but the tiers, and `Engine.act`, which
does what follows. Prefill, every chunk of a chunked prefill, a later turn and decoding all go through them.
`docs/route.md` follows one prompt through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtailor.attend.contract import Attended, AttentionContext, AttentionRequest, IndexRequest
from kvtailor.engine.apply import counted_from, encode_tail
from kvtailor.engine.budget import no_bytes
from kvtailor.engine.evict import Eviction
from kvtailor.engine.observe import observe, real_queries
from kvtailor.engine.phase import Deferred, Phase, PhaseSwitch, Reconstructing, Stopped
from kvtailor.engine.reading import read_latents
from kvtailor.engine.state import LayerState, Pending, ReaderQueries
from kvtailor.errors import TierError
from kvtailor.plan import Plan
from kvtailor.types import Layout, Needs, PlainSegment, Visibility
from kvtailor.types.checked_returns import check_attended
from kvtailor.types.evidence import Evidence
from kvtailor.types.late_checks import LateChecks

__all__ = ["Engine"]


class Engine:
    """Runs a plan on the layers of one cache.

    Args:
        plan: of the cache.
        layers: how many layers of the model the plan compresses.
        other_bytes, sizes: see `Eviction`.
        stored_dtype: dtype in which keys and values are held, and queries kept as evidence, if it is not the dtype in
            which the model makes them; None: it is.

    Attributes:
        states: what each compressed layer remembers.
        offload: holds the segments.
        eviction: evicts tokens of the layers.
        switch: holds the phase and changes it.
        needs: the evidence to gather: what the plan's methods declare, and what `gather` adds.
        late: checks of numbers on the device that the host has not read yet; those of a decoded token are read when
            the next forward begins.
    """

    def __init__(
        self,
        plan: Plan,
        layers: int,
        other_bytes: Callable[[int], int] = no_bytes,
        sizes: Sequence[tuple[int, int, int]] = (),
        stored_dtype: torch.dtype | None = None,
    ):
        self.plan, self.late = plan, LateChecks()
        self.stored_dtype = stored_dtype
        self._groups = plan.encode.layer_groups(layers)
        self.offload, self._taken = plan.store.open(self._groups), dict[int, int]()
        self.states = [LayerState(index, layers, self.offload) for index in range(layers)]
        self._join_groups()
        self._takes_short_context = False
        self._in_memory = plan.store.is_memory
        self._evicts_again = plan.slack_tokens is not None
        self.gather(Needs())
        self.switch, self.eviction = PhaseSwitch(), Eviction(plan, self.states, other_bytes, sizes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a deep copy, whose layers must refer to each other and not to the originals."""
        self.__dict__.update(state)
        self._join_groups()

    def _join_groups(self) -> None:
        for group in self._groups:
            for index in group if len(group) > 1 else ():
                self.states[index].layer_group = tuple(self.states[each] for each in group)

    @property
    def phase(self) -> Phase:
        """Return what new tokens are."""
        return self.switch.now

    @property
    def refuses_plain_context(self) -> bool:
        """Whether a context that is fed now would be read once although the plan must read it twice."""
        begun = isinstance(self.phase, Deferred | Reconstructing) or self._takes_short_context
        return self.plan.needs.reconstruction is not None and not (begun or self.states[0].stored.seen)

    def take_short_context(self) -> None:
        """Allow a context of a single token to be read once: there is nothing to repeat."""
        self._takes_short_context = True

    def gather(self, more: Needs) -> None:
        """Gather more evidence than the plan's methods need; `Needs()` ends this."""
        self.needs = self.plan.needs | more
        self._needs_queries_again = self._evicts_again or self.plan.encode.needs.window > 0 or more.window > 0

    def written(self, state: LayerState, keys: Tensor, values: Tensor, visible: Visibility) -> tuple[Tensor, Tensor]:
        """Return new keys (b, h, t, d) and values (b, h, t, dv) as whatever comes next reads them.

        They are what was given, but under a codec that rounds tokens before anything reads them. `visible` says what
        is padding, which is no position.
        """
        if not self.plan.encode.rounds_on_write:
            return keys, values
        codec = state.codec(self.plan, heads=keys.shape[1])
        if not codec.rounds_on_write:
            return keys, values
        (rows, heads, tokens, _), dtype = keys.shape, keys.dtype
        layout = Layout(rows=rows, heads=heads, size=tokens, start=state.stored.seen)
        own_keys, own_values = (each.flatten(0, 1).contiguous() for each in (keys, values))
        real = visible.real
        first = None if real is None else counted_from(codec, real[:, : state.stored.seen + tokens].to(keys.device))
        found = codec.encode(layout, own_keys, own_values, first).decode()
        rounded = [each.to(dtype).unflatten(0, (rows, heads)) for each in found]
        return rounded[0], rounded[1]

    def append(self, state: LayerState, keys: Tensor, values: Tensor) -> None:
        """Append new keys (b, h, t, d) and values (b, h, t, dv) of one layer to its tail."""
        will_evict = self.plan.evicts and keys.shape[2] > 1 and not self.phase.can_be_taken_back
        state.append(keys, values, exactly=will_evict)

    def attend(self, state: LayerState, query: Tensor, visible: Visibility, scaling: float) -> Attended:
        """Return the attention of the tokens that were appended last; what is held does not change.

        Args:
            state: of the layer.
            query: (b, q, t, d) post-RoPE queries of these tokens.
            visible: what each of these tokens may see.
            scaling: the model's own factor before the softmax.

        Raises:
            TierError: the cache takes more bytes on the device than the plan allows.
            MethodError: the attention breaks its contract.
        """
        state.model.scaling = scaling
        return self.read(state, query, visible, want_mass=self.needs.mass and not self.phase.can_be_taken_back)

    def act(
        self,
        state: LayerState,
        query: Tensor,
        visible: Visibility,
        attended: Attended,
        others: Sequence[ReaderQueries] = (),
    ) -> None:
        """Observe new tokens after their attention, then evict, encode and store; while recording, wait for a crop.

        Args:
            state, query, visible: what `attend` was given.
            attended: what it returned.
            others: queries of other modules that have read the layer in the same forward; they are evidence as well.
        """
        phase, before = self.phase, state.observed.carry
        state.observed.tokens_read, state.observed.carry = attended.tokens_read, attended.carry
        if (query.shape[2] > 1 and not phase.all_decoded) or isinstance(phase, Deferred):
            state.clock.reindex = True
        if isinstance(phase, Stopped):
            self.leave(state)
            return
        if not phase.can_be_taken_back:
            self._settle(state, query, visible, attended.mass, decoded=query.shape[2] == 1, others=others)
        elif state.pending is not None:
            state.pending = state.pending.followed_by(query.detach(), visible, others)
        else:
            state.pending = Pending(
                query=query.detach().clone(),
                visible=visible,
                carry=before,
                decoded=phase.all_decoded,
                others=tuple(replace(each, query=each.query.detach().clone()) for each in others),
            )
        self.leave(state)

    def act_unread(self, state: LayerState, query: Tensor, visible: Visibility, scaling: float) -> None:
        """Do as `act` for a prompt or a part of it whose attention output is not needed.

        The attention is computed only if something that follows depends on it.
        """
        if self.needs.mass or not self.plan.attend.reads_alike:
            self.act(state, query, visible, self.attend(state, query, visible, scaling))
            return
        state.model.scaling = scaling
        state.clock.reindex = True
        self._settle(state, query, visible, None, decoded=False)
        self.leave(state)

    def begin_reading(self, state: LayerState) -> None:
        """Fetch the segments of the next layer ahead, and check the bytes on the device against the limit.

        Raises:
            TierError: the cache takes more of the device than the plan allows.
        """
        self.offload.prefetch(state.index)
        self._check_limit(state)

    def take_prompt(self, state: LayerState, evidence: Evidence, visible: Visibility) -> None:
        """Do as `act` for a first prompt that another cache has read.

        Before it, the tokens were appended, `begin_reading` was called, and `state.model.scaling` was set.

        Args:
            state: of the layer.
            evidence: what a forward of the prompt would have gathered for this plan, in storages of its own.
            visible: of the prompt, whose tokens are all that the layer has seen.
        """
        state.clock.reindex = True
        state.observed.evidence = evidence
        if not isinstance(self.phase, Deferred):
            self._evict_and_encode(state, visible.new_tokens, visible)
        self.leave(state)

    def reconstruct(
        self, state: LayerState, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float
    ) -> Tensor:
        """Return the attention (b, q, t, dv) of tokens that repeat a piece of the context; they are not held.

        The layer remembers what they attend to; see `ReconstructionPass`.
        """
        phase = self.phase
        assert isinstance(phase, Reconstructing)
        layout = Layout(rows=keys.shape[0], heads=keys.shape[1], size=keys.shape[2], start=state.stored.seen)
        passing = PlainSegment(layout=layout, keys=keys.flatten(0, 1), values=values.flatten(0, 1))
        return phase.piece.attend(state, passing, query, visible, scaling)

    def replayed(self, state: LayerState, tokens: int, visible: Visibility) -> None:
        """Do as `act` for decoded tokens that a replayed graph has written into a layer's free slots and attended.

        Args:
            state: of the layer.
            tokens: how many, at most what `LayerState.tokens_until_action` returned before them.
            visible: what the last of them may see.
        """
        state.filled(tokens)
        state.observed.tokens_read = None
        self._evict_and_encode(state, 1, visible)
        self.leave(state)

    def commit(self, state: LayerState, rejected: int) -> None:
        """End a recorded forward: forget its last `rejected` tokens, then act on the rest."""
        pending, state.pending = state.pending, None
        if pending is None:
            state.crop(rejected, exact=not self.needs.mass)
            return
        accepted = pending.query.shape[2] - rejected
        state.forget_newest(rejected)
        observed, carry = state.observed, state.observed.carry
        if rejected:
            observed.carry = pending.carry
        if accepted == 0:
            return
        query, visible = pending.query[:, :, :accepted], pending.visible.without_last(rejected)
        mass = None
        if self.needs.mass or (rejected and carry):
            # What rejected tokens left in mass or carry goes with them.
            observed.carry = pending.carry
            attended = self.read(state, query, visible, want_mass=self.needs.mass)
            observed.carry, mass = attended.carry, attended.mass
        others, decoded = [self._again(state, each, rejected) for each in pending.others], pending.decoded
        self._settle(state, query, visible, mass, decoded=decoded, others=others)
        self.leave(state)

    def release(self, visible: Visibility) -> None:
        """Act on the tokens that came in the phase `Deferred`, which has ended.

        Args:
            visible: describes all of these tokens as one forward.
        """
        for state in self.states:
            state.clock.count_arrived(visible.new_tokens, state.stored.seen)
            state.clock.due, state.clock.decoding = self.plan.evicts and visible.new_tokens > 1, False
        if any(state.clock.due for state in self.states):
            for layers in self._cut_together():
                with self.late.collecting():
                    self.eviction.run(layers, visible, self._close)
        for state in self.states:
            state.observed.end_repetition(again=self.plan.slack_tokens is not None)
            if self._was_never_repeated(state):
                self._forget_queries(state)
            self._close(state, visible)
            self.leave(state)
        self.late.settle()

    def reset(self) -> None:
        """Forget everything."""
        for state in self.states:
            state.reset()
        self.switch.reset()
        self._takes_short_context, self._taken = False, {}
        self.offload.reset()
        self.eviction.forget()
        self.late.forget()

    def read(self, state: LayerState, query: Tensor, visible: Visibility, *, want_mass: bool) -> Attended:
        """Return the attention of the tokens that were appended last; see `attend`."""
        parts, latents = state.parts(), state.model.latents
        self.begin_reading(state)
        request = AttentionRequest(
            query=query,
            parts=parts,
            visible=visible,
            scaling=state.model.scaling,
            want_mass=want_mass,
            real_queries=real_queries(visible),
            context=self._context(state),
            softmax=state.model.softmax,
        )
        if latents is not None:
            return read_latents(self.plan.attend, request, latents)
        # On the CPU nothing is collected.
        with nullcontext() if query.is_cpu else self.late.collecting():
            attended = self.plan.attend.attend(request)
        check_attended(self.plan.attend, attended, query, parts, want_mass=want_mass)
        return attended

    def _again(self, state: LayerState, reading: ReaderQueries, rejected: int) -> ReaderQueries:
        """Return another module's queries of the tokens that stay, with their mass if that is needed."""
        query = reading.query[:, :, : reading.query.shape[2] - rejected]
        visible = reading.visible.without_last(rejected)
        mass = self.read(state, query, visible, want_mass=True).mass if self.needs.mass else None
        return replace(reading, query=query, visible=visible, mass=mass)

    def leave(self, state: LayerState) -> None:
        """End the reading of a layer, and of the layers that are encoded together with it."""
        if not state.layer_group or state.completes:
            self.offload.rest()

    def as_evidence(self, query: Tensor) -> Tensor:
        """Return queries in the dtype in which they are kept."""
        return query if self.stored_dtype is None else query.to(self.stored_dtype)

    @property
    def given_dtype(self) -> torch.dtype | None:
        """Return the model's dtype if keys and values are held in another one; else None."""
        return None if self.stored_dtype is None else torch.float32

    @property
    def listens(self) -> bool:
        """Whether a later eviction may need what decoded tokens attend to."""
        return self.needs.mass or self._listens_to_queries

    @property
    def _listens_to_queries(self) -> bool:
        sampled = self._evicts_again and bool(self.needs.rows or self.needs.moments)
        return sampled or (self._needs_queries_again and self.needs.window > 0)

    @property
    def has_fast_path(self) -> bool:
        """Whether decoded tokens can take the fast path until the plan acts; see `engine.fast_path`."""
        gathers = self._evicts_again and bool(self.needs.rows or self.needs.moments)
        return self._in_memory and not gathers and not self.plan.encode.rounds_on_write

    @property
    def window_of_decoded(self) -> int:
        """Return how many of the newest queries are kept as evidence while decoding."""
        return self.needs.window if self._needs_queries_again else 0

    def _context(self, state: LayerState) -> AttentionContext:
        return AttentionContext(
            layer=state.index,
            layers=len(self.states),
            rotation=state.model.rotation,
            deferred=isinstance(self.phase, Deferred),
            carry=state.observed.carry,
            share=state.model.share,
        )

    def _close(self, state: LayerState, visible: Visibility, *, decoded: bool = False) -> None:
        """Encode what leaves the tail, let the attention index what is held, and hand the segments to their tier."""
        encode_tail(state, self.plan, 1 if decoded else visible.new_tokens, visible.real, self.late)
        if state.clock.reindex and not state.clock.due:
            state.clock.reindex = False
            request = IndexRequest(parts=state.readable_parts(), visible=visible, context=self._context(state))
            state.observed.carry = self.plan.attend.index(request)
        if not state.clock.due:
            state.put_away()

    def _check_limit(self, state: LayerState) -> None:
        limit = self.plan.store.limit
        if limit is None:
            return
        self._taken[state.index] = state.device_bytes()
        # Processes that share the heads end together: the others would wait for the one that is over its limit.
        most = state.model.share.highest(sum(self._taken.values()) + self.offload.device_bytes())
        if most > limit:
            raise TierError(
                f"{self.plan} allows {limit} bytes on the device, and after {state.stored.seen} tokens, at layer "
                f"{state.index} of the compressed layers, the cache takes {most}; allow more, hold less, feed a long "
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
        others: Sequence[ReaderQueries] = (),
    ) -> None:
        """Gather the evidence of new tokens, and evict if it is due: of decoded ones, or of a prompt or turn."""
        if mass is not None and others:
            mass = [sum(parts[1:], parts[0]) for parts in zip(mass, *(each.mass or () for each in others), strict=True)]
        deferred, one = isinstance(self.phase, Deferred), decoded or query.shape[2] == 1
        of_later = deferred or not one or self._evicts_again
        # What a decoded token would leave for no later eviction is not gathered at all; codecs want the newest queries.
        needs = self.needs if of_later else replace(self.needs, rows=0, moments=False)
        if of_later or needs.mass or self._listens_to_queries:
            state.observed.evidence = observe(
                needs,
                state.observed.evidence,
                self.as_evidence(query),
                visible.first_column,
                mass,
                real=visible.real,
                rotation=state.model.rotation,
                others=[(self.as_evidence(each.query), each.visible.first_column) for each in others],
            )
        if not deferred:
            self._evict_and_encode(state, 1 if decoded else query.shape[2], visible)

    def _evict_and_encode(self, state: LayerState, new: int, visible: Visibility) -> None:
        close = partial(self._close, decoded=new == 1)
        if self.plan.evicts:
            state.clock.count_arrived(new, state.stored.seen)
            state.clock.due, state.clock.decoding = self._is_due(state, new), new == 1
            if layers := self._cut_now(state):
                with self.late.collecting():
                    self.eviction.run(layers, visible, close)
        if new == 1 or self._was_never_repeated(state):
            self._forget_queries(state)
        close(state, visible)
        if new > 1 and state is self.states[-1]:
            self.late.settle()

    def _forget_queries(self, state: LayerState) -> None:
        """Drop the queries kept as evidence, unless an eviction or encoding while decoding may need them."""
        if state.observed.evidence.has_queries and not self._needs_queries_again:
            state.observed.evidence = state.observed.evidence.without_queries()

    def _was_never_repeated(self, state: LayerState) -> bool:
        """Whether new tokens have no score because only the context was repeated, so that nothing more is evicted."""
        return self.needs.reconstruction is not None and state.observed.reconstruction is None

    def _is_due(self, state: LayerState, new: int) -> bool:
        """Whether a layer must be evicted from after `new` new tokens."""
        if self._was_never_repeated(state):
            return False
        return state.clock.is_due(self.plan.slack_tokens, new)

    def _cut_now(self, state: LayerState) -> list[LayerState]:
        """Return the layers to evict from once this one has its new tokens; none while they wait for others."""
        if self.plan.scope == "layer":
            layers = [state]
        elif self.plan.scope == "progressive":
            layers = self.states[: state.index + 1]
        else:
            layers = self.states if state is self.states[-1] else []
        return layers if any(each.clock.due for each in layers) else []

    def _cut_together(self) -> list[list[LayerState]]:
        """Return the layers that are evicted from together, in order."""
        if self.plan.scope == "layer":
            return [[state] for state in self.states]
        if self.plan.scope == "progressive":
            return [self.states[: i + 1] for i in range(len(self.states))]
        return [self.states]
