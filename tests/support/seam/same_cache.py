"""Two caches compared in all that they hold and remember, bit for bit: numbers, types, strides and what is counted."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.states import StatesMixin
from kvtailor.hf.layers.window import WindowLayer

__all__ = ["assert_same_cache", "storages_of"]


def assert_same_cache(one: Any, two: Any) -> None:
    """Raise where two caches differ in what they hold, remember, count, or will do next."""
    assert (one.seen, one.rows) == (two.seen, two.rows)
    _same(one.guard.real, two.guard.real, "real")
    for mine, theirs in zip(one.layers, two.layers, strict=True):
        if isinstance(mine, CompressedLayer):
            where = f"layer {mine.layer_idx}"
            assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
            assert (mine.fast_path is None) == (theirs.fast_path is None)
            _same(mine.state.stored.segments, theirs.state.stored.segments, f"{where}, segments")
            _same(_of_tail(mine), _of_tail(theirs), f"{where}, tail")
            assert mine.state.stored.seen == theirs.state.stored.seen
            _same(vars(mine.state.observed), vars(theirs.state.observed), f"{where}, observed")
            _same(vars(mine.state.clock), vars(theirs.state.clock), f"{where}, clock")
            assert mine.state.model.scaling == theirs.state.model.scaling
            _same(mine.state.model.softmax, theirs.state.model.softmax, f"{where}, softmax")
        elif isinstance(mine, WindowLayer):
            _same(mine.keys, theirs.keys, "window, keys")
            _same(mine.values, theirs.values, "window, values")
            assert mine.cumulative_length == theirs.cumulative_length
        if isinstance(mine, StatesMixin):
            _same(mine.states(), theirs.states(), "states")
            assert mine.states_facts() == theirs.states_facts()
    ledgers = [each.ledger() for each in (one, two)]
    assert ledgers[0] == ledgers[1]
    assert torch.equal(one.held(), two.held())
    mine, theirs = ({k: v for k, v in vars(each.traffic()).items() if "seconds" not in k} for each in (one, two))
    assert mine == theirs
    for mine, theirs in zip(one.engine.states, two.engine.states, strict=True):
        _same(mine.here(), theirs.here(), f"layer {mine.index} of those that are compressed, segments as they are read")


def storages_of(cache: Any) -> set[int]:
    """Addresses of all storages that a cache holds."""
    found: set[int] = set()
    for layer in cache.layers:
        tensors: list[Tensor] = []
        if isinstance(layer, CompressedLayer):
            tensors += [tensor for entry in layer.state.entries(0) for tensor in entry.tensors.values()]
        elif isinstance(layer, WindowLayer):
            tensors += [layer.keys, layer.values]
        if isinstance(layer, StatesMixin):
            tensors += layer.states().values()
        found |= {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    return found


def _of_tail(layer: Any) -> dict[str, Any]:
    """A tail without the numbers in its free slots, which were never written."""
    tail = layer.state.stored.tail
    facts = {name: value for name, value in vars(tail).items() if not isinstance(value, Tensor)}
    buffers = {name: (tensor.stride(), tensor[:, : tail.length]) for name, tensor in tail.tensors().items()}
    return facts | {"slots": tail.slots, "buffers": buffers}


def _same(one: Any, two: Any, where: str) -> None:
    assert type(one) is type(two), f"{where}: {type(one).__name__} and {type(two).__name__}"
    if isinstance(one, Tensor):
        facts = [(t.dtype, tuple(t.shape), t.stride(), t.device, t.untyped_storage().nbytes()) for t in (one, two)]
        assert facts[0] == facts[1], f"{where}: {facts[0]} and {facts[1]}"
        assert torch.equal(one, two) or bool(((one == two) | (one.isnan() & two.isnan())).all()), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        # Two files have names of their own, which are in their heads.
        for name in one.keys() - {"_id", "path", "_header_checksum"}:
            _same(one[name], two[name], f"{where}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for place, (mine, theirs) in enumerate(zip(one, two, strict=True)):
            _same(mine, theirs, f"{where}[{place}]")
    elif is_dataclass(one):
        for each in fields(one):
            _same(getattr(one, each.name), getattr(two, each.name), f"{where}.{each.name}")
    elif isinstance(one, int | float | str | range | bool | type(None) | torch.dtype | torch.device | torch.Size):
        assert one == two, f"{where}: {one!r} and {two!r}"
    elif hasattr(one, "__dict__"):
        _same(vars(one), vars(two), where)
