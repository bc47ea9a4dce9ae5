"""Chunks: whole runs of neighbouring tokens stay or go.

*Idea*: a token means little without its neighbours, so the unit is a run of `size` consecutive tokens. Chunks are
ranked by the mean score of their tokens, and the best stay whole.

*Paper*: "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference", arXiv 2502.00299,
algorithm 1; our `size` = its chunk size, 10.

*Source*: the paper and a reading of kvpress (Apache-2.0), whose default is 20; nothing was taken.

*Departs*: the paper keeps whole chunks only; here the budget is met exactly, so of the last chunk that fits in part
the best tokens stay. Means are ranked, not sums, which is the same except for a chunk cut short by the newest tokens
that stay anyway, or by the end. By default each kv head ranks its own chunks; the published form is `heads="all"`, one
choice by the sum over heads, and the preset `chunkkv` has it. The paper's reuse of one layer's choice in the next
layers is not here: a selector sees one layer.

*Cost*: two sorts of the scores; a scratch of a few (b, h, n) numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvtailor.ops.lanes.topk import keep_top
from kvtailor.select.contract import Selector

__all__ = ["Chunks"]

Heads = Literal["each", "all"]


@dataclass(frozen=True, kw_only=True)
class Chunks(Selector):
    """Exact counts, chunk by chunk.

    Attributes:
        size: tokens of a chunk; 1 is top-k.
        heads: "each": every kv head ranks its own chunks; "all": chunks are ranked by the scores of all kv heads
            summed, as published, so that all heads of a row keep the same tokens. They then need the same budget.
    """

    size: int = 10
    heads: Heads = "each"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"chunks: size must be at least 1 token, found {self.size}; the paper uses 10")
        if self.heads not in get_args(Heads):
            raise ValueError(f"chunks: heads must be one of {get_args(Heads)}, found {self.heads!r}")

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
        if self.heads == "all":
            scores = torch.where(odd, scores, scores.masked_fill(odd, 0.0).sum(1, keepdim=True))
        present = scores > -torch.inf
        last = scores.shape[-1]
        chunks = -(-last // self.size)
        # Tokens move to the front of their lane; one more slot collects the rest.
        place = (present.cumsum(-1) - 1).masked_fill(~present, chunks * self.size)
        packed = scores.new_full((*scores.shape[:-1], chunks * self.size + 1), -torch.inf).scatter(-1, place, scores)
        packed = packed[..., :-1].unflatten(-1, (chunks, self.size))
        member = packed.isfinite()
        # Counted from the lowest, so that chunks of equal scores are equal whatever their length.
        low = packed.masked_fill(~member, torch.inf).amin(-1, keepdim=True)
        above = (packed - low).masked_fill(~member, 0.0).sum(-1)
        mean = torch.where(member.any(-1), low[..., 0] + above / member.sum(-1), -torch.inf)
        order = mean.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        within = packed.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        # Integers in float32, exact up to 2**24 tokens.
        rank = (order[..., None] * self.size + within).flatten(-2).gather(-1, place.clamp_max(chunks * self.size - 1))
        return keep_top(torch.where(odd, own, -rank.to(torch.float32)), budgets)

    def flops(self, *, tokens: int) -> int:
        """One for each token: additions within its chunk, and one division in place of the first.

        One more where the heads are added up.
        """
        return tokens * (2 if self.heads == "all" else 1)
