"""Gated chunks: runs of neighbouring tokens stay whole, unless one token is what they are worth.

*Idea*: a chunk whose score comes from a single token spends its slots on neighbours that say little. The entropy of the
scores inside a chunk, over the greatest that it can be, tells which chunks those are. Chunks are taken in the order of
their mean scores: one that is at least of median score and below the median entropy keeps its `short` best tokens, any
other all of them. What is left of the budget goes to the best tokens of what was left out.

*Paper*: none; EntropyGatedChunkKV of kvpress (issue 261, pull request 263), after "ChunkKV: Semantic-Preserving KV
Cache Compression for Efficient Long-Context LLM Inference", arXiv 2502.00299.

*Source*: that issue and a reading of kvpress 0.5.5 (Apache-2.0), whose defaults these are; nothing was taken.

*Departs*: kvpress makes one choice for all heads, and for all rows that of the first; `heads="all"` is that for each
row, and by default each kv head has its own. Tokens that stay anyway (a window) are no part of a chunk's mean or
entropy; there they lift their chunks.

*Cost*: four sorts of the scores; a scratch of a few (b, h, n) numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvtailor.ops.lanes.packed import pack
from kvtailor.ops.lanes.topk import keep_top
from kvtailor.select.contract import Selector

__all__ = ["GatedChunks"]

Heads = Literal["each", "all"]
_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class GatedChunks(Selector):
    """Exact counts, chunk by chunk, fewer tokens of a chunk that one token carries.

    Attributes:
        size: tokens of a chunk.
        short: tokens of a chunk of high score and low entropy that stay with it.
        heads: "each": every kv head ranks its own chunks; "all": chunks are ranked by the scores of all kv heads
            summed, so that all heads of a row keep the same tokens. They then need the same budget.
    """

    size: int = 10
    short: int = 4
    heads: Heads = "each"

    def __post_init__(self) -> None:
        if not 1 <= self.short < self.size:
            raise ValueError(
                f"gatedchunks: short must be from 1 to below size, found short={self.short} and size={self.size}; "
                "kvpress uses 4 and 10"
            )
        if self.heads not in get_args(Heads):
            raise ValueError(f"gatedchunks: heads must be one of {get_args(Heads)}, found {self.heads!r}")

    @property
    def same_in_heads(self) -> bool:
        return self.heads == "all"

    def select(self, scores: Tensor, budgets: Tensor) -> Tensor:
        """See the contract. Chunks are runs of held tokens of a row and head, counted from its first one.

        Raises:
            CacheMisuse: a score is NaN.
            ValueError: a budget that the tokens cannot fill.
        """
        odd, own = ~scores.isfinite(), scores
        scores = scores.masked_fill(odd, 0.0)
        if self.heads == "all":
            scores = scores.sum(1, keepdim=True).expand_as(scores)
        packed = pack(own > -torch.inf, self.size)
        # (b, h, r, c): a chunk's tokens, and which of them may go.
        tokens, free = packed.in_runs(scores), packed.in_runs((~odd).to(scores.dtype)) > 0
        count = free.sum(-1)
        low = tokens.masked_fill(~free, torch.inf).amin(-1, keepdim=True)
        above = (tokens - low).masked_fill(~free, 0.0)
        # Counted from the lowest, so that chunks of equal scores are equal whatever their length.
        mean = torch.where(count > 0, low[..., 0] + above.sum(-1) / count.clamp(min=1), -torch.inf)
        # Of a chunk with negative scores what lies above the lowest is shared out, as there.
        entropy = _entropy(torch.where(low < 0, above, tokens.masked_fill(~free, 0.0)), count)
        gated = (mean >= _median(mean, count > 0)) & (entropy < _median(entropy, count > 0))
        whole = torch.where(gated, count.clamp(max=self.short), count)

        order = _ranks(mean)
        within = _ranks(tokens.masked_fill(~free, -torch.inf))
        rank = torch.where(within < whole[..., None], order[..., None] * self.size + within, -1)
        late = packed.runs * self.size + _ranks(scores.masked_fill(odd, -torch.inf))
        rank = packed.back(rank)
        # Integers in float32, exact up to 2**24: half as many tokens.
        rank = torch.where(rank < 0, late, rank).to(torch.float32)
        return keep_top(torch.where(odd, own, -rank), budgets)

    def flops(self, *, tokens: int) -> int:
        """5 for each token: its part in the mean, a share, its logarithm and product, the sum. One more for "all"."""
        return tokens * (6 if self.heads == "all" else 5)


def _entropy(shares: Tensor, count: Tensor) -> Tensor:
    """(b, h, r) from 0 to 1: entropy of numbers (b, h, r, c) as shares of their sum, over log `count`; 0 of one."""
    shares = shares / (shares.sum(-1, keepdim=True) + _EPSILON)
    found = -(shares * (shares + _EPSILON).log()).sum(-1)
    return torch.where(count > 1, (found / count.clamp(min=2).float().log()).clamp(0.0, 1.0), 0.0)


def _median(numbers: Tensor, there: Tensor) -> Tensor:
    """(b, h, 1): the lower median of numbers (b, h, r) that are there."""
    ranked = numbers.masked_fill(~there, torch.inf).sort(-1).values
    return ranked.gather(-1, ((there.sum(-1, keepdim=True) - 1) // 2).clamp(min=0))


def _ranks(numbers: Tensor) -> Tensor:
    """The place of each number along the last axis when the highest come first, ties in their order."""
    return numbers.argsort(dim=-1, descending=True, stable=True).argsort(-1)
