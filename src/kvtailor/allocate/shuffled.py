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

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import moved_shares
from kvtailor.types import Held, Needs

__all__ = ["Shuffled"]


@dataclass(frozen=True, kw_only=True)
class Shuffled(Allocator):
    """Layer budgets in a random order, each with its split over the heads.

    Attributes:
        of: whose budgets.
        state: which order; few layers have few orders, and one of them is the allocator's own.
    """

    of: Allocator
    state: int = 0
    scope: ClassVar[str] = "prompt"
    examples: ClassVar[tuple[str, ...]] = ("shuffled(of=pyramid)", "shuffled(of=pooled, state=3)")

    @property
    def needs_scores(self) -> bool:
        return self.of.needs_scores

    @property
    def even_heads(self) -> bool:
        return self.of.even_heads

    @property
    def needs(self) -> Needs:
        return self.of.needs

    def measure(self, held: Held) -> Tensor | None:
        """What the inner allocator measures."""
        return self.of.measure(held)

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: a layer is absent, or what the inner allocator raises.
        """
        if request.layers != tuple(range(request.num_layers)):
            raise ValueError(
                f"shuffled needs all {request.num_layers} layers at once, found {request.layers}; its scope is 'prompt'"
            )
        budgets = self.of.allocate(request)
        source = torch.tensor(self.order(request.num_layers)).expand(budgets.shape[:2])
        return moved_shares(budgets, source, request.floor, request.capacity, even=self.even_heads)

    def order(self, layers: int) -> list[int]:
        """For each layer, the layer whose budget it gets."""
        return sorted(range(layers), key=lambda layer: hashlib.sha256(f"{self.state} {layer}".encode()).digest())

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int | None:
        """Those of the inner allocator."""
        return self.of.flops(tokens=tokens, heads=heads, group=group, size=size)
