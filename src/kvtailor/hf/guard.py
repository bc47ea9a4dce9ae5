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
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvtailor.engine import rollback
from kvtailor.engine.engine import Engine
from kvtailor.engine.phase import Recording
from kvtailor.errors import CacheMisuse
from kvtailor.hf.assisted import prompt_of_caller
from kvtailor.hf.attention import NAME
from kvtailor.hf.handed import CLOCK
from kvtailor.hf.images import RopeDeltas
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.rope_border import RopeBorder
from kvtailor.hf.progress import (
    START_OVER,
    TWO_THREADS,
    Alone,
    ForwardProgress,
    Same,
    beyond_positions,
    bits_of_a_forward,
    check_padding_of_states,
)
from kvtailor.hf.versions import STATES_ARE_ASKED_FOR
from kvtailor.plan import Plan
from kvtailor.types import ALL_HEADS, HeadShare, Visibility

__all__ = ["CacheGuard", "Observer"]

Observer = Callable[[int, Tensor, Tensor, Tensor, Visibility, float], None]
"""Layer of the model, keys (b, h, t, d), values (b, h, t, dv), queries (b, q, t, d), what they may see, and the factor
before the softmax, of the tokens that have just come to a layer."""


class CacheGuard:
    """What all layers of one cache share: it owns the engine and follows each forward from layer to layer.

    It raises `CacheMisuse` for a second thread, layers out of order, an update that no attention read, padding that
    became tokens and a forward that was broken off, and undoes such a forward where it can.

    Args:
        plan: of the cache.
        geometry: of the model that the cache was made for.
        config: of the model.
        share: which of the model's kv heads this process holds.
        stored_dtype: in which the compressed layers hold what a model in float32 makes; None: in the model's own dtype.

    Attributes:
        engine: the engine and the state of the compressed layers.
        model: a weak reference to the model that the cache was made for; None where that is not known.
        observers: called at each compressed layer with what has come, before it changes what is held; see `Observer`.
        rope: by how much images have shifted the positions of what follows them.
        real: (b, columns) bool of the columns seen, False for padding; None where nothing was padded.
        layers: how many layers the cache has.
        border: where the model drops its cache, see `hf.model.rope_border`; None: nowhere.
        fed_at: when a layer was fed last, or wrote its states, by `hf.handed.CLOCK`; 0: never.
        first_compressed: the first layer that the plan compresses; None: none is.
    """

    def __init__(
        self,
        plan: Plan,
        geometry: Geometry,
        config: Any,
        *,
        share: HeadShare = ALL_HEADS,
        stored_dtype: torch.dtype | None = None,
    ):
        self.plan, self.geometry, self._config = plan, geometry, Same(config)
        self.share, self.layers, self.stored_dtype = share, geometry.layers, stored_dtype
        self.first_compressed = geometry.compressed[0] if geometry.compressed else None
        self._whole = bits_of_a_forward(geometry)
        sizes = () if geometry.alike else [(s.kv_heads, s.key_size, s.value_size) for s in geometry.compressed_shapes]
        # Windows and states stay in the model's dtype, which is float32 where the cache's is another.
        own = None if stored_dtype is None else torch.float32.itemsize
        other_bytes = partial(geometry.other_bytes, own_size=own)
        self.engine = Engine(plan, len(geometry.compressed), other_bytes, sizes, stored_dtype=stored_dtype)
        for state in self.engine.states:
            state.model.share = share
        self.observers: tuple[Observer, ...] = ()
        self.model: weakref.ref[Any] | None = None
        self.rope = RopeDeltas()
        self.border: RopeBorder | None = None
        self.fed_at = 0
        self._warned = False
        self.reset()

    @property
    def config(self) -> Any:
        """The config of the model, the very object."""
        return self._config.value

    @property
    def at_work(self) -> bool:
        """Whether a forward or another change has begun and not ended."""
        return self._now is not None

    def reset(self) -> None:
        """Forget what was seen, and what went wrong."""
        self.real: Tensor | None = None
        self.rope.reset()
        self._alone = Alone()
        self._undo: dict[int, Callable[[], object]] = {}
        # Replaced as a whole, never changed: an interrupt leaves either the old or the new.
        self._now: ForwardProgress | None = None
        self._last_states = -1

    def states_change(self, layer: int, *, recurrent: bool = False, asked: str | None = None) -> None:
        """Called whenever the model reads or writes linear-attention or convolution states of a layer.

        What is done to the layer's states between two calls is not seen, so a forward that was broken off inside the
        model's last layer, behind this call, passes for whole where no layer writes its recurrent state by a call. With
        releases of transformers whose models read states without a call, nothing is looked at here.

        Args:
            layer: of the model.
            recurrent: its recurrent state is about to be written, which is the last that happens to a layer's states.
            asked: which state is asked for, if one is; a forward asks once for each.

        Raises:
            CacheMisuse: another thread is at work, or the forward before did not come to its end.
        """
        self.fed_at = next(CLOCK)
        if not STATES_ARE_ASKED_FOR:
            return
        me, bit = threading.get_ident(), 1 << (self.layers + layer)
        with self._alone:
            now, begins = self._now, False
            if now is None:
                if layer == self._last_states:
                    # The newest forward ended in this layer, which has more to do.
                    return
                begins = True
                self.engine.switch.check_free("a forward")
                self._undo = {}
                now = ForwardProgress(me, "done", layer, 0)
            self._check_thread(now, me)
            self._check_attended(now)
            again = bool(now.layers & bit)
            known = now.asked if now.states == layer else frozenset()
            if now.reached != "done" or (again and now.states != layer) or asked in known:
                self._alone.refuse(self._unfinished(now))
            known = known if asked is None else known | {asked}
            # Where layers before this one have written a recurrent state in this forward, this one will, too.
            ended = now.layers | bit == self._whole and (recurrent or not now.recurrent)
            now = now._replace(
                layer=layer,
                layers=now.layers | bit,
                states=layer,
                recurrent=now.recurrent or recurrent,
                asked=known,
            )
            self._now, self._last_states = (None, layer) if ended else (now, -1)
        if begins:
            self.end_stale_recording()

    def reading_begins(self, layer: int, source: int) -> None:
        """Called when the attention of layer `layer` is about to read what the layer `source` holds."""
        self._check_not_refused()
        self.fed_at = next(CLOCK)
        with self._alone:
            now = self._now
            if now is None or now.reached != "done" or not now.layers >> source & 1 or now.layers >> layer & 1:
                self._out_of_order(layer)
            self._check_thread(now, threading.get_ident())
            self._undo = {}
            self._now = now.reaches("changing", layer, 1 << layer)

    def update_begins(self, layer: int) -> None:
        """Called before a layer's new keys are taken.

        Raises:
            CacheMisuse: another thread is at work, or the forward before did not come to its end.
        """
        me = threading.get_ident()
        self.fed_at = next(CLOCK)
        with self._alone:
            now = self._now
            if now is None:
                self.engine.switch.check_free("a forward")
                self._undo, self._last_states = {}, -1
                self._now = ForwardProgress(me, "updated", layer, 1 << layer)
            else:
                self._check_thread(now, me)
                self._check_attended(now)
                if now.reached != "done" or now.layers >> layer & 1:
                    self._alone.refuse(self._unfinished(now))
                self._now = now.reaches("updated", layer, 1 << layer)
        if now is None:
            self.end_stale_recording()

    def attention_begins(self, layer: int, *, changing: bool = False) -> None:
        """Called when the attention of an updated layer has found it.

        Args:
            layer: of the model.
            changing: nothing can be refused any more: `layer_changes` is said with it.
        """
        self._check_not_refused()
        now, me = self._now, threading.get_ident()
        if now is None or now.layer != layer or now.reached != "updated":
            self._out_of_order(layer)
        if now.thread != me:
            self._alone.refuse(TWO_THREADS)
        if changing:
            with self._alone:
                if self._now is not now:
                    self._alone.refuse(TWO_THREADS)
                self._undo, self._now = {}, now.reaches("changing", layer)

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
            self._now = ForwardProgress(me, "changing", -1, 0, what)
        yield
        with self._alone:
            self._now = None

    def begin_at(self, layer: int) -> None:
        """Begin a forward at a layer of the model: those before it count as done."""
        me = threading.get_ident()
        with self._alone:
            if self._now is not None:
                self._alone.refuse(self._unfinished(self._now))
            before = self._whole & ((1 << layer) - 1)
            self._now = ForwardProgress(me, "done", layer - 1, before)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """While it is open, `observer` is called, too, behind those that are there."""
        before, self.observers = self.observers, (*self.observers, observer)
        try:
            yield
        finally:
            self.observers = before

    def break_off(self, what: str) -> None:
        """What the cache holds is not to be trusted from now on, for the reason `what`."""
        self._alone.refusal = f"{what}: {START_OVER}"

    def check_whole(self) -> None:
        """Raise where the last update was never attended, or a forward or a change did not come to its end."""
        self._check_not_refused()
        if self._now is None:
            self.end_stale_recording(read_checks=False)
        now = self._now
        if now is not None and now.thread == threading.get_ident():
            self._check_attended(now)
            if now.reached != "done":
                raise CacheMisuse(self._unfinished(now))

    def check_ended(self, *, of_any_thread: bool = False) -> None:
        """Raise where a forward or a change of this thread did not come to its end; none is on its way."""
        self._check_not_refused()
        now = self._now
        if now is not None and (of_any_thread or now.thread == threading.get_ident()):
            self._check_attended(now)
            raise CacheMisuse(self._unfinished(now))

    def check_settled(self) -> None:
        """Raise where the cache is in the middle of a forward or a change, or one did not come to its end."""
        self.check_ended(of_any_thread=True)
        self.engine.switch.check_free("a saved file")
        self.end_stale_recording()

    def check_opened(self) -> None:
        """Raise where a plan that reads its context twice would see it only once."""
        engine = self.engine
        if engine.states and engine.refuses_plain_context:
            raise CacheMisuse(
                f"{self.plan} reads its context twice, which plain generate() does not: prefill it first with "
                "kvtailor.prefill(model, input_ids, attention_mask, cache=cache), then hand the whole conversation to "
                "generate(); kvtailor.session does both by itself"
            )

    def check_padding(self, layer: int, visible: Visibility) -> None:
        """Raise where a column that was padding is a token now: what was dropped as padding cannot come back.

        Asked at the first compressed layer of a forward, before anything changes.
        """
        if layer != self.first_compressed:
            return
        rows, now, before = self.engine.states[0].rows, visible.real, self.real
        if now is not None and rows and now.shape[0] != rows:
            raise CacheMisuse(
                f"the attention_mask is for {now.shape[0]} rows, and this cache holds {rows}: pass the mask of this "
                "batch, or use a new cache for another one"
            )
        if now is not None and self.geometry.has_states:
            check_padding_of_states(self.geometry.model_type, now, visible)
        if before is not None:
            columns = before.shape[1]
            if not bool(before.all()) if now is None else bool((now[:, :columns] & ~before.to(now.device)).any()):
                raise CacheMisuse(
                    "attention_mask shows tokens that were padding when this cache saw them; pass the mask of the "
                    f"whole conversation ({visible.first_column + visible.new_tokens} columns) with the same padding"
                )

    def take_padding(self, layer: int, visible: Visibility) -> None:
        """Remembers which columns are padding, once a forward has begun to change the cache."""
        if layer != self.first_compressed:
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
            whole = after == "done" and now.layers == self._whole
            if whole:
                self._undo = {}
                # Convolutions of the layer may follow its attention; a model of one layer begins with them again.
                self._last_states = layer if now.states == layer and self.layers > 1 else -1
            self._now = None if whole else now.reaches(after, layer)

    def _check_not_refused(self) -> None:
        if self._alone.refusal is not None:
            raise CacheMisuse(self._alone.refusal)

    def _out_of_order(self, layer: int) -> NoReturn:
        raise CacheMisuse(f"the attention of layer {layer} used its cache twice, or without an update")

    def _check_thread(self, now: ForwardProgress, me: int) -> None:
        if now.thread != me:
            self._alone.refuse(TWO_THREADS)

    def _check_attended(self, now: ForwardProgress) -> None:
        if now.reached == "updated":
            self._forget_forward(now.layer)
            raise CacheMisuse(
                f"layer {now.layer} updated this cache, but its attention never used it, so its output is "
                f"not to be trusted: the model must run with attn_implementation={NAME!r}, which kvtailor.cache_for "
                "sets on the model that it is given. So this is another model than that, or something has changed it "
                f"since. If the forward was interrupted, {START_OVER}"
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

    def _unfinished(self, now: ForwardProgress) -> str:
        where = "" if now.layer < 0 else f" at layer {now.layer} of {self.layers}"
        return (
            f"{now.what} on this cache ended{where} before its end (an error or an interrupt), so what it holds is not "
            f"to be trusted: {START_OVER}"
        )

    def end_stale_recording(self, *, read_checks: bool = True) -> None:
        """End a recording that assisted decoding left: transformers gives no sign of its end, so the first use outside
        does. Checks that wait for the device are read first, but where nothing is read or changed.

        Raises:
            CacheMisuse: it was broken off between a forward and the crop that would have taken back wrong drafts.
        """
        if read_checks and self.engine.late.waiting:
            self.engine.late.settle(self.break_off)
        phase = self.engine.phase
        if not isinstance(phase, Recording) or phase.prompt is None or prompt_of_caller() is not None:
            return
        if any(state.pending is not None for state in self.engine.states):
            self._alone.refuse(
                "prompt lookup or assisted decoding on this cache was broken off before it had judged its last draft, "
                f"so the cache may hold tokens that are no part of the text: {START_OVER}"
            )
        rollback.end_recording(self.engine)

    def _warn_of_positions(self, seen: int) -> None:
        what = None if self._warned else beyond_positions(self.geometry, self.engine, seen)
        if what is not None:
            self._warned = True
            warnings.warn(what, stacklevel=2)
