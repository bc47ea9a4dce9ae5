"""AdaKV: heads of one layer share its budget by what their tokens score.

*Idea*: some heads look at few tokens and some at many. All tokens of a layer compete in one pool, and a head's budget
is the number of winners it has; every head is sure of a part of the equal share.

*Paper*: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", arXiv
2407.11550, algorithm 1; our `floor` = its safeguard alpha = 0.2.

*Source*: the paper and our own knowledge of two public implementations; nothing was taken.

*Departs*: the safeguard is a floor: a head's best `floor * equal share` tokens always stay and the rest is pooled; the
paper's formula mixes pooled counts and equal shares in that proportion. The recent window of a scorer lies below the
floor and is not pooled.

*Cost*: the scores of one layer; two selections in linear time, and one copy of the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import apportion, layer_shares
from kvtailor.ops.lanes.topk import pooled_counts

__all__ = ["AdaKV"]


@dataclass(frozen=True, kw_only=True)
class AdaKV(Allocator):
    """One pool per layer.

    Attributes:
        floor: fraction of the equal share of the history that every head is sure of; 1 is uniform.
    """

    floor: float = 0.2
    needs_scores: ClassVar[bool] = True
    even_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"adakv: floor must be a fraction from 0 to 1, found {self.floor}; the paper uses 0.2")

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: no scores were given.
        """
        every = request.scores_for("adakv")
        rows, _, heads = request.capacity.shape
        low, high = request.floor.sum(-1), request.capacity.sum(-1)
        absent = None if request.row_tokens is None else request.row_tokens * heads
        weights = torch.ones(rows, request.num_layers, dtype=torch.float32)
        of_layer = layer_shares(weights, request.total, low, high, request.layers, absent)
        sure = ((of_layer - low).double() * self.floor).to(torch.int64) + low
        least = apportion(torch.ones(heads, dtype=torch.float32), sure, request.floor, request.capacity)
        counts = [pooled_counts(scores, least[:, i], of_layer[:, i]) for i, scores in enumerate(every)]
        return torch.stack(counts, dim=1)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: scores are compared, never computed with."""
        return 0
