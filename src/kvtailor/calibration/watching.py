"""The states of every compressed layer while the model runs uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.hf.cache import KvCache
from kvtailor.types import PLAIN_SOFTMAX, Softmax, Visibility

__all__ = ["LayerStates", "watched"]


@dataclass(frozen=True)
class LayerStates:
    """Queries, keys and values of one layer in one forward of one row.

    Attributes:
        layer: 0-based among the compressed ones.
        queries: (q, t, d) float32, post-RoPE.
        keys: (h, n, d) float32, the new tokens' at the end. Every token is there, so that slot i is column i.
        values: (h, n, dv) float32.
        scaling: factor before the softmax.
        softmax: what it has besides.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    softmax: Softmax = PLAIN_SOFTMAX

    def attention(self, head: int, first: int, end: int) -> Tensor:
        """(g, end - first, n) probabilities that a kv head's queries first..end of this forward give to all columns."""
        group = self.queries.shape[0] // self.keys.shape[0]
        new, seen = self.queries.shape[1], self.keys.shape[1]
        asked = self.queries[head * group : (head + 1) * group, first:end]
        logits = self.softmax.cap_(asked @ self.keys[head].t() * self.scaling)
        columns = (seen - new + first) + torch.arange(end - first, device=logits.device)
        future = torch.arange(seen, device=logits.device)[None] > columns[:, None]
        logits = logits.masked_fill_(future, float("-inf"))
        return self.softmax.of_heads(head * group, group).probabilities_(logits)


@contextmanager
def watched(cache: KvCache, see: Callable[[LayerStates], None]) -> Iterator[None]:
    """While it is open, each compressed layer's states go to `see` before its attention runs.

    Args:
        cache: of one row, under a plan that drops and encodes nothing.
        see: called in the order of the layers.
    """
    index_of = {layer: index for index, layer in enumerate(cache.geometry.compressed)}

    def watch(layer: int, keys: Tensor, values: Tensor, query: Tensor, visible: Visibility, scaling: float) -> None:
        # (h, n, d): what the layer holds, and the new tokens behind it.
        state = cache.engine.states[index_of[layer]]
        held = [part.decode() for part in (state.parts() if state.rows else ())]
        sides = [torch.cat([*(part[side] for part in held), new[0]], 1) for side, new in enumerate((keys, values))]
        see(
            LayerStates(
                index_of[layer], query[0].float(), sides[0].float(), sides[1].float(), scaling, state.model.softmax
            )
        )

    with cache.guard.observed(watch):
        yield
