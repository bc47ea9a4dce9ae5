"""Decoded tokens of a layer that drops its middle at each of them: what the next one needs is worked out once.

The short way of `engine.steady` ends where the plan acts, which such a plan does at each token. Its act is always the
same, though: the token joins, all is read, and the oldest behind the first ones goes (`drop_middle`), so that all that
is read lies one slot further on. Under `rolling` the first ones are turned by what is missing behind them, as
`attend.rolling` does, which stays the reference. All of it is the token's one call of C++ (`ops/cpu/step.h`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtailor.attend.rolling import Rolling
from kvtailor.attend.segments import Segments
from kvtailor.engine.engine import Engine
from kvtailor.engine.layer_state import LayerState
from kvtailor.engine.phase import Compressing
from kvtailor.engine.steady import SteadyLayer, goes_generally
from kvtailor.ops import dispatch
from kvtailor.ops.cpu.library import Ends, library
from kvtailor.ops.cpu.step import TokenStep
from kvtailor.ops.lanes.rotate import cosines_and_sines
from kvtailor.types import Layout, PlainSegment, Rotation, Segment, Visibility

if TYPE_CHECKING:
    from kvtailor.store.recent_window import Tail

__all__ = ["SteadyEnds", "acts_alike", "step_over_all"]


class SteadyEnds(SteadyLayer):
    """One layer that keeps its first tokens and the newest, as many at each token."""

    def __init__(self, engine: Engine, state: LayerState, step: TokenStep, ends: Ends, rotation: Rotation | None):
        super().__init__(engine, state, step, None)
        self._ends, self._rotation = ends, rotation

    @classmethod
    def of(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> SteadyLayer | None:
        """Return the layer as it is after a decoded token, of whichever kind; see `SteadyLayer.of`."""
        found = cls._of_ends(engine, state, query_heads, visible)
        return found or SteadyLayer.of(engine, state, query_heads, visible)

    @classmethod
    def _of_ends(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> SteadyEnds | None:
        plan, first, tail, model = engine.plan, engine.eviction.first, state.stored.tail, state.model
        if first is None or tail is None or not acts_alike(engine, state, visible):
            return None
        if not plan.store.is_memory or engine.listens or state.stored.segments or state.observed.carry:
            return None
        if not first < tail.length < state.stored.seen or tail.anchor < first or tail.run != tail.length - first:
            return None
        turns = type(plan.attend) is Rolling and first > 0
        rotation = model.rotation if turns else None
        if turns and rotation is None:
            return None
        ends = Ends(first=first)
        if rotation is not None:
            ends.planes, ends.interleaved = rotation.size // 2, int(rotation.interleaved)
        parts = _parts(tail.as_segment(), 0 if rotation is None else first)
        step = step_over_all(engine, state, parts, query_heads, ends)
        return None if step is None else cls(engine, state, step, ends, rotation)

    def holds(self, engine: Engine, state: LayerState) -> bool:
        """See `SteadyLayer.holds`."""
        tail, clock = state.stored.tail, state.clock
        # What others hold as well is copied before its first tokens move.
        mine = tail is not None and not tail.shared
        return mine and clock.growth == 0 and clock.evict_at == 0 and super().holds(engine, state)

    def take(
        self, state: LayerState, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See `SteadyLayer.take`."""
        stored, ends = state.stored, self._ends
        tail = stored.tail
        assert tail is not None
        if not tail.free:
            self._grow(state)
        if self._rotation is not None:
            ends.cosines, ends.sines = _TURNS.by(self._seen - self._length, self._rotation)
        output, _ = self.step.take(query, keys, values, slot=self._length, column=self._seen, sinks=sinks)
        tail.moved_on(ends.first)
        self.notice(tail)
        self._seen += 1
        stored.seen = state.clock.settled_seen = self._seen
        state.observed.tokens_read = None
        return output

    def _tail_parts(self, tail: Tail) -> list[PlainSegment]:
        return _parts(tail.as_segment(), self._ends.first if self._ends.planes else 0)


def acts_alike(engine: Engine, state: LayerState, visible: Visibility) -> bool:
    """Return whether a layer drops a token at each that is decoded, by ages alone, so that its act is always the same.

    Args:
        engine: of the cache.
        state: of the layer, behind a decoded token.
        visible: of that token.
    """
    plan, tail, clock = engine.plan, state.stored.tail, state.clock
    if engine.eviction.first is None or plan.tokens is None or plan.slack_tokens != 0 or goes_generally():
        return False
    if type(plan.attend) not in (Rolling, Segments) or dispatch.forced() != "auto" or not visible.causal_only:
        return False
    if not isinstance(engine.phase, Compressing) or engine.phase.windows_record:
        return False
    # Of a budget in tokens a layer that has dropped any holds as many as it may, from then on.
    if clock.evict_at != 0 or clock.growth != 0 or clock.due or clock.reindex:
        return False
    if state.pending is not None or state.draft is not None or state.model.latents is not None:
        return False
    return tail is not None and tail.is_followed_by(state.stored.seen)


def step_over_all(
    engine: Engine, state: LayerState, parts: Sequence[Segment], query_heads: int, ends: Ends | None = None
) -> TokenStep | None:
    """Return the call that reads every slot of a layer's parts; None where no kernel does.

    Args:
        engine: of the cache.
        state: of the layer, which has a tail.
        parts: all that is read, the tail last.
        query_heads: q, of the layer's attention.
        ends: how the tail moves on by itself; None: it does not.
    """
    tail, used, given = state.stored.tail, library(), engine.given_dtype
    assert tail is not None
    keys, values, positions = tail.buffers()
    if used is None or keys.device.type != "cpu" or TokenStep.unsuited(parts, mass=False, given=given) is not None:
        return None
    step = TokenStep(
        parts,
        [None] * len(parts),
        keys,
        values,
        positions,
        query_heads=query_heads,
        scaling=state.model.scaling,
        softcap=state.model.softmax.softcap,
        mass=False,
        using=used,
        ends=ends,
        given=given,
    )
    return step if step.complete else None


class _Turns(threading.local):
    """Cosines and sines that a thread has worked out last: all layers of a forward ask for the same ones."""

    missing = -1
    rotation: Rotation | None = None
    found: tuple[Tensor, Tensor] | None = None

    def by(self, missing: int, rotation: Rotation) -> tuple[int, int]:
        """Addresses of those by which keys are turned, behind which so many tokens are missing."""
        if self.found is None or missing != self.missing or rotation is not self.rotation:
            self.found = cosines_and_sines(torch.tensor([missing]), rotation.frequencies)
            self.missing, self.rotation = missing, rotation
        return self.found[0].data_ptr(), self.found[1].data_ptr()


_TURNS = _Turns()


def _parts(whole: PlainSegment, first: int) -> list[PlainSegment]:
    """A tail as attention reads it: its first tokens, whose keys will be others, and the rest; or all in one."""
    layout = whole.layout
    if not first:
        return [whole]
    sizes, ends = (first, layout.size - first), (slice(0, first), slice(first, None))
    return [
        PlainSegment(
            layout=Layout(rows=layout.rows, heads=layout.heads, size=size, start=0),
            keys=whole.keys[:, end],
            values=whole.values[:, end],
        )
        for size, end in zip(sizes, ends, strict=True)
    ]
