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

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import moved_shares
from kvtailor.types import Held, Needs

__all__ = ["Inverse"]


@dataclass(frozen=True, kw_only=True)
class Inverse(Allocator):
    """Layer budgets in reversed order of size, each with its split over the heads.

    Attributes:
        of: whose budgets.
    """

    of: Allocator
    scope: ClassVar[str] = "prompt"
    examples: ClassVar[tuple[str, ...]] = ("inverse(of=pyramid)", "inverse(of=adakv)")

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
                f"inverse needs all {request.num_layers} layers at once, found {request.layers}; its scope is 'prompt'"
            )
        if isinstance(self.of, Inverse):
            return self.of.of.allocate(request)
        budgets = self.of.allocate(request)
        largest_first = budgets.sum(-1).argsort(dim=-1, descending=True, stable=True)
        source = torch.zeros_like(largest_first).scatter(1, largest_first, largest_first.flip(-1))
        return moved_shares(budgets, source, request.floor, request.capacity, even=self.even_heads)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int | None:
        """Those of the inner allocator."""
        return self.of.flops(tokens=tokens, heads=heads, group=group, size=size)
