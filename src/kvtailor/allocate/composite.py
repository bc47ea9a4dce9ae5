"""Composite: layers compete with the mean scores of their heads' best tokens, next best tokens, and so on.

*Idea*: each head keeps tokens of its own, and the first, second ... of all heads of a layer together are a composite
token, worth the mean of their scores. Composite tokens of all layers compete in one pool. So layers get what their
scores ask for, while all heads of a layer hold equally many, and a layer stays one dense block.

*Paper*: "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens", arXiv 2509.05165.

*Source*: the paper's abstract, and its code in kvpress (Apache-2.0), by its authors.

*Departs*: as in that code, a composite token of the first layer is worth the most that one of its rank is in any layer,
so that no layer gets more than the first. Every layer is sure of one, which that code adds to the budget, and here is
taken from it. Where heads of a layer hold unequal numbers, from a cut before, the mean is over those that have such a
token.

*Cost*: the scores of all layers at once, so no layer can drop tokens before the last has run, and a sort of each head's
scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import apportion, even_shares
from kvtailor.ops.lanes.topk import pooled_counts

__all__ = ["Composite"]


@dataclass(frozen=True, kw_only=True)
class Composite(Allocator):
    """One pool of composite tokens per row.

    Attributes:
        sure: tokens that every head of every layer is sure of, as far as the budget goes.
        widest_first: no layer gets more than the first.
    """

    sure: int = 1
    widest_first: bool = True
    scope: ClassVar[str] = "prompt"
    needs_scores: ClassVar[bool] = True
    even_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sure < 0:
            raise ValueError(f"composite: sure must be 0 or more tokens, found {self.sure}; its authors' code has 1")

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: no scores were given, or a layer is absent.
        """
        every = request.scores_for("composite")
        request.check_all_layers("composite")
        heads, layers = request.capacity.shape[-1], request.layers
        low, high = request.floor.amax(-1), request.capacity.amax(-1)
        total = torch.minimum(torch.maximum(request.total // heads, low.sum(-1)), high.sum(-1))
        wanted = torch.maximum(low, high.clamp_max(self.sure))
        least = apportion(
            torch.ones(len(layers), dtype=torch.float32), torch.minimum(total, wanted.sum(-1)), low, wanted
        )
        counts = pooled_counts(self._composites(every), least, total)
        return even_shares(counts.double(), request.total, request.floor, request.capacity, layers)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """n: each head's share of the means; sorting compares."""
        return tokens

    def _composites(self, every: Sequence[Tensor]) -> Tensor:
        """(b, l, n) what the first, second ... tokens of each layer's heads are worth, -inf where no head has one."""
        longest = max(scores.shape[-1] for scores in every)
        found = []
        for scores in every:
            ranked = scores.sort(dim=-1, descending=True).values
            there = ranked > -torch.inf
            mean = ranked.masked_fill(~there, 0.0).sum(1) / there.sum(1).clamp_min(1)
            found.append(
                F.pad(mean.masked_fill(~there.any(1), -torch.inf), (0, longest - mean.shape[-1]), value=-torch.inf)
            )
        composites = torch.stack([each.to(found[0].device) for each in found], 1)
        if self.widest_first:
            first = composites[:, 0]
            # What the first layer does not have, it cannot get.
            composites[:, 0] = torch.where(first > -torch.inf, composites.amax(1), first)
        return composites
