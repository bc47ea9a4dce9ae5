"""Decoded tokens of a layer that drops its middle at each of them: what the next one needs is worked out once.

The short way of `engine.steady` ends where the plan acts, which such a plan does at each token. Its act is always the
same, though: the token joins, all is read, and the oldest behind the first ones goes (`drop_middle`), so that all that
is read lies one slot further on. Under `rolling` the first ones are turned by what is missing behind them, as
`attend.rolling` does, which stays the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.attend.rolling import Rolling
from kvtailor.attend.segments import Segments
from kvtailor.engine.engine import Engine
from kvtailor.engine.layer_state import LayerState
from kvtailor.engine.phase import Compressing
from kvtailor.engine.steady import SteadyLayer, goes_generally
from kvtailor.ops import dispatch
from kvtailor.ops.cpu.library import library
from kvtailor.ops.cpu.step import TokenStep
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Layout, PlainSegment, Rotation, Visibility

__all__ = ["SteadyEnds"]


class SteadyEnds(SteadyLayer):
    """One layer that keeps its first tokens and the newest, as many at each token."""

    def __init__(self, engine: Engine, state: LayerState, step: TokenStep, first: int, rotation: Rotation | None):
        super().__init__(engine, state, step, None)
        self._first, self._rotation = first, rotation

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
        if not same or tail is None or not first < tail.length < state.stored.seen or not tail.free:
            return None
        if state.pending is not None or state.draft is not None or state.stored.segments or model.latents is not None:
            return None
        if state.observed.carry or not visible.causal_only or not tail.is_followed_by(state.stored.seen):
            return None
        if tail.anchor < first or tail.run != tail.length - first:
            return None
        keys, values, positions = tail.buffers()
        used, rotation = library(), model.rotation
        turned = first if rolls else 0
        if used is None or keys.device.type != "cpu" or (turned and rotation is None):
            return None
        parts = _parts(tail.as_segment(), turned)
        if TokenStep.unsuited(parts, mass=False) is not None:
            return None
        step = TokenStep(
            parts, [None] * len(parts), keys[:, turned:], values[:, turned:],
            None if positions is None else positions[:, turned:],
            query_heads=query_heads, scaling=model.scaling, softcap=model.softmax.softcap, mass=False, using=used,
        )  # fmt: skip
        return cls(engine, state, step, first, rotation if turned else None) if step.complete else None

    def holds(self, engine: Engine, state: LayerState) -> bool:
        """See `SteadyLayer.holds`."""
        tail, clock = state.stored.tail, state.clock
        room = tail is not None and tail.free > 0
        return room and clock.growth == 0 and clock.evict_at == 0 and super().holds(engine, state)

    def take(
        self, state: LayerState, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See `SteadyLayer.take`."""
        stored, clock, first, rotation = state.stored, state.clock, self._first, self._rotation
        tail, slot = stored.tail, self._length
        assert tail is not None
        turned = None
        if rotation is not None:
            missing = torch.tensor([[self._seen - self._length]])
            turned = turn(tail.buffers()[0][:, :first], missing, rotation)
            self.step.read_keys(0, turned)
            slot -= first
        output, _ = self.step.take(query, keys, values, slot=slot, column=self._seen, sinks=sinks)
        tail.filled_one()
        tail.drop_behind(first, 1)
        self.step.move_on()
        self._seen += 1
        stored.seen = clock.settled_seen = self._seen
        self.notice(tail)
        state.observed.tokens_read = None
        return output


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
