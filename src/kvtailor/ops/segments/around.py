"""A segment that holds another one and changes what it decodes to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from kvtailor.types import Layout, Lift, Segment, SegmentView

__all__ = ["AroundSegment"]


@dataclass(frozen=True, kw_only=True)
class AroundSegment(Segment):
    """What a codec around another one gives; a subclass defines how its states are changed back.

    Attributes:
        layout: the inner segment's.
        inner: what is stored.
    """

    layout: Layout
    inner: Segment

    def keys_back(self, keys: Tensor) -> Tensor:
        """What keys (m, s, d) of the inner segment were before they were changed."""
        return keys

    def values_back(self, values: Tensor) -> Tensor:
        """The same for values (..., dv); linear, and each by itself."""
        return values

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

    def rows(self, index: Tensor) -> Self:
        return self._around(self.inner.rows(index))

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        return self._around(self.inner.regather(lane, slot, layout))

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors()

    def closed_form_bytes(self) -> int:
        return self.inner.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        return self.inner.state()

    def _around(self, inner: Segment) -> Self:
        return replace(self, layout=inner.layout, inner=inner)
