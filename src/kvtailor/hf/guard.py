"""What a cache and its layers check together: one user at a time, whole forwards, padding that stays padding.

The layers refer to this object and not to their cache, so that nothing refers in a circle: a cache that is dropped is
freed at once, without the garbage collector.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from kvtailor.engine import rollback
from kvtailor.engine.engine import Engine
from kvtailor.engine.phase import Recording
from kvtailor.errors import CacheMisuse
from kvtailor.hf.assisted import prompt_of_caller
from kvtailor.hf.attention import NAME
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.rope_deltas import RopeDeltas
from kvtailor.plan import Plan
from kvtailor.types import ALL_HEADS, HeadShare, Visibility

__all__ = ["CacheGuard", "Observer"]

Observer = Callable[[int, Tensor, Tensor, Tensor, Visibility, float], None]
"""Layer of the model, keys (b, h, t, d), values (b, h, t, dv), queries (b, q, t, d), what they may see, and the factor
before the softmax, of the tokens that have just come to a layer."""

_START_OVER = "call cache.reset(), or go on with a copy that was made before"
_TWO_THREADS = (
    "two threads use this cache at once, or a forward on it was interrupted, and what it holds is not to be trusted: "
    f"{_START_OVER}, and give each thread a cache of its own"
)


class _Same:
    """Keeps an object as itself through a deep copy of what refers to it."""

    def __init__(self, value: Any):
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Same:
        return self


class _Progress(NamedTuple):
    """How far a forward, or another change of the cache, has come.

    Attributes:
        thread: identifier of the thread that does it.
        reached: "updated" (a layer's keys came, its attention did not), "changing" (what is held is being changed) or
            "done" (the layer is finished, and others follow).
        layer: the newest layer of the forward; -1 for a change of all layers.
        layers: the layers of the forward that have been updated, as bits.
        what: the change, in words.
    """

    thread: int
    reached: str
    layer: int
    layers: int
    what: str = "a forward"


class _Alone:
    """Lets one thread at a time read and replace the progress, unless the cache is refused.

    Never waits: a thread that finds another one there is a second user, and an interrupt on the way out of a `with` may
    leave a lock taken for good.

    Attributes:
        refusal: why the cache is refused, a sentence; None while it is not.
    """

    def __init__(self, refusal: str | None = None):
        self.refusal = refusal
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Alone:
        return _Alone(self.refusal)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.refuse(self.refusal or _TWO_THREADS)
        if self.refusal is not None:
            self._lock.release()
            raise CacheMisuse(self.refusal)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def refuse(self, why: str) -> NoReturn:
        """From now on the cache is refused for this reason."""
        self.refusal = why
        raise CacheMisuse(why)


class CacheGuard:
    """See the module.

    Args:
        plan: of the cache.
        geometry: of the model that the cache was made for.
        config: of the model.
        layers: how many layers the cache has, those with a window of the model's own included.
        share: which of the model's kv heads this process holds.

    Attributes:
        engine: the engine and the state of the compressed layers.
        model: a weak reference to the model that the cache was made for; None where that is not known.
        observers: called at each compressed layer with what has come, before it changes what is held; see `Observer`.
        rope: by how much images have shifted the positions of what follows them.
        real: (b, columns) bool of the columns seen, False for padding; None where nothing was padded.
    """

    def __init__(self, plan: Plan, geometry: Geometry, config: Any, layers: int, *, share: HeadShare = ALL_HEADS):
        self.plan, self.geometry, self._config, self.layers = plan, geometry, _Same(config), layers
        self.share = share
        self.engine = Engine(plan, len(geometry.compressed), geometry.window_elements())
        for state in self.engine.states:
            state.model.share = share
        self.observers: tuple[Observer, ...] = ()
        self.model: weakref.ref[Any] | None = None
        self.rope = RopeDeltas()
        self._warned = False
        self.reset()

    @property
    def config(self) -> Any:
        """The config of the model, the very object."""
        return self._config.value

    def reset(self) -> None:
        """Forgets what was seen, and what went wrong."""
        self.real: Tensor | None = None
        self.rope.reset()
        self._alone = _Alone()
        self._undo: dict[int, Callable[[], object]] = {}
        # Replaced as a whole, never changed: an interrupt leaves either the old or the new.
        self._now: _Progress | None = None

    def update_begins(self, layer: int) -> None:
        """Called before a layer's new keys are taken.

        Raises:
            CacheMisuse: another thread is at work, or the forward before did not come to its end.
        """
        me = threading.get_ident()
        with self._alone:
            now = self._now
            if now is None:
                self.engine.switch.check_free("a forward")
                self._undo = {}
                self._now = _Progress(me, "updated", layer, 1 << layer)
            else:
                self._check_thread(now, me)
                self._check_attended(now)
                if now.reached != "done" or now.layers >> layer & 1:
                    self._alone.refuse(self._unfinished(now))
                self._now = _Progress(me, "updated", layer, now.layers | 1 << layer)
        if now is None:
            self.end_stale_recording()

    def attention_begins(self, layer: int) -> None:
        """Called when the attention of an updated layer has found it."""
        self._check_not_refused()
        now = self._now
        if now is None or now.layer != layer or now.reached != "updated":
            self._out_of_order(layer)
        if now.thread != threading.get_ident():
            self._alone.refuse(_TWO_THREADS)

    def nothing_changed(self, layer: int) -> None:
        """The attention of a layer was refused; where no layer but windows has changed, the forward never was."""
        with self._alone:
            self._forget_forward(layer)

    def layer_changes(self, layer: int, undo: Callable[[], object] | None = None) -> None:
        """From now on until `layer_ends` an error or an interrupt leaves the layer half changed.

        Args:
            layer: of the model.
            undo: makes the layer what it was, should the forward be refused; None: it cannot.
        """
        self._goes_on(layer, "updated", "changing")
        # Kept only while all layers before can go back, too: what a window held before is memory.
        if undo is None:
            self._undo = {}
        elif self._now is not None and self._bits_of_undo() | 1 << layer == self._now.layers:
            self._undo = self._undo | {layer: undo}

    def awaits_attention(self, layer: int) -> bool:
        """New keys of a layer have come, and its attention has not."""
        now = self._now
        return now is not None and now.layer == layer and now.reached == "updated"

    def layer_ends(self, layer: int) -> None:
        """The layer is finished. The forward is, too, once all layers are."""
        self._goes_on(layer, "changing", "done")

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """A change of all layers at once; one that does not come to its end leaves the cache refused."""
        me = threading.get_ident()
        if self._now is None:
            self.end_stale_recording()
        with self._alone:
            if self._now is not None:
                self._check_thread(self._now, me)
                self._check_attended(self._now)
                self._alone.refuse(self._unfinished(self._now))
            self.engine.switch.check_free(what)
            self._now = _Progress(me, "changing", -1, 0, what)
        yield
        with self._alone:
            self._now = None

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """While it is open, `observer` is called, too, behind those that are there."""
        before = self.observers
        self.observers = (*before, observer)
        try:
            yield
        finally:
            self.observers = before

    def break_off(self, what: str) -> None:
        """What the cache holds is not to be trusted from now on, for the reason `what`."""
        self._alone.refusal = f"{what}: {_START_OVER}"

    def check_whole(self) -> None:
        """Raises where the last update was never attended, or a forward or a change did not come to its end."""
        self._check_not_refused()
        if self._now is None:
            self.end_stale_recording()
        now = self._now
        if now is not None and now.thread == threading.get_ident():
            self._check_attended(now)
            if now.reached != "done":
                raise CacheMisuse(self._unfinished(now))

    def check_settled(self) -> None:
        """Raises where the cache is in the middle of a forward or a change, or one did not come to its end."""
        self._check_not_refused()
        now = self._now
        if now is not None:
            self._check_attended(now)
            raise CacheMisuse(self._unfinished(now))
        self.engine.switch.check_free("a saved file")
        self.end_stale_recording()

    def check_opened(self) -> None:
        """Raises where a plan that reads its context twice would see it only once."""
        engine = self.engine
        if engine.states and engine.refuses_plain_context:
            raise CacheMisuse(
                f"{self.plan} reads its context twice, which plain generate() does not: prefill it first with "
                "kvtailor.prefill(model, cache, input_ids, attention_mask), then hand the whole conversation to "
                "generate(); kvtailor.session does both by itself"
            )

    def check_padding(self, layer: int, visible: Visibility) -> None:
        """Raises where a column that was padding is a token now: what was dropped as padding cannot come back.

        Asked at the first compressed layer of a forward, before anything changes.
        """
        if layer != self.geometry.compressed[0]:
            return
        rows, now, before = self.engine.states[0].rows, visible.real, self.real
        if now is not None and rows and now.shape[0] != rows:
            raise CacheMisuse(
                f"the attention_mask is for {now.shape[0]} rows, and this cache holds {rows}: pass the mask of this "
                "batch, or use a new cache for another one"
            )
        if before is not None:
            columns = before.shape[1]
            if not bool(before.all()) if now is None else bool((now[:, :columns] & ~before.to(now.device)).any()):
                raise CacheMisuse(
                    "attention_mask shows tokens that were padding when this cache saw them; pass the mask of the "
                    f"whole conversation ({visible.first_column + visible.new_tokens} columns) with the same padding"
                )

    def take_padding(self, layer: int, visible: Visibility) -> None:
        """Remembers which columns are padding, once a forward has begun to change the cache."""
        if layer != self.geometry.compressed[0]:
            return
        if visible.real is not None:
            self.real = visible.real.clone()
        self.rope.forward_began(self.engine.states[0].rows, visible.first_column, visible.new_tokens)
        self._warn_of_positions(visible.first_column + visible.new_tokens)

    def _goes_on(self, layer: int, before: str, after: str) -> None:
        me = threading.get_ident()
        with self._alone:
            now = self._now
            if now is not None:
                self._check_thread(now, me)
            if now is None or now.layer != layer or now.reached != before:
                self._out_of_order(layer)
            whole = after == "done" and now.layers == (1 << self.layers) - 1
            if whole:
                self._undo = {}
            self._now = None if whole else _Progress(me, after, layer, now.layers)

    def _check_not_refused(self) -> None:
        if self._alone.refusal is not None:
            raise CacheMisuse(self._alone.refusal)

    def _out_of_order(self, layer: int) -> NoReturn:
        raise CacheMisuse(f"the attention of layer {layer} used its cache twice, or without an update")

    def _check_thread(self, now: _Progress, me: int) -> None:
        if now.thread != me:
            self._alone.refuse(_TWO_THREADS)

    def _check_attended(self, now: _Progress) -> None:
        if now.reached == "updated":
            self._forget_forward(now.layer)
            raise CacheMisuse(
                f"layer {now.layer} updated this cache, but its attention never used it, so its output is "
                f"not to be trusted: the model must run with attn_implementation={NAME!r}, which kvtailor.cache_for "
                f"sets and something has changed since. If the forward was interrupted, {_START_OVER}"
            )

    def _bits_of_undo(self) -> int:
        return sum(1 << each for each in self._undo)

    def _forget_forward(self, layer: int) -> None:
        """The forward of now never was, if all layers before this one can go back, and this one has not changed."""
        now = self._now
        if now is None or self._bits_of_undo() | 1 << layer != now.layers:
            return
        for undo in self._undo.values():
            undo()
        self.rope.forward_never_was()
        self._undo, self._now = {}, None

    def _unfinished(self, now: _Progress) -> str:
        where = "" if now.layer < 0 else f" at layer {now.layer} of {self.layers}"
        return (
            f"{now.what} on this cache ended{where} before its end (an error or an interrupt), so what it holds is not "
            f"to be trusted: {_START_OVER}"
        )

    def end_stale_recording(self) -> None:
        """Ends a recording that assisted decoding left: transformers gives no sign of its end, so the first use outside
        does.

        Raises:
            CacheMisuse: it was broken off between a forward and the crop that would have taken back wrong drafts.
        """
        phase = self.engine.phase
        if not isinstance(phase, Recording) or phase.prompt is None or prompt_of_caller() is not None:
            return
        if any(state.pending is not None for state in self.engine.states):
            self._alone.refuse(
                "prompt lookup or assisted decoding on this cache was broken off before it had judged its last draft, "
                f"so the cache may hold tokens that are no part of the text: {_START_OVER}"
            )
        rollback.end_recording(self.engine)

    def _warn_of_positions(self, seen: int) -> None:
        limit = self.geometry.max_positions
        if limit is None or seen <= limit or self._warned:
            return
        rolls = self.plan.attend.in_cache_positions
        # In a first forward only the first layers hold anything yet.
        held = max((int(state.counts().max()) for state in self.engine.states if state.rows), default=0)
        if rolls and held <= limit:
            return
        self._warned = True
        what = (
            f"holds {held} tokens, which its positions count,"
            if rolls
            else f"has now seen {seen} tokens, whose positions compression keeps,"
        )
        warnings.warn(
            f"the cache {what} and this {self.geometry.model_type} was made for {limit} positions: the model is "
            "beyond what it was trained on",
            stacklevel=2,
        )
