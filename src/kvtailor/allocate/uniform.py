"""Uniform: every layer and kv head gets the same.

*Idea*: it is not known which layer or head needs more, so all get the same number of tokens.

*Paper*: none; the null object, and what StreamingLLM, H2O and SnapKV do.

*Source*: our own.

*Departs*: nothing known. What the division over layers leaves over goes to the earliest; what the heads of a layer
could not share equally, less than one token for each of them in all, is not spent.

*Cost*: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import even_shares

__all__ = ["Uniform"]


@dataclass(frozen=True, kw_only=True)
class Uniform(Allocator):
    """Equal shares for layers, and for the heads of a layer."""

    even_heads: ClassVar[bool] = True
    even_layers: ClassVar[bool] = True

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU."""
        weights = torch.ones(request.capacity.shape[0], request.num_layers, dtype=torch.float32)
        return even_shares(weights, request.total, request.floor, request.capacity, request.layers, request.row_tokens)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: shares are a few numbers for each layer."""
        return 0
