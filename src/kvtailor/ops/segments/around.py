"""A segment that holds another one and changes what it decodes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from torch import Tensor

from kvtailor.ops.lanes.joined import side_by_side
from kvtailor.ops.segments.turned import Offsetting, Turning
from kvtailor.types import Coordinates, Layout, Lift, Segment, SegmentView

__all__ = ["AroundSegment"]


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
