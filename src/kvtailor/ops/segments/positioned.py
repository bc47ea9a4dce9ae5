"""A segment around another one whose keys are changed back by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvtailor.ops.segments.around import AroundSegment
from kvtailor.types import Layout, Segment

__all__ = ["PositionedSegment", "first_of_lanes", "positions_of"]


@dataclass(frozen=True, kw_only=True)
class PositionedSegment(AroundSegment):
    """What knows from which column each lane's positions count.

    Attributes:
        first: (m,) int64 that column; None: column 0 in all lanes.
    """

    first: Tensor | None = None
    of_slots: ClassVar[tuple[str, ...]] = ("first",)

    def _changes_like(self, other: Self) -> bool:
        return (self.first is None) == (other.first is None) and super()._changes_like(other)

    def _moved_with(self, others: Sequence[Self], lane: Tensor, slot: Tensor, inner: Segment) -> Self:
        found = [each.first for each in (self, *others) if each.first is not None]
        return replace(self._around(inner), first=torch.cat(found)[lane[:, 0]] if found else None)

    def _of_lanes(self, lanes: Tensor, inner: Segment) -> Self:
        first = None if self.first is None else self.first[lanes.to(self.first.device)]
        return replace(self._around(inner), first=first)

    def _stacked(self, parts: Sequence[Self], order: Tensor, inner: Segment) -> Self:
        if self.first is None:
            return self._around(inner)
        first = torch.cat([each.first for each in parts if each.first is not None])
        return replace(self._around(inner), first=first[order.to(first.device)])

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        moved = super().regather(lane, slot, layout)
        return replace(moved, first=None if self.first is None else self.first[lane[:, 0]])

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors() | self._own()

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes() + (0 if self.first is None else 8 * self.layout.lanes)

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        return fields, tensors | self._own()

    def _own(self) -> dict[str, Tensor]:
        return {} if self.first is None else {"first": self.first}


def first_of_lanes(layout: Layout, first: Tensor | None, device: torch.device) -> Tensor | None:
    """Return (m,) int64 of `Codec.encode`'s (b,); None where there is none."""
    if first is None:
        return None
    return first.to(device)[torch.div(layout.owners(device), layout.heads, rounding_mode="floor")]


def positions_of(layout: Layout, first: Tensor | None, device: torch.device) -> Tensor:
    """Return (m, s) int64 positions of the slots, or (1, s) where all lanes have the same.

    Args:
        layout: of the lanes.
        first: (m,) column from which each lane's count; None: column 0.
        device: on which.
    """
    columns = layout.columns(device)
    return columns if first is None else columns - first.to(device)[:, None]
