"""Decoded tokens between two actions of the plan: what the next one needs is worked out once, and kept.

While a plan neither evicts nor encodes, a decoded token of a layer is the same work at every step: it joins the tail,
all parts are read, and where a score needs it, what each slot receives is added up. `SteadyLayer.of` looks once whether
a layer is in such a state, and for how many tokens. Until then `take` does what `Engine.attend` and `Engine.act` would,
which stay the reference; `holds` is the one guard. It compares what the layer holds with what it held, object by
object, so that whatever else changes a layer ends it.
See docs/decisions/0024-the-short-way.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvtailor.engine.observe import windowed
from kvtailor.engine.phase import Compressing
from kvtailor.ops import dispatch
from kvtailor.ops.attention.parts import rule_sees
from kvtailor.ops.cpu.library import library
from kvtailor.ops.cpu.step import TokenStep
from kvtailor.ops.segments.sides import stored_sides
from kvtailor.types import PlainSegment, Segment, Visibility

if TYPE_CHECKING:
    from kvtailor.engine.engine import Engine
    from kvtailor.engine.layer_state import LayerState
    from kvtailor.store.recent_window import Tail

T = TypeVar("T")
__all__ = ["FEWEST", "SteadyLayer", "carried_part", "general_way", "goes_generally"]

_GENERAL: ContextVar[bool] = ContextVar("kvtailor_general_way", default=False)
FEWEST = 2
"""Tokens before the next action, from which on it is worth while to work anything out."""


@contextmanager
def general_way() -> Iterator[None]:
    """Within it every decoded token goes the general way: to compare the two."""
    token = _GENERAL.set(True)
    try:
        yield
    finally:
        _GENERAL.reset(token)


def goes_generally() -> bool:
    """Whether that is so here."""
    return _GENERAL.get()


class SteadyLayer:
    """One layer, as it is until the plan acts on it next.

    Attributes:
        step: takes the tokens.
    """

    def __init__(self, engine: Engine, state: LayerState, step: TokenStep, left: int | None):
        tail = state.stored.tail
        assert tail is not None
        self.step = step
        self._left, self._length, self._seen = left, tail.length, state.stored.seen
        # Weakly: what a layer lets go of is to be freed, whether a token follows or not.
        self._stored, self._tail = weakref.ref(state.stored), weakref.ref(tail)
        self.notice(tail)
        self._segments = _weakly(state.stored.segments)
        self._asked, self._window = dispatch.asked_here(), engine.window_of_decoded
        self._evidence_dtype = engine.stored_dtype
        self._phase, self._needs, self._carry = engine.phase, engine.needs, state.observed.carry

    def notice(self, tail: Tail) -> None:
        """Go on with the buffers that a tail has now."""
        self._keys, self._values, self._positions = map(_weak, tail.buffers())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a layer has buffers of its own."""
        return

    @classmethod
    def of(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> SteadyLayer | None:
        """Return the layer as it is after a decoded token; None where each token is more than that.

        Args:
            engine: of the cache.
            state: of the layer.
            query_heads: q, of the layer's attention.
            visible: of the token; those that follow hide what it hides, and no more.
        """
        if _GENERAL.get() or not engine.can_be_steady:
            return None
        if state.pending is not None or state.draft is not None:
            return None
        tail, model, segments = state.stored.tail, state.model, state.stored.segments
        if segments and _same(segments, state.unsteady):
            return None
        if tail is None or not tail.length or not isinstance(engine.phase, Compressing) or engine.phase.windows_record:
            return None
        if model.latents is not None or state.clock.due or state.clock.reindex:
            return None
        parts = state.parts()
        reading, left = engine.plan.attend.reads_steadily(state.index, parts), state.tokens_until_action(engine.plan)
        if reading is None:
            return None
        if reading.up_to is not None:
            if tail.length >= reading.up_to:
                return None
            left = _until_less_is_read(state, reading.up_to, left)
        if left is not None and left <= FEWEST:
            return None
        if reading.carried:
            first = carried_part(state, parts[0])
            if first is None:
                return None
            parts[0] = first
        if not tail.is_followed_by(state.stored.seen) or dispatch.forced() != "auto":
            return None
        keys, values, positions = tail.buffers()
        used = library() if keys.device.type == "cpu" else None
        given = engine.given_dtype
        mass, pages = engine.needs.mass, reading.pages
        if used is None or TokenStep.unsuited(parts, mass=mass, pages=pages, given=given) is not None:
            state.unsteady = _weakly(segments)
            return None
        layouts = [own.layout for own in map(stored_sides, parts) if own is not None]
        sees = [rule_sees(each, visible, 0, 1, newest=each is layouts[-1], device=keys.device) for each in layouts]
        step = TokenStep(
            parts,
            sees,
            keys,
            values,
            positions,
            query_heads=query_heads,
            scaling=model.scaling,
            softcap=model.softmax.softcap,
            mass=mass,
            using=used,
            pages=pages,
            given=given,
        )
        if not step.complete:
            state.unsteady = _weakly(segments)
            return None
        # The token after which the plan acts goes the general way.
        return cls(engine, state, step, None if left is None else left - 1)

    def holds(self, engine: Engine, state: LayerState) -> bool:
        """Whether the layer is as it was, and nothing is due after one more token."""
        stored, tail = state.stored, state.stored.tail
        if tail is None or stored is not self._stored() or tail is not self._tail():
            return False
        if tail.length != self._length or stored.seen != self._seen:
            return False
        keys, values, positions = tail.buffers()
        return (
            keys is self._keys()
            and values is self._values()
            and positions is self._positions()
            and (self._left is None or self._left > 0)
            and _same(stored.segments, self._segments)
            and state.pending is None
            and state.draft is None
            and not state.clock.due
            and dispatch.asked_here() is self._asked
            and engine.phase is self._phase
            and engine.needs is self._needs
            and state.observed.carry is self._carry
        )

    def take(
        self, state: LayerState, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Let one decoded token of each row join, and return its attention (b, 1, q, dv).

        Args:
            state: of the layer; `holds` was true.
            query, keys, values, sinks: see `TokenStep.take`.
        """
        if self._length == self.step.slots:
            self._grow(state)
        evidence = state.observed.evidence
        read = torch.empty(self.step.key_shape[:2], dtype=torch.int64) if self.step.chooses else None
        output, received = self.step.take(
            query,
            keys,
            values,
            slot=self._length,
            column=self._seen,
            sinks=sinks,
            before=evidence.mass,
            tokens_read=read,
        )
        if received:
            evidence = replace(evidence, mass=received)
        if self._window:
            seen = query if self._evidence_dtype is None else query.to(self._evidence_dtype)
            evidence = windowed(self._window, evidence, seen, self._seen)
        state.observed.evidence = evidence
        stored = state.stored
        assert stored.tail is not None
        stored.tail.length += 1
        stored.seen += 1
        state.clock.growth += 1
        state.observed.tokens_read = read
        self._length += 1
        self._seen += 1
        if self._left is not None:
            self._left -= 1
        return output

    def _grow(self, state: LayerState) -> None:
        """Make room for more tokens, as the general way does where the tail is full."""
        tail = state.stored.tail
        assert tail is not None
        tail.make_room()
        self.step.moves_to(self._tail_parts(tail), *tail.buffers())
        self.notice(tail)

    def _tail_parts(self, tail: Tail) -> list[PlainSegment]:
        """The filled slots as they are read."""
        return [tail.as_segment()]


def _weak(thing: T | None) -> Callable[[], T | None]:
    """What gives it as long as somebody else has it; of None, None."""
    return _nothing if thing is None else weakref.ref(thing)


def _nothing() -> None:
    return None


def carried_part(state: LayerState, part: Segment) -> PlainSegment | None:
    """The first part as the attention carries it; None: it does not."""
    carry = state.observed.carry
    if "first_keys" not in carry or "first_values" not in carry:
        return None
    keys, values = carry["first_keys"].flatten(0, 1), carry["first_values"].flatten(0, 1)
    return PlainSegment(layout=part.layout, keys=keys, values=values)


def _until_less_is_read(state: LayerState, whole: int, left: int | None) -> int | None:
    """The same number of tokens, or fewer: after which more than `whole` are held, and so not all of them are read."""
    counts = [part.layout.counts() for part in state.parts()]
    more = whole - int(torch.stack(counts).sum(0).max()) if state.model.share.ranks == 1 else 0
    return more if left is None else min(left, more)


def _weakly(things: Iterable[T]) -> list[weakref.ref[T]]:
    """The same, so that they can be freed."""
    return [weakref.ref(each) for each in things]


def _same(things: Sequence[object], others: Sequence[weakref.ref[Any]]) -> bool:
    """Whether these are the very same objects."""
    return len(things) == len(others) and all(a is b() for a, b in zip(things, others, strict=True))
