"""Segments: keys and values of some lanes in one encoding. They are immutable: new tokens make new segments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.types.lanes import Layout
from kvtailor.types.segment_view import SegmentView

__all__ = ["PlainSegment", "Segment"]


class Segment(ABC):
    """Keys and values of some lanes in one encoding. Immutable: new tokens make new segments.

    A codec's segment is a frozen dataclass with a `layout` field. Its name in a saved cache is `codec`. Where its
    fields `keys` and `values` are what `decode` gives, `plain` is True, and attention reads them as they are.
    """

    layout: Layout
    codec: str
    plain: ClassVar[bool] = False

    @property
    def sharing(self) -> int:
        """How many neighbouring kv heads of the model share what is stored here; 1: each has its own."""
        return 1

    @abstractmethod
    def decode(self) -> tuple[Tensor, Tensor]:
        """Keys (m, s, d) and values (m, s, dv) in the cache's dtype. Filler slots hold finite numbers."""

    def view(self) -> SegmentView:
        """What attention reads: the same keys, and values that are the same once they are lifted."""
        keys, values = self.decode()
        return SegmentView(keys=keys, values=values)

    @abstractmethod
    def rows(self, index: Tensor) -> Segment:
        """The same segment for a batch made of rows `index` (k,) int64 (beam search, repeated or chosen rows)."""

    def relaid(self, layout: Layout) -> Segment:
        """Return the same tokens under a layout of the same lanes and slots that gives them other owners."""
        own: Any = self
        found: Segment = replace(own, layout=layout)
        return found

    def of_heads(self, first: int, count: int) -> Segment:
        """Return the segment of the kv heads from `first` on, so many of them, of all rows."""
        layout = self.layout
        if count == layout.heads:
            return self
        # A head of a row becomes a row of one head, so that a choice of heads is a choice of rows.
        part = self.relaid(layout.heads_as_rows()).rows(layout.rows_of_heads(first, count))
        return part.relaid(replace(part.layout, rows=layout.rows, heads=count))

    def beside(self, others: Sequence[Segment]) -> Segment | None:
        """Return one segment of these heads and those of `others`, which follow them, where all of them store the same
        for heads that share it; None where each head has its own."""
        return None

    @abstractmethod
    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Segment:
        """A segment of some of this one's tokens, moved but never encoded again.

        Args:
            lane: (m', s') int64 lane of this segment from which each new slot is filled.
            slot: (m', s') int64 slot of that lane. Filler slots of `layout` repeat some filled one.
            layout: the new layout, m' lanes of s' slots.
        """

    def regather_with(self, others: Sequence[Segment], lane: Tensor, slot: Tensor, layout: Layout) -> Segment | None:
        """A segment of some tokens of this one and of `others`, moved as by `regather`.

        None where they cannot be stored in one: they are of another encoding, or have tables that only one can have.

        Args:
            others: segments of the same rows and heads.
            lane: (m', s') int64 lane from which each new slot is filled, where the lanes of this segment and of the
                others are counted one segment behind the other.
            slot, layout: see `regather`.
        """
        return None

    def check(self, dtype: torch.dtype) -> None:  # noqa: B027
        """Raise where its own tensors, which may come from a file, are not those of its layout and the cache's dtype.

        Raises:
            ValueError: a clause without a full stop.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this segment keeps alive, by name (the layout's included)."""

    @abstractmethod
    def closed_form_bytes(self) -> int:
        """The bytes that `tensors()` must occupy, from counts and element sizes alone.

        What it shares with a segment of a lower layer is counted there alone.
        """

    @abstractmethod
    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """JSON-able fields and tensors from which `Codec.restore` makes this segment again (the layout left out)."""


@dataclass(frozen=True, kw_only=True)
class PlainSegment(Segment):
    """Keys (m, s, d) and values (m, s, dv) as the model made them."""

    layout: Layout
    keys: Tensor
    values: Tensor
    codec = "plain"
    plain: ClassVar[bool] = True

    def decode(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def rows(self, index: Tensor) -> PlainSegment:
        lanes, layout = self.layout.lanes_of_rows(index)
        lanes = lanes.to(self.keys.device)
        return PlainSegment(
            layout=layout, keys=self.keys.index_select(0, lanes), values=self.values.index_select(0, lanes)
        )

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> PlainSegment:
        return PlainSegment(layout=layout, keys=self.keys[lane, slot], values=self.values[lane, slot])

    def tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values, **self.layout.tensors()}

    def closed_form_bytes(self) -> int:
        width = self.keys.shape[-1] + self.values.shape[-1]
        return self.layout.lanes * self.layout.size * width * self.keys.element_size() + self.layout.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        return {}, {"keys": self.keys, "values": self.values}

    @classmethod
    def from_state(cls, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> PlainSegment:
        """The segment that `state()` described."""
        return cls(layout=layout, keys=tensors["keys"], values=tensors["values"])
