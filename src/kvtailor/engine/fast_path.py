"""Decoded tokens between two actions of the plan: the work of one token is prepared once and repeated.

While a plan neither evicts nor encodes, each decoded token of a layer needs the same work: it joins the tail, all parts
are read, and if a score needs it, the attention that each slot receives is added up. `FastPath.of` checks once whether
a layer is in this state, and for how many tokens it will be. For these, `take` does what `Engine.attend` and
`Engine.act` do, which are the reference. `holds` is the only guard: it compares the objects that the layer holds with
those of before, so that any other change of the layer ends the fast path.
See docs/decisions/0024-the-short-way.md.

The fast path ends when the plan acts. But a plan that drops the token behind its first ones at each token
(`drop_middle`) does the same every time, and has two forms of its own. In `FastPathOfEnds` a token joins, all parts are
read, and the oldest token behind the first ones is dropped, so that the part that is read moves by one slot. Under
`rolling` the keys of the first tokens are turned by the number of tokens missing behind them; `attend.rolling` is the
reference. All of it is one call of C++ for each token (`ops/cpu/step.h`). `FastPathOfCodes` does the same with a codec:
the first tokens and those behind them are segments of codes, and the newest tokens wait in the tail until they are a
block. The oldest code behind the first tokens is dropped, so that one part changes with each token.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvtailor.attend.rolling import Rolling
from kvtailor.attend.segments import Segments
from kvtailor.engine.apply import count_waiting_in_tail, drop_first_slots
from kvtailor.engine.engine import Engine
from kvtailor.engine.observe import windowed
from kvtailor.engine.phase import Compressing
from kvtailor.engine.state import LayerState
from kvtailor.ops import dispatch
from kvtailor.ops.attention.cpu.step import TokenStep
from kvtailor.ops.attention.parts import rule_sees
from kvtailor.ops.cpu.library import Ends, library
from kvtailor.ops.lanes.rotate import cosines_and_sines, turn
from kvtailor.ops.segments.sides import stored_sides
from kvtailor.types import Layout, PlainSegment, Rotation, Segment, Visibility

if TYPE_CHECKING:
    from kvtailor.store.recent_window import Tail

__all__ = [
    "FEWEST",
    "FastPathOfCodes",
    "FastPathOfEnds",
    "FastPath",
    "acts_alike",
    "carried_part",
    "slow_path",
    "takes_slow_path",
    "find_fast_path",
    "step_over_all",
]

T = TypeVar("T")

_SLOW_PATH: ContextVar[bool] = ContextVar("kvtailor_slow_path", default=False)
FEWEST = 2
"""Tokens before the next action, from which on it is worth while to work anything out."""


@contextmanager
def slow_path() -> Iterator[None]:
    """Make every decoded token take the slow path inside, to compare the two."""
    token = _SLOW_PATH.set(True)
    try:
        yield
    finally:
        _SLOW_PATH.reset(token)


def takes_slow_path() -> bool:
    """Return whether decoded tokens take the slow path because of `slow_path`."""
    return _SLOW_PATH.get()


class FastPath:
    """The fast path of one layer, until the plan acts on it next.

    Attributes:
        step: processes a token.
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
        """Use the buffers that the tail has now."""
        self._keys, self._values, self._positions = map(_weak, tail.buffers())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copy nothing: a copy of a layer has buffers of its own."""
        return

    @classmethod
    def of(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> FastPath | None:
        """Return the fast path of a layer that has just taken a decoded token; None if it has none.

        Args:
            engine: of the cache.
            state: of the layer.
            query_heads: q, of the layer's attention.
            visible: of the token; later tokens hide the same columns and no others.
        """
        tail, model, segments = state.stored.tail, state.model, state.stored.segments
        if tail is None or not tail.length or _must_look(engine, state):
            return None
        parts = state.parts()
        reading, left = engine.plan.attend.read_on_fast_path(state.index, parts), state.tokens_until_action(engine.plan)
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
            state.without_fast_path = _weakly(segments)
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
            state.without_fast_path = _weakly(segments)
            return None
        # The token after which the plan acts takes the slow path.
        return cls(engine, state, step, None if left is None else left - 1)

    def holds(self, engine: Engine, state: LayerState) -> bool:
        """Return whether the layer has not changed, and the plan does not act after one more token."""
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
        """Append one decoded token of each row, and return its attention (b, 1, q, dv).

        Args:
            state: of the layer; `holds` has returned True.
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
        """Make room for more tokens, as the slow path does where the tail is full."""
        tail = state.stored.tail
        assert tail is not None
        tail.make_room()
        self.step.moves_to(self._tail_parts(tail), *tail.buffers())
        self.notice(tail)

    def _tail_parts(self, tail: Tail) -> list[PlainSegment]:
        """Return the filled slots of the tail as they are read."""
        return [tail.as_segment()]


def _must_look(engine: Engine, state: LayerState) -> bool:
    """Whether the state of an engine or a layer rules out a fast path."""
    segments, clock = state.stored.segments, state.clock
    return (
        _SLOW_PATH.get()
        or not engine.has_fast_path
        or state.pending is not None
        or state.draft is not None
        or bool(segments and _same(segments, state.without_fast_path))
        or not isinstance(engine.phase, Compressing)
        or engine.phase.windows_record
        or state.model.latents is not None
        or clock.due
        or clock.reindex
    )


def _weak(thing: T | None) -> Callable[[], T | None]:
    """Return a weak reference to an object, or to None."""
    return _nothing if thing is None else weakref.ref(thing)


def _nothing() -> None:
    return None


def carried_part(state: LayerState, part: Segment) -> PlainSegment | None:
    """Return the first part from the attention's carry; None: it is not there."""
    carry = state.observed.carry
    if "first_keys" not in carry or "first_values" not in carry:
        return None
    keys, values = carry["first_keys"].flatten(0, 1), carry["first_values"].flatten(0, 1)
    return PlainSegment(layout=part.layout, keys=keys, values=values)


def _until_less_is_read(state: LayerState, whole: int, left: int | None) -> int | None:
    """Return `left`, or fewer: the tokens until more than `whole` are held, after which not all of them are read."""
    counts = [part.layout.counts() for part in state.parts()]
    more = whole - int(torch.stack(counts).sum(0).max()) if state.model.share.ranks == 1 else 0
    return more if left is None else min(left, more)


def _weakly(things: Iterable[T]) -> list[weakref.ref[T]]:
    """Return weak references to objects, which can then be freed."""
    return [weakref.ref(each) for each in things]


def _same(things: Sequence[object], others: Sequence[weakref.ref[Any]]) -> bool:
    """Whether both have the very same objects."""
    return len(things) == len(others) and all(a is b() for a, b in zip(things, others, strict=True))


class FastPathOfEnds(FastPath):
    """The fast path of a layer that keeps its first tokens and a fixed number of newest ones."""

    def __init__(self, engine: Engine, state: LayerState, step: TokenStep, ends: Ends, rotation: Rotation | None):
        super().__init__(engine, state, step, None)
        self._ends, self._rotation = ends, rotation

    @classmethod
    def of(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> FastPathOfEnds | None:
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
        """Return the same as `FastPath.holds`."""
        tail, clock = state.stored.tail, state.clock
        # What others hold as well is copied before its first tokens move.
        mine = tail is not None and not tail.shared
        return mine and clock.growth == 0 and clock.evict_at == 0 and super().holds(engine, state)

    def take(
        self, state: LayerState, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Do as `FastPath.take`, and drop the oldest token behind the first ones."""
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
    """Return whether a layer drops one token by age for each decoded one, so that each token needs the same work.

    Args:
        engine: of the cache.
        state: of the layer, after a decoded token.
        visible: of that token.
    """
    plan, tail, clock = engine.plan, state.stored.tail, state.clock
    if engine.eviction.first is None or plan.tokens is None or plan.slack_tokens != 0 or takes_slow_path():
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
    """Prepare the call that reads every slot of a layer's parts; None: no kernel can.

    Args:
        engine: of the cache.
        state: of the layer, which has a tail.
        parts: all parts, the tail last.
        query_heads: q, of the layer's attention.
        ends: how the tail moves with each token; None: it does not.
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
    """The cosines and sines that a thread computed last; all layers of a forward use the same ones."""

    missing = -1
    rotation: Rotation | None = None
    found: tuple[Tensor, Tensor] | None = None

    def by(self, missing: int, rotation: Rotation) -> tuple[int, int]:
        """Return addresses of cosines and sines that turn keys by `missing` positions."""
        if self.found is None or missing != self.missing or rotation is not self.rotation:
            self.found = cosines_and_sines(torch.tensor([missing]), rotation.frequencies)
            self.missing, self.rotation = missing, rotation
        return self.found[0].data_ptr(), self.found[1].data_ptr()


_TURNS = _Turns()


def _parts(whole: PlainSegment, first: int) -> list[PlainSegment]:
    """Split a tail into its first tokens, whose keys will be turned, and the rest; with `first` 0, return it whole."""
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


class FastPathOfCodes(FastPath):
    """The fast path of a layer that keeps its first tokens and a fixed number of newest ones, most of them as codes."""

    def __init__(
        self, engine: Engine, state: LayerState, step: TokenStep, left: int, at: int, rotation: Rotation | None
    ):
        super().__init__(engine, state, step, left)
        self._at, self._rotation = at, rotation

    @classmethod
    def of(cls, engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> FastPathOfCodes | None:
        plan, first, tail, segments = engine.plan, engine.eviction.first, state.stored.tail, state.stored.segments
        if first is None or tail is None or not acts_alike(engine, state, visible):
            return None
        block, at = count_waiting_in_tail(plan, state.codec(plan)), 1 if first else 0
        if not block or not engine.has_fast_path or engine.needs.mass or tail.start is None or len(segments) <= at:
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
        """Return the same as `FastPath.holds`."""
        clock = state.clock
        return clock.growth == 0 and clock.evict_at == 0 and super().holds(engine, state)

    def take(
        self, state: LayerState, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Do as `FastPath.take`, and drop the oldest code behind the first ones."""
        output = super().take(state, query, keys, values, sinks)
        stored, clock, at = state.stored, state.clock, self._at
        clock.growth, clock.settled_seen = 0, stored.seen
        segment = stored.segments[at] = drop_first_slots(stored.segments[at], 1)
        self._segments[at] = weakref.ref(segment)
        self.step.exchange(at, segment)
        if self._rotation is not None:
            self._turn_first(state, self._rotation)
        if not self.step.complete:
            self._left = 0
        return output

    def _turn_first(self, state: LayerState, rotation: Rotation) -> None:
        """Turn the keys of the first tokens by the number of tokens that are now missing behind them."""
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


def find_fast_path(engine: Engine, state: LayerState, query_heads: int, visible: Visibility) -> FastPath | None:
    """Return the first kind of fast path that a layer can take after a decoded token; see `FastPath.of`."""
    kinds = (FastPath,) if engine.eviction.first is None else (FastPathOfCodes, FastPathOfEnds, FastPath)
    made = (kind.of(engine, state, query_heads, visible) for kind in kinds)
    return next((each for each in made if each is not None), None)
