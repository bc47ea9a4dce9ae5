"""PyramidKV: many tokens for the first layers, few for the last, in equal steps.

*Idea*: attention is spread wide in the first layers and gathers on few tokens in the last. So the history budget falls
along a straight line from layer to layer, while its mean stays the budget's.

*Paper*: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", arXiv 2406.02069, section
4.2; our `beta` = its beta = 20; the last layer's history is mean / beta, the first layer's is 2 * mean - mean / beta.

*Source*: the paper and a description of its repository (MIT).

*Departs*: integers by largest remainder, so that layers sum to the total exactly, where the copies in use round down or
divide by L in place of L - 1 and so hold up to 3 % more than the budget. Where the first layer's share exceeds the
prompt the line is flattened about its mean (the official code does that only for long prompts and else falls back to
equal shares). A small last layer may keep no more than its recent window. The selection that the paper pairs with it is
SnapKV with window 8, kernel 7, max pooling: a preset, not this file.

*Cost*: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import even_shares

__all__ = ["Pyramid"]


@dataclass(frozen=True, kw_only=True)
class Pyramid(Allocator):
    """An arithmetic series over layers, equal for the heads of a layer.

    Attributes:
        beta: mean history over the history of the last layer; 1 is uniform.
    """

    beta: float = 20.0
    even_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.beta >= 1:
            raise ValueError(f"pyramid: beta must be at least 1 (1 is uniform), found {self.beta}; the paper uses 20")

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU."""
        count = request.num_layers
        free = request.capacity - request.floor
        widest, floors = free.sum(-1).amax(-1), request.floor.sum((1, 2))
        others = None
        if request.layers != tuple(range(count)):
            floors = floors * count // len(request.layers)
            if request.row_tokens is not None:
                others = (request.row_tokens - request.floor.amax((1, 2))).clamp_min(0)
                widest = torch.maximum(widest, others * free.shape[-1])
        history = (request.total - floors).clamp_min(0)
        weights = self._line(history.double() / count, widest.double(), count)
        return request.floor + even_shares(weights, history, torch.zeros_like(free), free, request.layers, others)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: the line is a few numbers for each layer."""
        return 0

    def _line(self, mean: Tensor, widest: Tensor, count: int) -> Tensor:
        """(b, L) float64 history of each layer, first to last, before it meets the layers' own bounds.

        The widest layer stands for one that never evicted, so that a second eviction draws the same line.
        """
        first = torch.minimum(2 * mean - mean / self.beta, widest)
        step = torch.linspace(0, 1, count, dtype=torch.float64)
        return (first[:, None] + (2 * mean - 2 * first)[:, None] * step).clamp_min(0)
