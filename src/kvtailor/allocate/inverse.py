"""Inverse: another allocator's layer budgets, the smallest for the layer that had the largest.

*Idea*: if a way to tell layers apart is worth something, turning it round must cost something. The layers change places
in the order of their budgets, largest with smallest, so that the budgets stay the same and only their layers change.

*Paper*: none; the ablation "inverse" of RankKV's report, for any allocator.

*Source*: our own.

*Departs*: nothing known. Layers with equal budgets count as ordered, the earliest first. A budget that its new layer
cannot hold is cut, and goes to the other layers by their budgets. The inverse of an inverse is what that one was of,
also where layers tie or were cut.

*Cost*: the inner allocator's, and waiting for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest, LayersReordered

__all__ = ["Inverse"]


@dataclass(frozen=True, kw_only=True)
class Inverse(LayersReordered, Allocator):
    """Layer budgets in reversed order of size, each with its split over the heads.

    Attributes:
        of: whose budgets.
    """

    examples: ClassVar[tuple[str, ...]] = ("inverse(of=pyramid)", "inverse(of=adakv)")

    def allocate(self, request: BudgetRequest) -> Tensor:
        """See `LayersReordered.allocate`; the inverse of an inverse is what that one was of."""
        if isinstance(self.of, Inverse):
            self.check_every_layer(request)
            return self.of.of.allocate(request)
        return super().allocate(request)

    def source(self, budgets: Tensor) -> Tensor:
        """The layer of the i-th largest budget gets that of the i-th smallest."""
        largest_first = budgets.sum(-1).argsort(dim=-1, descending=True, stable=True)
        return torch.zeros_like(largest_first).scatter(1, largest_first, largest_first.flip(-1))
