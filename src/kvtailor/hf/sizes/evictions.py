"""How many tokens an eviction leaves in each layer: the engine's own budgets, as far as the text does not decide them.

Three kinds of allocators are told apart. Some give numbers that follow from the budget alone. Some give every layer the
same sum, which heads share by their scores. Of the others only the sum over all layers is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.engine.budget import Budget, CacheShape, budget_of, recent_tokens
from kvtailor.hf.sizes.layer import Kept
from kvtailor.ops.lanes.apportion import layer_shares
from kvtailor.types import Needs

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.plan import Plan

__all__ = ["Evictions"]


@dataclass(frozen=True, kw_only=True)
class Evictions:
    """The evictions of a plan on the compressed layers of a model, of rows that are all equally long.

    Attributes:
        plan: that evicts.
        geometry: of the model.
        rows: b.
        element_size, own_size: bytes of an element of the cache's dtype, and of the model's; see `forecast_size`.
        calibration: tensors of the allocator's calibration files; None: not known.
    """

    plan: Plan
    geometry: Geometry
    rows: int
    element_size: int
    own_size: int | None = None
    calibration: Mapping[str, Tensor] | None = None

    @cached_property
    def shapes(self) -> list[CacheShape]:
        """Of each compressed layer."""
        return [
            CacheShape(
                heads=each.kv_heads,
                key_size=each.key_size,
                value_size=each.value_size,
                element_size=self.element_size,
                rows=self.rows,
            )
            for each in self.geometry.compressed_shapes
        ]

    @cached_property
    def known(self) -> Literal["counts", "layers", "sum"]:
        """What of the budgets is known before a run: each head's, each layer's, or the sum alone."""
        allocate = self.plan.allocate
        if not allocate.needs_scores and allocate.needs == Needs() and self.plan.scope != "progressive":
            seen = 1 << 12
            try:
                self._allocated(seen, [[seen] * shape.heads for shape in self.shapes])
                return "counts"
            except ValueError:
                # By contract an allocator raises this where it needs what only a run measures.
                pass
        return "layers" if allocate.even_layers and self.plan.scope != "progressive" else "sum"

    def recent(self, seen: int) -> int:
        """Return the newest tokens that all heads keep after so many were seen."""
        return int(recent_tokens(self.plan, self._budget(seen, len(self.shapes) - 1).each).min())

    def total(self, seen: int) -> int:
        """Return the tokens that one row may hold over all compressed layers and kv heads."""
        return int(self._budget(seen, len(self.shapes) - 1).each_layer_total)

    def kept(self, seen: int, held: Sequence[Sequence[int]]) -> list[Kept | None]:
        """Return what each layer keeps; None where all of it stays as it is. Of plans of which layers are `known`.

        Args:
            seen: tokens of each row.
            held: of each layer the tokens of each kv head of a row, at most; where only their sum is known, any split.
        """
        exact = self.plan.select.exact
        recent = self.recent(seen)
        found: list[Kept | None] = []
        if self.known == "counts":
            for own, has in zip(self._allocated(seen, held), held, strict=True):
                if exact and all(due >= there for due, there in zip(own, has, strict=True)):
                    found.append(None)
                elif exact:
                    found.append(Kept.of(tuple(own) * self.rows))
                else:
                    found.append(self._at_most(sum(own), len(own), recent, has))
            return found
        for due, has in zip(self._layer_totals(seen, held), held, strict=True):
            if exact and due >= sum(has):
                found.append(None)
            elif exact:
                # A single head in each row leaves nothing to decide.
                found.append(Kept(due * self.rows, due * self.rows, alike=len(has) == 1))
            else:
                found.append(self._at_most(due, len(has), recent, has))
        return found

    def _at_most(self, due: int, heads: int, recent: int, has: Sequence[int]) -> Kept:
        """What a selector that may keep fewer leaves of a budget of one row: at least one token of each head."""
        low, high = heads * max(1, min(recent, min(has))), min(due, sum(has))
        low = min(low, high)
        return Kept(low * self.rows, high * self.rows, alike=heads == 1 and self.rows == 1)

    @cached_property
    def _budgets(self) -> dict[tuple[int, CacheShape], _RowBudget]:
        """What `_budget` has found, by tokens seen and the layer's shape."""
        return {}

    def _budget(self, seen: int, layer: int) -> _RowBudget:
        plan, key = self.plan, (seen, self.shapes[layer])
        if key in self._budgets:
            return self._budgets[key]
        budget = budget_of(
            plan,
            torch.tensor([seen]),
            layers=len(self.shapes),
            newest=self.shapes[layer],
            other_bytes=0 if plan.bytes is None else self.geometry.other_bytes(self.element_size, self.own_size),
            shapes=() if self.geometry.alike else self.shapes,
        )
        found = self._budgets[key] = _RowBudget(
            budget, sum(shape.heads for shape in self.shapes), len(self.shapes) * self.shapes[layer].heads
        )
        return found

    def _bounds(self, seen: int, held: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(1, l, h) int64 what must stay and what there is, of layers with equally many heads."""
        capacity = torch.tensor([list(held)], dtype=torch.int64)
        return capacity.clamp(max=self.recent(seen)), capacity

    def _request(self, seen: int, held: Sequence[Sequence[int]], layers: Sequence[int]) -> BudgetRequest:
        """What the engine asks of the allocator for some layers."""
        budget = self._budget(seen, layers[-1]).budget
        floor, capacity = self._bounds(seen, [held[layer] for layer in layers])
        return BudgetRequest(
            total=budget.total,
            row_tokens=budget.row_tokens,
            capacity=capacity,
            floor=floor,
            layers=tuple(layers),
            num_layers=len(held),
            calibration=self.calibration,
        )

    def _of_layers(
        self, seen: int, held: Sequence[Sequence[int]], found_of: Callable[[BudgetRequest], list[Any]]
    ) -> list[Any]:
        """What each layer is found to get, of all layers at once or of one after the other, as the engine asks."""
        if self.plan.scope != "layer":
            return found_of(self._request(seen, held, range(len(held))))
        found: list[Any] = []
        known: dict[Any, list[Any]] = {}
        for layer, has in enumerate(held):
            # Where nothing of the budget is left over, layers that hold the same get the same, wherever they are.
            even = self.plan.allocate.even_layers and not self._budget(seen, layer).left_over
            key = (self.shapes[layer], tuple(has)) if even else layer
            if key not in known:
                known[key] = found_of(self._request(seen, held, (layer,)))
            found += known[key]
        return found

    def _allocated(self, seen: int, held: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of each layer's kv heads, of one row."""
        return self._of_layers(seen, held, lambda request: self.plan.allocate.allocate(request)[0].tolist())

    def _layer_totals(self, seen: int, held: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each layer, of one row, where every layer gets the same."""

        def totals(request: BudgetRequest) -> list[int]:
            heads = request.capacity.shape[2]
            low, high = request.floor.sum(-1), request.capacity.sum(-1)
            absent = None if request.row_tokens is None else request.row_tokens * heads
            weights = torch.ones(1, request.num_layers, dtype=torch.float32)
            return layer_shares(weights, request.total, low, high, request.layers, absent)[0].tolist()

        return self._of_layers(seen, held, totals)


@dataclass(frozen=True)
class _RowBudget:
    """A budget of one row, as one layer is told it, whose total is that of all layers if all had its heads."""

    budget: Budget
    every: int
    alike: int

    @property
    def each(self) -> Tensor:
        """(1,) int64 tokens per kv head, on average."""
        return self.budget.each

    @property
    def each_layer_total(self) -> int:
        """Tokens over all layers and heads."""
        return int(self.budget.total) * self.every // self.alike

    @property
    def left_over(self) -> int:
        """Tokens that remain where each layer and head gets the same."""
        return int(self.budget.total) % self.alike
