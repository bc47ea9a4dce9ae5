"""Retrieval: the chunks whose mean key the last query of the prompt looks at.

*Idea*: a small part of a long context is what a model reads while it goes on writing, and it lies in runs. Each chunk
of held tokens is scored by its mean key with the last queries, and the best chunks stay whole; the first one, which
holds the sinks, outranks all. Made for the cache of a draft: what it misses costs speed and no token.

*Paper*: "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding", arXiv
2404.11912, section 4.1; our `chunk` = its chunk size, 8; `window` = 1 is its last query.

*Source*: the paper and a description of its implementation.

*Departs*: the implementation has one query head for each kv head; here a group's queries are averaged, which ranks as
the sum of their logits does. Budgets are exact, so of the last chunk that fits in part the earliest tokens stay. The
newest `window` tokens always stay. Tokens that are written later are added, where the implementation lets them take the
place of the lowest chunks: give a slack, or refresh the cache. A cap on logits and learned sinks change no product, and
so no score.

*Cost*: the last `window` queries; one pass over the keys, widened a piece at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.attention.observed import observed_queries
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["Retrieval"]

# Tokens whose keys are widened at once.
_BLOCK = 2048


@dataclass(frozen=True, kw_only=True)
class Retrieval(Scorer):
    """Logit of a chunk's mean key.

    Attributes:
        chunk: tokens of a chunk.
        window: newest queries, of which the mean is taken, and newest tokens that always stay.
    """

    chunk: int = 8
    window: int = 1

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"retrieval: chunk must be at least 1 token, found {self.chunk}; the paper uses 8")
        if self.window < 1:
            raise ValueError(f"retrieval: window must be at least 1 query, found {self.window}; the paper uses 1")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, the same for all tokens of a chunk. Chunks are counted from each row's first held token.

        Raises:
            ValueError: no queries were gathered.
        """
        queries, columns = observed_queries(held, "retrieval scores by", self.window)
        b, h, n, _ = held.keys.shape
        real = held.held_by_first().float()
        mean = queries.float().unflatten(1, (h, -1)).mean(2)
        query = (mean * real[:, None, :, None]).sum(2) / real.sum(-1).clamp(min=1)[:, None, None]
        # Each token's chunk; filler goes to one chunk more, which is not read.
        last = -(-n // self.chunk)
        place = torch.div(held.valid.cumsum(-1) - 1, self.chunk, rounding_mode="floor").masked_fill(~held.valid, last)
        # The query times a mean of keys is the mean of its products with them, which need no float32 copy of all keys.
        products = held.keys.new_empty((b, h, n), dtype=torch.float32)
        for first in range(0, n, _BLOCK):
            part = slice(first, first + _BLOCK)
            products[:, :, part] = (held.keys[:, :, part].float() @ query[..., None])[..., 0]
        products.masked_fill_(~held.valid, 0.0)
        total = products.new_zeros((b, h, last + 1)).scatter_add(2, place, products)
        count = products.new_zeros((b, h, last + 1)).scatter_add(2, place, held.valid.float())
        scores: Tensor = total / count.clamp(min=1)
        scores[..., 0] = scores[..., :last].masked_fill(count[..., :last] == 0, -torch.inf).amax(-1) + 1
        return scores.gather(2, place)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """2 d for each token's product with the query, 1 to sum it, and a division for each chunk."""
        return (2 * size + 1) * tokens + -(-tokens // self.chunk)
