"""Decoded tokens of a layer that drops a token of its codes at each of them: what the next one needs is prepared.

As `SteadyEnds`, beside a codec: the first tokens and all behind them are segments of codes, and the newest tokens wait
in the tail until they are a block. The token joins the tail, all is read, and the oldest code behind the first tokens
goes (`drop_middle`), so that one part is another one for the next token. Under `rolling` the keys of the first tokens
are turned for it, as `Rolling.index` does, which stays the reference.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from kvtailor.attend.rolling import Rolling
from kvtailor.engine.ends.drop_middle import waits_in_tail, without_first
from kvtailor.engine.ends.steady_ends import SteadyEnds, acts_alike, step_over_all
from kvtailor.engine.engine import Engine
from kvtailor.engine.layer_state import LayerState
from kvtailor.engine.steady import FEWEST, SteadyLayer, carried_part
from kvtailor.ops.cpu.step import TokenStep
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import PlainSegment, Rotation, Visibility

__all__ = ["SteadyCodes"]


class SteadyCodes(SteadyLayer):
    """One layer that keeps its first tokens and the newest, as many at each token, all but a few as codes."""

    def __init__(
        self, engine: Engine, state: LayerState, step: TokenStep, left: int, at: int, rotation: Rotation | None
    ):
        super().__init__(engine, state, step, left)
        self._at, self._rotation = at, rotation

    @classmethod
    def of(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> SteadyLayer | None:
        """Return the layer as it is after a decoded token, of whichever kind; see `SteadyLayer.of`."""
        found = cls._of_codes(engine, state, query_heads, visible)
        return found or SteadyEnds.of(engine, state, query_heads, visible)

    @classmethod
    def _of_codes(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> SteadyCodes | None:
        plan, first, tail, segments = engine.plan, engine.eviction.first, state.stored.tail, state.stored.segments
        if first is None or tail is None or not acts_alike(engine, state, visible):
            return None
        block, at = waits_in_tail(plan, state.codec(plan)), 1 if first else 0
        if not block or not engine.can_be_steady or engine.needs.mass or tail.start is None or len(segments) <= at:
            return None
        parts = state.parts()
        if sum(part.layout.size for part in parts) >= state.stored.seen:
            return None
        if any(part.layout.owner is not None or part.layout.lengths is not None for part in parts):
            return None
        if first and parts[0].layout.size != first:
            return None
        left = min(block - 1 - tail.length, segments[at].layout.size - 1)
        turns = type(plan.attend) is Rolling and first > 0
        rotation = state.model.rotation if turns else None
        if left <= FEWEST or (turns and rotation is None):
            return None
        if rotation is not None:
            carried = carried_part(state, parts[0])
            if carried is None:
                return None
            parts[0] = carried
        step = step_over_all(engine, state, parts, query_heads)
        return None if step is None else cls(engine, state, step, left, at, rotation)

    def holds(self, engine: Engine, state: LayerState) -> bool:
        """See `SteadyLayer.holds`."""
        clock = state.clock
        return clock.growth == 0 and clock.evict_at == 0 and super().holds(engine, state)

    def take(
        self, state: LayerState, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See `SteadyLayer.take`."""
        output = super().take(state, query, keys, values, sinks)
        stored, clock, at = state.stored, state.clock, self._at
        clock.growth, clock.settled_seen = 0, stored.seen
        segment = stored.segments[at] = without_first(stored.segments[at], 1)
        self._segments[at] = weakref.ref(segment)
        self.step.exchange(at, segment)
        if self._rotation is not None:
            self._turn_first(state, self._rotation)
        if not self.step.complete:
            self._left = 0
        return output

    def _turn_first(self, state: LayerState, rotation: Rotation) -> None:
        """Turn the keys of the first tokens by what is missing behind them now."""
        stored, carry = state.stored, state.observed.carry
        first = stored.segments[0]
        held = self._length + sum(each.layout.size for each in stored.segments)
        keys, shape = first.decode()[0], carry["first_keys"].shape
        gap = torch.full(keys.shape[:2], stored.seen - held)
        turned = turn(keys, gap, rotation).contiguous()
        self._carry = {"first_keys": turned.view(shape), "first_values": carry["first_values"]}
        state.observed.carry = self._carry
        part = PlainSegment(layout=first.layout, keys=turned, values=carry["first_values"].flatten(0, 1))
        self.step.exchange(0, part)
