"""The stage `allocate`: a total budget -> integers for each layer and kv head, summing exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Method
from kvtailor.ops.lanes.apportion import moved_shares
from kvtailor.types import Held, Needs

__all__ = ["Allocator", "BudgetRequest", "LayersReordered"]


@dataclass(frozen=True, kw_only=True)
class BudgetRequest:
    """A total budget, and what the layers hold that are to share it.

    Attributes:
        total: (b,) int64 on the CPU: tokens for each row, over all `num_layers` layers and all kv heads.
        capacity: (b, l, h) int64 on the CPU: tokens that each of the present layers' heads has.
        floor: (b, l, h) int64 on the CPU: tokens that must stay (the recent window), at most `capacity`. Where the
            floors of a row exceed its share, the floors win.
        layers: which layers are present, 0-based among the `num_layers` that the plan compresses. One layer under the
            scope "layer", all of them under "prompt", the first so many under "progressive".
        num_layers: layers that the plan compresses.
        scores: for each present layer (b, h, n) float32, -inf where no token is, +inf for tokens that must stay; None
            if the allocator does not need them.
        measured: for each present layer what `Allocator.measure` gave; None where the allocator measures nothing.
        row_tokens: (b,) int64 on the CPU: real tokens that each row has seen, the most that a head of an absent layer
            can hold. None: absent layers hold what a present one does, which is so at prefill.
        calibration: the tensors of the allocator's calibration file, stacked over the `num_layers` layers; None where
            it has none.
    """

    total: Tensor
    capacity: Tensor
    floor: Tensor
    layers: tuple[int, ...]
    num_layers: int
    scores: Sequence[Tensor] | None = None
    measured: Sequence[Tensor] | None = None
    row_tokens: Tensor | None = None
    calibration: Mapping[str, Tensor] | None = None

    @property
    def history(self) -> Tensor:
        """Return (b,) int64: the total less the floors of all layers; absent layers count like the present ones."""
        floors = self.floor.sum((1, 2)) * self.num_layers // len(self.layers)
        return (self.total - floors).clamp_min(0)

    def numbers(self, name: str, *, every_layer: bool = False) -> Tensor:
        """Return (b, l, ...) float64 on the CPU: what `Allocator.measure` returned for the present layers.

        Args:
            name: of the allocator, for error messages.
            every_layer: whether it needs all layers, and not only the first so many.

        Raises:
            ValueError: nothing was measured, or a layer is absent.
        """
        wanted = self.num_layers if every_layer else len(self.layers)
        if self.layers != tuple(range(wanted)):
            scope = "prompt" if every_layer else "progressive"
            raise ValueError(
                f"{name} needs layers 0 to {wanted - 1} at once, found {self.layers}; its scope is '{scope}'"
            )
        if self.measured is None:
            raise ValueError(
                f"{name} splits by what it measured, but the request holds no measurements; pass what its `measure` "
                "gives for each present layer"
            )
        return torch.stack([each.detach().to("cpu", torch.float64) for each in self.measured], 1)

    def scores_for(self, name: str) -> Sequence[Tensor]:
        """Return the scores of the present layers.

        Args:
            name: of the allocator, for error messages.

        Raises:
            ValueError: there are none.
        """
        if self.scores is None:
            raise ValueError(
                f"{name} pools scores, but the request holds none; an allocator with needs_scores must get them"
            )
        return self.scores

    def check_all_layers(self, name: str) -> None:
        """Raise `ValueError` with the name of the allocator unless all layers are present."""
        if self.layers != tuple(range(self.num_layers)):
            raise ValueError(
                f"{name} needs all {self.num_layers} layers at once, found {self.layers}; its scope is 'prompt'"
            )


class Allocator(Method, ABC):
    """One way to split a budget. A subclass is a frozen, keyword-only dataclass of its hyper-parameters.

    Contract: the result lies between floor and capacity; for each row it sums to the share of the present layers
    (all of `total` when all layers are present) whenever floors and capacities allow that sum; what is cut off
    at a floor or a capacity goes to other heads; a larger total never gives a smaller sum.

    A property of this class may be a class attribute of a method for which it is constant (`even_heads: ClassVar[bool]
    = True`). An allocator around another one returns the other one's.
    """

    @property
    def scope(self) -> str:
        """ "layer" or "prompt", as for scorers; or "progressive".

        Progressive: called after each layer for the budgets of all layers so far. Layers that were cut before hold what
        was left to them, and their scores stay the same. The sum is that of all layers once the last is present.
        """
        return "layer"

    @property
    def needs_scores(self) -> bool:
        """Whether it needs `BudgetRequest.scores`."""
        return False

    @property
    def even_heads(self) -> bool:
        """Whether heads of a layer that hold equally many tokens get equal budgets, so that it stays one dense block.

        The sum is then the largest multiple of h within the share.
        """
        return False

    @property
    def even_layers(self) -> bool:
        """Whether layers that hold equally many tokens get equal budgets, whatever their scores.

        Needed where the layers of a model differ in heads or head sizes, so that a token costs more in some than in
        others.
        """
        return False

    @property
    def needs(self) -> Needs:
        """Return the evidence to gather for `measure`."""
        return Needs()

    def measure(self, held: Held) -> Tensor | None:
        """Return what this allocator needs to know of one layer: (b, ...) float on any device.

        `BudgetRequest.measured` has it for each layer. None: the allocator measures nothing.
        """
        return None

    @abstractmethod
    def allocate(self, request: BudgetRequest) -> Tensor:
        """Return (b, l, h) int64 on the CPU: tokens for each present layer and kv head."""

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int | None:
        """Count what one call of `measure` and `allocate` computes for one row and kv head; None: not known.

        Counted as in `Scorer.flops`.

        Args:
            tokens: n, tokens held.
            heads: h; what is computed once for the layer is divided by it.
            group: g, query heads of a kv head.
            size: d, of a key.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class LayersReordered(Method):
    """A base of allocators that give the layer budgets of another allocator to other layers.

    A subclass names it before `Allocator` among its bases.

    A budget keeps its split over the heads. If it exceeds what its new layer holds, the excess goes to the other
    layers in proportion to their budgets.

    Attributes:
        of: the other allocator.
    """

    of: Allocator
    scope: ClassVar[str] = "prompt"

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
        """Return what the inner allocator measures."""
        return self.of.measure(held)

    @abstractmethod
    def source(self, budgets: Tensor) -> Tensor:
        """Return for each layer the layer whose budget it gets, (b, l) int64, from the inner budgets (b, l, h)."""

    def allocate(self, request: BudgetRequest) -> Tensor:
        """Return (b, l, h) int64 on the CPU: the inner allocator's budgets, with the layers in the order of `source`.

        Raises:
            ValueError: a layer is absent, or what the inner allocator raises.
        """
        self.check_every_layer(request)
        budgets = self.of.allocate(request)
        return moved_shares(budgets, self.source(budgets), request.floor, request.capacity, even=self.even_heads)

    def check_every_layer(self, request: BudgetRequest) -> None:
        """Raise `ValueError` unless all layers are present: only then are all budgets known."""
        request.check_all_layers(type(self).__name__.lower())

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int | None:
        """Count as the inner allocator does."""
        return self.of.flops(tokens=tokens, heads=heads, group=group, size=size)
