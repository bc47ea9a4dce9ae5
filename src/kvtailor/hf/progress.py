"""How far a forward on a cache has come, and that one thread at a time is at work on it."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from kvtailor.engine.engine import Engine
from kvtailor.errors import CacheMisuse
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.versions import STATES_ARE_ASKED_FOR
from kvtailor.types import Visibility

__all__ = [
    "START_OVER",
    "TWO_THREADS",
    "Alone",
    "ForwardProgress",
    "Same",
    "beyond_positions",
    "bits_of_a_forward",
    "check_padding_of_states",
]

START_OVER = "call cache.reset(), or go on with a copy that was made before"
TWO_THREADS = (
    "two threads use this cache at once, or a forward on it was interrupted, and what it holds is not to be trusted: "
    f"{START_OVER}, and give each thread a cache of its own"
)


class Same:
    """Keeps an object as itself through a deep copy of what refers to it."""

    def __init__(self, value: Any):
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Same:
        return self


class ForwardProgress(NamedTuple):
    """How far a forward, or another change of the cache, has come.

    Attributes:
        thread: identifier of the thread that does it.
        reached: "updated" (a layer's keys came, its attention did not), "changing" (what is held is being changed) or
            "done" (the layer is finished, and others follow).
        layer: the newest layer of the forward; -1 for a change of all layers.
        layers: the layers of the forward that have been updated, as bits; a layer's states have a bit of their own,
            `CacheGuard.layers` places higher.
        states: the layer whose states were touched last; -1: none in this forward.
        recurrent: a recurrent state was written in this forward.
        asked: the states of that layer that the model has asked for in this forward.
        what: the change, in words.
    """

    thread: int
    reached: str
    layer: int
    layers: int
    what: str = "a forward"
    states: int = -1
    recurrent: bool = False
    asked: frozenset[str] = frozenset()

    def reaches(self, reached: str, layer: int, bits: int = 0) -> ForwardProgress:
        """The same forward at another layer or further on in this one, with these bits of layers more."""
        return ForwardProgress(self[0], reached, layer, self[3] | bits, *self[4:])


class Alone:
    """Lets one thread at a time read and replace the progress, unless the cache is refused.

    Never waits: a thread that finds another one there is a second user, and an interrupt on the way out of a `with` may
    leave a lock taken for good.

    Attributes:
        refusal: why the cache is refused, a sentence; None while it is not.
    """

    def __init__(self, refusal: str | None = None):
        self.refusal = refusal
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return Alone(self.refusal)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.refuse(self.refusal or TWO_THREADS)
        if self.refusal is not None:
            self._lock.release()
            raise CacheMisuse(self.refusal)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def refuse(self, why: str) -> NoReturn:
        """From now on the cache is refused for this reason."""
        self.refusal = why
        raise CacheMisuse(why)


def bits_of_a_forward(geometry: Geometry) -> int:
    """The bits of `ForwardProgress.layers` once a forward has come to its end."""
    reading = {layer for layers in geometry.readers.values() for layer in layers}
    bits = 0
    for index, shape in enumerate(geometry.shapes):
        if shape.kv_heads or index in reading:
            bits |= 1 << index
        if shape.states and STATES_ARE_ASKED_FOR:
            bits |= 1 << (geometry.layers + index)
    return bits


def beyond_positions(geometry: Geometry, engine: Engine, seen: int) -> str | None:
    """Why the model is beyond the positions that it was made for, a sentence; None where it is not.

    Args:
        geometry: of the model.
        engine: of the cache.
        seen: tokens, the new ones included.
    """
    limit = geometry.max_positions
    if limit is None or seen <= limit:
        return None
    rolls = engine.plan.attend.in_cache_positions
    # In a first forward only the first layers hold anything yet.
    held = max((int(state.counts().max()) for state in engine.states if state.rows), default=0)
    if rolls and held <= limit:
        return None
    what = (
        f"holds {held} tokens, which its positions count,"
        if rolls
        else f"has now seen {seen} tokens, whose positions compression keeps,"
    )
    return (
        f"the cache {what} and this {geometry.model_type} was made for {limit} positions: the model is beyond what it "
        "was trained on"
    )


def check_padding_of_states(model_type: str, real: Tensor, visible: Visibility) -> None:
    """Raise where padding of a row follows a token of it, or comes alone: states would take it for text.

    Args:
        model_type: of a model whose layers keep states.
        real: (b, columns) bool, False for padding.
        visible: of the forward.
    """
    new = real[:, visible.first_column : visible.first_column + visible.new_tokens]
    if bool((real[:, :-1] & ~real[:, 1:]).any()) or (new.shape[1] == 1 and not bool(new.all())):
        raise CacheMisuse(
            "attention_mask has padding behind tokens of its row, or in a forward of one token, and layers of this "
            f"{model_type} keep states that would take it for text: pad on the left alone, and feed each row what "
            "follows in a batch of its own length"
        )
