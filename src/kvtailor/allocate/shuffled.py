"""Shuffled: another allocator's layer budgets, each for a layer drawn at random. A control.

*Idea*: what an allocator is worth when its budgets go to random layers. Budgets that are better than their shuffles are
so because of where they lie, and not because they are unequal.

*Paper*: none; the ablation "random" of RankKV's report, for any allocator.

*Source*: our own.

*Departs*: the report drew one order; here each `state` is another, and a single one is little evidence. The order is
that of the layers' sha256, so it is the same on every machine and with every torch; it is one order for all rows and
evictions. A budget that its new layer cannot hold is cut, and goes to the other layers by their budgets.

*Cost*: the inner allocator's, and waiting for all layers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, LayersReordered

__all__ = ["Shuffled"]


@dataclass(frozen=True, kw_only=True)
class Shuffled(LayersReordered, Allocator):
    """Layer budgets in a random order, each with its split over the heads.

    Attributes:
        of: whose budgets.
        state: which order; few layers have few orders, and one of them is the allocator's own.
    """

    state: int = 0
    examples: ClassVar[tuple[str, ...]] = ("shuffled(of=pyramid)", "shuffled(of=pooled, state=3)")

    def source(self, budgets: Tensor) -> Tensor:
        """One order for all rows."""
        return torch.tensor(self.order(budgets.shape[1])).expand(budgets.shape[:2])

    def order(self, layers: int) -> list[int]:
        """For each layer, the layer whose budget it gets."""
        return sorted(range(layers), key=lambda layer: hashlib.sha256(f"{self.state} {layer}".encode()).digest())
