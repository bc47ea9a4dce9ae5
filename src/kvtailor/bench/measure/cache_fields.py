"""What a cache holds and reads, for a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.hf.cache import KvCache
    from kvtailor.ledger import Ledger

__all__ = ["Weighed", "bytes_of", "tokens_read", "weigh"]


@runtime_checkable
class Weighed(Protocol):
    """A cache that says what it holds: ours, and the dummies that tests measure."""

    seen: int

    def held(self) -> Tensor:
        """Return (b, l, h) int64: tokens held."""

    def ledger(self) -> Ledger:
        """Return the bytes that are held."""


@runtime_checkable
class _Layered(Protocol):
    """A cache of transformers: its layers may have `keys` and `values`."""

    layers: Sequence[Any]


def weigh(cache: Any) -> dict[str, Any]:
    """Return what a cache holds now, as fields of a `Record`; nothing for a cache that does not say it."""
    from kvtailor.hf.cache import KvCache

    if not isinstance(cache, Weighed):
        return {}
    held, ledger = cache.held(), cache.ledger()
    if isinstance(cache, KvCache):
        # Of a cache that several processes hold, all of it.
        held, ledger = cache.share.gather(held, 2), cache.whole_ledger()
    return {
        "tokens_seen": int(cache.seen),
        "tokens_held": float(held.double().mean()),
        "tokens_held_least": int(held.min()),
        "tokens_held_most": int(held.max()),
        "tokens_read": tokens_read(cache),
        "tokens_by_head": tuple(tuple(heads) for heads in held.double().mean(0).tolist()),
        "bytes_held": int(ledger.total),
        "bytes_full": int(ledger.full),
        "bytes_closed_form": None if ledger.closed_form is None else int(ledger.closed_form),
        "bytes_by_stage": dict(ledger.by_stage),
        "bytes_by_tier": dict(ledger.by_tier),
        "traffic": _moved(cache) if isinstance(cache, KvCache) else None,
        "bytes_by_layer": tuple(ledger.by_layer),
    }


def _moved(cache: KvCache) -> dict[str, float] | None:
    found: dict[str, float] = cache.traffic().as_dict()
    return found if any(found.values()) else None


def tokens_read(cache: Any) -> float | None:
    """`Record.tokens_read` of the forward before."""
    import torch

    from kvtailor.hf.cache import KvCache

    if not isinstance(cache, KvCache):
        return None
    states = cache.engine.states
    if all(state.observed.tokens_read is None for state in states):
        return None
    each = [
        state.counts() if state.observed.tokens_read is None else state.observed.tokens_read.cpu() for state in states
    ]
    return float(cache.share.gather(torch.stack(each), 2).double().mean())


def bytes_of(cache: Any) -> int | None:
    """Unique storages of a cache, ours or transformers' own; None for any other."""
    from torch import Tensor

    from kvtailor.ledger import storage_bytes

    if isinstance(cache, Weighed):
        return int(cache.ledger().total)
    if not isinstance(cache, _Layered):
        return None
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    states = [getattr(layer, name, {}) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    held += [each for of_layer in states for each in of_layer.values()]
    return storage_bytes([each for each in held if isinstance(each, Tensor)])
