"""MiniMax-01, whose model takes no cache but one of its own class, and hands it one state for each linear layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtailor.errors import UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.layers.states import StateLayer

__all__ = ["cache_class"]


def cache_class(config: Any) -> type[KvCache]:
    """Return the class of a cache for a model with this decoder configuration."""
    return _minimax_cache() if config.model_type == "minimax" else KvCache


def _minimax_cache() -> type[KvCache]:
    try:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache
    except ImportError as error:
        raise UnsupportedModel(f"this release of transformers has no MiniMaxCache: {error}") from error

    class MiniMaxKvCache(KvCache, MiniMaxCache):
        """A `KvCache` that MiniMax takes."""

        # What MiniMax's own class keeps of its linear layers; here the layers keep it themselves.
        linear_cache: tuple[Tensor, ...] = ()

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            """The state of a linear layer (b, q, d, d); None before the first token."""
            layer: StateLayer = self.layers[layer_idx]
            layer.touched("recurrent.0")
            return layer.recurrent_states[0]

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            """Take the state of a linear layer (b, q, d, d)."""
            layer: StateLayer = self.layers[layer_idx]
            layer.replace_recurrent_state(linear_cache)

    return MiniMaxKvCache
