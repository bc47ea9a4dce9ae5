"""A model's attention is kvtailor's while a cache of ours is alive, and its own again afterwards.

transformers keeps the name of an attention in the configuration, so two models that share a configuration share the
switch. Each cache of a model holds the same `Lease`; when the last one is gone, so is the lease, and the names that
were there before come back. A forward makes its mask under the name that it finds first, so nothing is given back while
one is under way: then the end of the forward does it.

What is copied, pickled or saved meanwhile has the names that were there before: nobody would give them back there.

Python swallows an interrupt (Ctrl-C) that comes inside the callback of a weak reference. So there are two references to
whatever ends: the second callback does what the first was kept from.
"""

from __future__ import annotations

import copyreg
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import PreTrainedModel

__all__ = ["Lease", "attention_restored", "forward_began", "name_before", "switch"]


class _Turn:
    """One thread at a time reads and changes the record of switched configurations.

    An interrupt on the way out of a `with` may leave a lock taken for good. What is done under it takes far less than a
    second, so a thread that has waited that long takes a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=1.0):
            self._lock = threading.RLock()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        # Another thread may have replaced the lock meanwhile.
        with suppress(RuntimeError):
            self._lock.release()


_turn = _Turn()
_switched: dict[int, _Switched] = {}
# By class of configuration, how others than us would have it copied and pickled.
_reducers: dict[type, Callable[[Any], Any] | None] = {}


class Lease:
    """What every cache of a model holds, and its copies with it: while one is alive, the model's attention is ours."""

    def __init__(self, record: _Switched):
        # Kept as long as somebody has to be told of the end.
        self.record = record

    def __copy__(self) -> Lease:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        return self


class _Switched:
    """A configuration whose attention was switched.

    Attributes:
        text: the configuration of the decoder.
        own_name: the name under which our attention is registered.
        lease: of the caches that are alive, two references; None once all is given back.
        before: by id, each configuration that was switched and the name of its attention before.
        masks: by id, the masks of the forwards that are under way, two references each.
    """

    def __init__(self, text: Any, own_name: str):
        key = id(text)
        # Bound here: at the interpreter's exit the module's own names may be gone.
        forget = _switched.pop
        self._exits = sys.is_finalizing
        self.text, self.own_name = weakref.ref(text, lambda _: forget(key, None)), own_name
        self.lease: _Twice | None = None
        self.before: dict[int, tuple[weakref.ref[Any], str | None]] = {}
        self.masks: dict[int, _Twice] = {}

    def give_back(self) -> None:
        """Put the names back, unless a cache is alive, a forward is under way, or another name has been set since."""
        if self._exits():
            return
        with _turn:
            self.masks = {key: mask for key, mask in self.masks.items() if mask[0]() is not None}
            if self.masks or self.lease is None or self.lease[0]() is not None:
                return
            for reference, name in self.before.values():
                config = reference()
                if config is not None and config._attn_implementation == self.own_name:
                    _set(config, name)
            self.before.clear()
            _reduce_as_ever()
            self.lease = None


_Twice = tuple[weakref.ref[Any], weakref.ref[Any]]


def _references(value: Any, at_end: Callable[[], None]) -> _Twice:
    """Two weak references, each of which calls `at_end` once the value is gone; see the module."""
    return weakref.ref(value, lambda _: at_end()), weakref.ref(value, lambda _: at_end())


def _give_back_late() -> None:
    """Give back what was to be given back, and was interrupted."""
    for record in list(_switched.values()):
        if record.lease is not None and record.lease[0]() is None:
            record.give_back()


def switch(model: Any, own_name: str) -> Lease:
    """Switches a model's attention to ours until the lease that this gives is gone.

    Args:
        model: a transformers causal language model.
        own_name: the name under which our attention is registered.
    """
    text = model.config.get_text_config(decoder=True)
    with _turn:
        _give_back_late()
        record = _switched.get(id(text))
        if record is None or record.text() is not text:
            record = _switched[id(text)] = _Switched(text, own_name)
        lease = None if record.lease is None else record.lease[0]()
        if lease is None:
            lease = Lease(record)
            # From here on an older lease that is collected late gives nothing back.
            record.lease = _references(lease, record.give_back)
        if text._attn_implementation != own_name:
            for config in _configs(model):
                if config._attn_implementation != own_name:
                    record.before[id(config)] = weakref.ref(config), config._attn_implementation
                    _reduce_with_name_before(type(config))
            if getattr(model.set_attn_implementation, "__self__", model)._can_set_attn_implementation():
                model.set_attn_implementation(own_name)
            if text._attn_implementation != own_name:
                # An attention that cannot be set: the name is for the model's mask alone.
                _set(text, own_name)
        return lease


def forward_began(config: Any, mask: Any) -> None:
    """A forward of a model with this configuration has made its mask, which lives until the forward ends."""
    text = config.get_text_config(decoder=True)
    with _turn:
        _give_back_late()
        record = _switched.get(id(text))
        if record is not None and record.text() is text:
            record.masks[id(mask)] = _references(mask, record.give_back)


def name_before(config: Any) -> str | None:
    """Return the name of the attention that a configuration had before ours took its place; its own where none has."""
    text = config.get_text_config(decoder=True)
    with _turn:
        record = _switched.get(id(text))
        if record is not None and record.text() is text and id(config) in record.before:
            return record.before[id(config)][1]
    name: str | None = config._attn_implementation
    return name


@contextmanager
def attention_restored(model: Any, own_name: str) -> Iterator[None]:
    """The names of a model's attention are at the end what they were at the beginning.

    A name that was ours at the beginning belongs to a lease, which gives it back.
    """
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        yield
    finally:
        for config, name in before:
            if name != own_name and config._attn_implementation != name:
                _set(config, name)


def _names(config: Any) -> tuple[str, str | None] | None:
    """Our name of a configuration's attention, and its name before; None where it is not switched."""
    with _turn:
        for record in _switched.values():
            reference, name = record.before.get(id(config), (None, None))
            if reference is not None and reference() is config:
                return record.own_name, name
    return None


def _reduce(config: Any) -> Any:
    """What `copy` and `pickle` take of a configuration: with the name of its attention before."""
    theirs = _reducers.get(type(config))
    found = config.__reduce_ex__(4) if theirs is None else theirs(config)
    names = _names(config)
    if names is None or not isinstance(found, tuple) or len(found) < 3 or not isinstance(found[2], dict):
        return found
    ours, before = names
    state = {
        name: before if name.startswith("_attn_implementation") and each == ours else each
        for name, each in found[2].items()
    }
    return *found[:2], state, *found[3:]


def _reduce_with_name_before(kind: type) -> None:
    """From now on configurations of this class are copied and pickled by `_reduce`."""
    theirs = copyreg.dispatch_table.get(kind)
    if theirs is not _reduce:
        _reducers[kind] = theirs
        copyreg.dispatch_table[kind] = _reduce


def _reduce_as_ever() -> None:
    """Configurations of a class of which none is switched are copied and pickled as without us."""
    lent = {type(config) for record in _switched.values() for each, _ in record.before.values() if (config := each())}
    for kind in [kind for kind in _reducers if kind not in lent]:
        theirs = _reducers.pop(kind)
        if copyreg.dispatch_table.get(kind) is not _reduce:
            continue
        if theirs is None:
            del copyreg.dispatch_table[kind]
        else:
            copyreg.dispatch_table[kind] = theirs


def _configs(model: Any) -> list[Any]:
    """Every configuration of a model, of its parts and of their parts."""
    waiting = [model.config, *(part.config for part in model.modules() if isinstance(part, PreTrainedModel))]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found:
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _set(config: Any, name: str | None) -> None:
    """Names the attention of one configuration and of none of its parts."""
    config._attn_implementation = {"": name}
