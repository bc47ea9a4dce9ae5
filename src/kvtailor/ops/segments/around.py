"""Segments that hold another one and change what it decodes to, or how much its tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvtailor.ops.lanes.joined import side_by_side
from kvtailor.ops.segments.attention_inputs import Offsetting, Turning
from kvtailor.ops.segments.coded import places_in_all
from kvtailor.types import Coordinates, Layout, Lift, Segment, SegmentView

__all__ = [
    "AroundSegment",
    "PositionedSegment",
    "first_of_lanes",
    "positions_of",
    "Weighted",
    "log_weight_of",
    "without_weight",
]


@dataclass(frozen=True, kw_only=True)
class AroundSegment(Segment):
    """What a codec around another one gives; a subclass defines how its states are changed back.

    Attributes:
        layout: the inner segment's.
        inner: what is stored.
        of_slots: names of the fields that have a part for each lane, or each slot.
    """

    of_slots: ClassVar[tuple[str, ...]] = ()
    layout: Layout
    inner: Segment

    @property
    def sharing(self) -> int:
        return self.inner.sharing

    def keys_back(self, keys: Tensor) -> Tensor:
        """What keys (m, s, d) of the inner segment were before they were changed."""
        return keys

    def values_back(self, values: Tensor) -> Tensor:
        """The same for values (..., dv); linear, and each by itself."""
        return values

    def coordinates(self, key_size: int, value_size: int) -> tuple[Coordinates | None, Coordinates | None] | None:
        """In which coordinates the inner segment's keys and values are; None for a side that is the model's.

        None for both where no linear map, the same for all tokens, leads back.

        Args:
            key_size, value_size: channels that the inner segment decodes to.
        """
        return None

    def turning(self) -> Turning | None:
        """By how much the inner segment's keys are turned, where that is all that leads back; None: it is not."""
        return None

    def offsetting(self) -> Offsetting | None:
        """What the inner segment's keys lack, where that is a constant of each head; None: it is not."""
        return None

    def decode(self) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.decode()
        return self.keys_back(keys), self.values_back(values)

    def view(self) -> SegmentView:
        read = self.inner.view()
        keys, lift = self.keys_back(read.keys), read.lift
        if lift is None:
            return replace(read, keys=keys, values=self.values_back(read.values))
        offset = None if lift.offset is None else self.values_back(lift.offset)
        return replace(read, keys=keys, lift=Lift(matrix=self.values_back(lift.matrix), offset=offset))

    def relaid(self, layout: Layout) -> Self:
        return replace(self, layout=layout, inner=self.inner.relaid(layout))

    def rows(self, index: Tensor) -> Self:
        return self._of_lanes(self.layout.lanes_of_rows(index)[0], self.inner.rows(index))

    def of_heads(self, first: int, count: int) -> Segment:
        return self._of_lanes(self.layout.lanes_of_heads(first, count)[0], self.inner.of_heads(first, count))

    def beside(self, others: Sequence[Segment]) -> Segment | None:
        parts = [self, *(each for each in others if isinstance(each, type(self)))]
        inner = self.inner.beside([each.inner for each in parts[1:]])
        if inner is None:
            return None
        return self._stacked(parts, side_by_side([each.layout for each in parts])[1], inner)

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        return self._around(self.inner.regather(lane, slot, layout))

    def regather_with(self, others: Sequence[Segment], lane: Tensor, slot: Tensor, layout: Layout) -> Self | None:
        """See `Segment.regather_with`."""
        parts = [each for each in others if isinstance(each, type(self)) and self._changes_like(each)]
        if len(parts) < len(others):
            return None
        inner = self.inner.regather_with([each.inner for each in parts], lane, slot, layout)
        return None if inner is None else self._moved_with(parts, lane, slot, inner)

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors()

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        return self.inner.state()

    def _around(self, inner: Segment) -> Self:
        return replace(self, layout=inner.layout, inner=inner)

    def _changes_like(self, other: Self) -> bool:
        """Whether another segment's states were changed as these, so that the two can be one around one."""
        alone = {"layout", "inner", *self.of_slots}
        for name in (field.name for field in fields(self) if field.name not in alone):
            mine, its = getattr(self, name), getattr(other, name)
            if mine is not its and (isinstance(mine, Tensor) or mine != its):
                return False
        return True

    def _moved_with(self, others: Sequence[Self], lane: Tensor, slot: Tensor, inner: Segment) -> Self:
        """The same around a segment of tokens of this one and of `others`; see `Segment.regather_with`."""
        return self._around(inner)

    def _of_lanes(self, lanes: Tensor, inner: Segment) -> Self:
        """The same around another inner segment, which has these lanes (m',) of this one's."""
        return self._around(inner)

    def _stacked(self, parts: Sequence[Self], order: Tensor, inner: Segment) -> Self:
        """The same around a segment of the lanes of `parts`, one behind the other, in the order (m',)."""
        return self._around(inner)


@dataclass(frozen=True, kw_only=True)
class PositionedSegment(AroundSegment):
    """What knows from which column each lane's positions count.

    Attributes:
        first: (m,) int64 that column, or (m, s) int32 that of each slot; None: column 0 in all lanes.
    """

    first: Tensor | None = None
    of_slots: ClassVar[tuple[str, ...]] = ("first",)

    def _changes_like(self, other: Self) -> bool:
        mine, its = (0 if each.first is None else each.first.ndim for each in (self, other))
        return (mine == its or 2 in (mine, its)) and super()._changes_like(other)

    def _moved_with(self, others: Sequence[Self], lane: Tensor, slot: Tensor, inner: Segment) -> Self:
        parts = [self, *others]
        found = [each.first for each in parts if each.first is not None]
        if not found:
            return self._around(inner)
        if all(each.ndim == 1 for each in found):
            return replace(self._around(inner), first=torch.cat(found)[lane[:, 0]])
        at = places_in_all([each.layout for each in parts], lane, slot)
        return replace(self._around(inner), first=torch.cat([each._by_slot(lane.device) for each in parts])[at])

    def _by_slot(self, device: torch.device) -> Tensor:
        """(m * s,) int32 `first` of each slot."""
        own = torch.zeros(1, dtype=torch.int32) if self.first is None else self.first
        own = own if own.ndim == 2 else own[:, None]
        return own.to(device, torch.int32).expand(self.layout.lanes, self.layout.size).flatten()

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
        if self.first is None:
            return moved
        return replace(moved, first=self.first[lane[:, 0]] if self.first.ndim == 1 else self.first[lane, slot])

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors() | self._own()

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes() + (
            0 if self.first is None else self.first.element_size() * self.first.numel()
        )

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        return fields, tensors | self._own()

    def _own(self) -> dict[str, Tensor]:
        return {} if self.first is None else {"first": self.first}


def first_of_lanes(layout: Layout, first: Tensor | None, device: torch.device) -> Tensor | None:
    """Return (m,) int64 of `Codec.encode`'s (b,), (m, s) int32 of its (b, columns); None where there is none."""
    if first is None:
        return None
    row = torch.div(layout.owners(device), layout.heads, rounding_mode="floor")
    if first.ndim == 1:
        return first.to(device)[row]
    return first.to(device, torch.int32)[row[:, None], layout.columns(device).clamp(min=0)]


def positions_of(layout: Layout, first: Tensor | None, device: torch.device) -> Tensor:
    """Return (m, s) int64 positions of the slots, or (1, s) where all lanes have the same.

    Args:
        layout: of the lanes.
        first: (m,) column from which each lane's count, or (m, s) each slot's; None: column 0.
        device: on which.
    """
    columns = layout.columns(device)
    if first is None:
        return columns
    return columns - (first.to(device) if first.ndim == 2 else first.to(device)[:, None])


@dataclass(frozen=True, kw_only=True)
class Weighted(AroundSegment):
    """Tokens in any encoding, and a weight for each.

    Attributes:
        log_weight: (m, s) float32 logarithm of how many tokens each stands for in the softmax.
    """

    log_weight: Tensor
    codec = "weighted"
    of_slots: ClassVar[tuple[str, ...]] = ("log_weight",)

    def view(self) -> SegmentView:
        return replace(self.inner.view(), log_weight=self.log_weight)

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        return self._weighing(self.inner.regather(lane, slot, layout), self.log_weight[lane, slot])

    def tensors(self) -> dict[str, Tensor]:
        return {**self.inner.tensors(), "log_weight": self.log_weight}

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes() + 4 * self.layout.lanes * self.layout.size

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        fields, tensors = self.inner.state()
        named = {f"inner.{name}": tensor for name, tensor in tensors.items()}
        return {"codec": self.inner.codec, "fields": fields}, {**named, "log_weight": self.log_weight}

    def _of_lanes(self, lanes: Tensor, inner: Segment) -> Self:
        return self._weighing(inner, self.log_weight[lanes.to(self.log_weight.device)])

    def _stacked(self, parts: Sequence[Self], order: Tensor, inner: Segment) -> Self:
        weights = torch.cat([each.log_weight for each in parts])
        return self._weighing(inner, weights[order.to(weights.device)])

    def _moved_with(self, others: Sequence[Self], lane: Tensor, slot: Tensor, inner: Segment) -> Self:
        parts = [self, *others]
        at = places_in_all([each.layout for each in parts], lane, slot)
        return self._weighing(inner, torch.cat([each.log_weight.flatten() for each in parts])[at])

    def _weighing(self, inner: Segment, log_weight: Tensor) -> Self:
        return replace(self, layout=inner.layout, inner=inner, log_weight=log_weight)


def without_weight(segment: Segment) -> Segment:
    """What is stored, in its own encoding."""
    return segment.inner if isinstance(segment, Weighted) else segment


def log_weight_of(segment: Segment) -> Tensor | None:
    """(m, s) float32; None where each token stands for itself."""
    return segment.log_weight if isinstance(segment, Weighted) else None
