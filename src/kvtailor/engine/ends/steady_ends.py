"""Decoded tokens of a layer that drops its middle at each of them: what the next one needs is worked out once.

The short way of `engine.steady` ends where the plan acts, which such a plan does at each token. Its act is always the
same, though: the token joins, all is read, and the oldest behind the first ones goes (`drop_middle`), so that all that
is read lies one slot further on. Under `rolling` the first ones are turned by what is missing behind them, as
`attend.rolling` does, which stays the reference. All of it is the token's one call of C++ (`ops/cpu/step.h`).
"""

from __future__ import annotations

import threading
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
from kvtailor.types import Layout, PlainSegment, Rotation, Visibility

if TYPE_CHECKING:
    from kvtailor.store.recent_window import Tail

__all__ = ["SteadyEnds"]


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
        plan, first, tail, clock, model = (
            engine.plan,
            engine.eviction.first,
            state.stored.tail,
            state.clock,
            state.model,
        )
        if first is None or plan.tokens is None or plan.slack_tokens != 0 or goes_generally():
            return None
        rolls = type(plan.attend) is Rolling
        if not (rolls or type(plan.attend) is Segments) or not plan.store.is_memory or engine.listens:
            return None
        if not isinstance(engine.phase, Compressing) or engine.phase.windows_record or dispatch.forced() != "auto":
            return None
        # Of a budget in tokens a layer that has dropped any holds as many as it may, from then on.
        same = clock.evict_at == 0 and clock.growth == 0 and not clock.due and not clock.reindex
        if not same or tail is None or not first < tail.length < state.stored.seen:
            return None
        if state.pending is not None or state.draft is not None or state.stored.segments or model.latents is not None:
            return None
        if state.observed.carry or not visible.causal_only or not tail.is_followed_by(state.stored.seen):
            return None
        if tail.anchor < first or tail.run != tail.length - first:
            return None
        keys, values, positions = tail.buffers()
        used, rotation = library(), model.rotation if rolls and first else None
        if used is None or keys.device.type != "cpu" or (rotation is None and rolls and first):
            return None
        parts = _parts(tail.as_segment(), 0 if rotation is None else first)
        if TokenStep.unsuited(parts, mass=False, given=engine.given_dtype) is not None:
            return None
        ends = Ends(first=first)
        if rotation is not None:
            ends.planes, ends.interleaved = rotation.size // 2, int(rotation.interleaved)
        step = TokenStep(
            parts, [None] * len(parts), keys, values, positions, query_heads=query_heads, scaling=model.scaling,
            softcap=model.softmax.softcap, mass=False, using=used, ends=ends, given=engine.given_dtype,
        )  # fmt: skip
        return cls(engine, state, step, ends, rotation) if step.complete else None

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
