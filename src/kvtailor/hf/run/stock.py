"""What a user would run instead: transformers' own caches, made and filled for a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, HQQQuantizedLayer, QuantoQuantizedLayer, StaticLayer

from kvtailor.hf.cache import KvCache
from kvtailor.hf.model.cache_dtype import stored_dtype
from kvtailor.hf.model.geometry import Geometry
from kvtailor.ops import huge_pages

__all__ = [
    "dynamic_cache",
    "fill",
    "into_huge_pages",
    "layer_makers",
    "quantized_cache",
    "rounded_cache",
    "static_cache",
]


def static_cache(model: Any, length: int) -> StaticCache:
    """transformers' `StaticCache` for a model, of `length` slots."""
    return StaticCache(config=model.config, max_cache_len=length)


def dynamic_cache(model: Any) -> DynamicCache:
    """transformers' default cache for a model."""
    return DynamicCache(config=model.config)


def rounded_cache(model: Any) -> DynamicCache | None:
    """Return a `dynamic_cache` that rounds what it takes as caches of ours do; None where ours round nothing.

    It holds what it rounded in the model's float32, so that its bytes say nothing; what a model gives on it is what a
    plan that drops nothing must give.
    """
    stored = stored_dtype(model)
    if stored is None:
        return None
    cache = dynamic_cache(model)
    for index in Geometry.of(model.config).compressed:
        layer = cache.layers[index]
        vars(layer)["update"] = partial(_update_rounded, layer.update, stored)
    return cache


def _update_rounded(
    update: Callable[..., tuple[Tensor, Tensor]], stored: torch.dtype, *states: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """A layer's own `update` of keys (b, h, t, d) and values that were rounded."""
    keys, values, *rest = states
    return update(keys.to(stored).to(keys.dtype), values.to(stored).to(values.dtype), *rest, **more)


def quantized_cache(model: Any, backend: str, *, bits: int, group: int, tail: int) -> QuantizedCache:
    """transformers' `QuantizedCache` for a model, with the axes that its documentation gives each backend.

    Args:
        backend: "quanto" or "hqq".
        bits: of a code.
        group: elements that share a scale.
        tail: newest tokens that wait in full precision.

    Raises:
        ImportError: the backend's library is not installed.
    """
    axis = {"quanto": 0, "hqq": 1}[backend]
    options = {"nbits": bits, "axis_key": axis, "axis_value": axis, "q_group_size": group, "residual_length": tail}
    return QuantizedCache(backend, model.config, **options)


def layer_makers(*, bits: int, group: int, tail: int) -> dict[str, Callable[[], Any]]:
    """By name of the cache, what makes one layer of it without a model: ImportError where a library is missing.

    Args:
        bits, group, tail: of the quantised ones, see `quantized_cache`.
    """
    options = {"nbits": bits, "q_group_size": group, "residual_length": tail}
    return {
        "DynamicCache": DynamicLayer,
        f"QuantizedCache quanto, {bits} bits": lambda: QuantoQuantizedLayer(axis_key=0, axis_value=0, **options),
        f"QuantizedCache hqq, {bits} bits": lambda: HQQQuantizedLayer(axis_key=1, axis_value=1, **options),
    }


@torch.no_grad()
def into_huge_pages(cache: StaticCache) -> None:
    """Copy the keys and values of a filled cache into memory for which huge pages are asked for, see `ops.huge_pages`.

    A `StaticCache` writes in place, so they stay there.
    """
    for layer in cache.layers:
        if not isinstance(layer, StaticLayer):
            continue
        layer.keys, layer.values = huge_pages.copied(layer.keys), huge_pages.copied(layer.values)


@torch.no_grad()
def fill(cache: Any, states: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Put keys and values (b, h, n, d), by layer of the model, into a cache as if the model had made them.

    For timing a decode step after a context whose prefill is not what is timed. A `KvCache` takes them without a
    eviction; the next forward of more than one token makes it.
    """
    for layer, (keys, values) in states.items():
        if isinstance(cache, KvCache):
            held = cache.layers[layer]
            held.lazy_initialization(keys, values)
            cache.engine.append(held.state, keys.to(held.dtype), values.to(held.dtype))
        else:
            cache.update(keys, values, layer)
