"""One side of a segment, its keys or its values, in one encoding; and the segment that two sides make.

A codec decides how each side is encoded; what a segment has to do besides (rows, moves, bytes, saving) is done here,
once for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.types import Coordinates, Layout, Segment

__all__ = ["Coded", "PairSegment", "TimeGrouped", "Whole", "alone", "layout_of", "places_in_all", "under"]


@dataclass(frozen=True, kw_only=True)
class Coded(ABC):
    """States (m, s, c) of some lanes in one encoding. Immutable.

    A subclass is a frozen dataclass whose fields are tensors, None, and numbers for JSON.

    Attributes:
        of_tokens: names of the tensors (m, s, ...), of which each token has its own part; one
            that is None is left out.
        dtypes: by name, the dtypes that a tensor may have where it is neither of the cache's dtype nor, of whole
            numbers, uint8.
    """

    of_tokens: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {}

    @abstractmethod
    def decode(self) -> Tensor:
        """(m, s, c) in the cache's dtype; finite."""

    @abstractmethod
    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        """The bytes that `tensors()` must occupy, from counts and element sizes alone."""

    @cached_property
    def code_layout(self) -> CodeLayout | None:
        """How codes lie in memory, for what reads them as they are; None: they are decoded to be read."""
        return None

    def coordinates(self) -> Coordinates | None:
        """In which coordinates `stored` is; None: in the model's."""
        return None

    def check(self) -> None:  # noqa: B027
        """Raise where a number in it, which may come from a file, leads out of what it is a place in.

        Raises:
            ValueError: a clause without a full stop.
        """

    def as_read(self) -> Coded:
        """The side in these coordinates, as kernels know it: plain numbers where it has no codes."""
        return self

    def stored(self) -> Tensor:
        """(m, s, r) in the cache's dtype: the numbers that the codes stand for, in the coordinates of this side."""
        return self.decode()

    def rows(self, lanes: Tensor) -> Self:
        """The same for these lanes (m',) int64, in that order."""
        return replace(self, **{name: tensor[lanes] for name, tensor in self._of_tokens().items()})

    def regather(self, lane: Tensor, slot: Tensor) -> Self:
        """The tokens at these lanes and slots, (m', s') int64 each, moved but not encoded again."""
        at = lane, slot
        return replace(self, **{name: huge_pages.picked(tensor, at) for name, tensor in self._of_tokens().items()})

    def regather_with(self, others: Sequence[Coded], at: Tensor) -> Self | None:
        """The tokens at these places, (m', s') int64, of this side and of `others`, moved but not encoded again.

        None where they cannot be stored in one. Places count slots lane by lane, one side behind the other.
        """
        if self.tensors().keys() - {*self.of_tokens} or not all(map(self._stores_like, others)):
            return None
        return replace(self, **self._of_all(others, at))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this side keeps alive, by name."""
        return {name: value for name, value in self._named().items() if isinstance(value, Tensor)}

    def numbers(self) -> dict[str, Any]:
        """What else there is, by name, JSON-able."""
        return {name: value for name, value in self._named().items() if not isinstance(value, Tensor | None)}

    def _of_tokens(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in self.of_tokens}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _stores_like(self, other: Coded) -> bool:
        """Whether another side's codes mean what they mean here."""
        alike = type(other) is type(self) and other.numbers() == self.numbers()
        return alike and other._of_tokens().keys() == self._of_tokens().keys()

    def _of_all(self, others: Sequence[Coded], at: Tensor) -> dict[str, Any]:
        """What each token has of its own, of the tokens at these places of this side and of `others`."""
        flat = {
            name: torch.cat([getattr(each, name).flatten(0, 1) for each in (self, *others)])[None]
            for name in self._of_tokens()
        }
        whole = at.new_zeros(1, 1)
        return {name: huge_pages.picked(tensor, (whole, at)) for name, tensor in flat.items()}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: the fields, of which the rest is made again."""
        return self._named()

    def _named(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Whole(Coded):
    """States (m, s, c) as the model made them."""

    states: Tensor
    of_tokens = ("states",)

    @cached_property
    def code_layout(self) -> CodeLayout:
        states = self.states
        return CodeLayout(kind=CodeKind.WHOLE, codes=states, size=states.shape[-1], dtype=states.dtype)

    def decode(self) -> Tensor:
        return self.states

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return lanes * slots * self.states.shape[-1] * self.states.element_size()


@dataclass(frozen=True, kw_only=True)
class TimeGrouped(Coded):
    """States of which runs of tokens share tables, such as scales.

    Attributes:
        shared: names of the tables (m, ceil(s / group), ...); with `row` (rows, ...).
        group: tokens of a run; the last of a lane may have fewer.
        row: (m, s) int32 row of the tables that each token uses, once tokens have moved; None while slot i is in group
            i // group.
    """

    shared: ClassVar[tuple[str, ...]]
    dtypes = {"row": (torch.int32,)}
    group: int
    row: Tensor | None = None

    def rows(self, lanes: Tensor) -> Self:
        picked = super().rows(lanes)
        if self.row is not None:
            return replace(picked, **_used(self.row[lanes], self._tables()))
        return replace(picked, **{name: getattr(self, name)[lanes] for name in self.shared})

    def regather(self, lane: Tensor, slot: Tensor) -> Self:
        row = self._rows_at(lane, slot)
        return replace(super().regather(lane, slot), **_used(row, self._tables()))

    def regather_with(self, others: Sequence[Coded], at: Tensor) -> Self | None:
        """See `Coded.regather_with`."""
        of_tokens = {*self.of_tokens, *self.shared, "row"}
        if self.tensors().keys() - of_tokens or not all(map(self._stores_like, others)):
            return None
        parts: list[Self] = [self, *others]  # type: ignore[list-item]
        tables = [part._tables() for part in parts]
        before, rows = 0, []
        for part, own in zip(parts, tables, strict=True):
            lanes, slots = getattr(part, self.of_tokens[0]).shape[:2]
            lane, slot = torch.arange(lanes, device=at.device)[:, None], torch.arange(slots, device=at.device)
            rows.append((part._rows_at(*torch.broadcast_tensors(lane, slot)) + before).flatten())
            before += next(iter(own.values())).shape[0]
        joined = {name: torch.cat([each[name] for each in tables]) for name in self.shared}
        return replace(self, **self._of_all(others, at), **_used(torch.cat(rows)[at], joined))

    def per_token(self, name: str) -> Tensor:
        """What each token uses of a table, (m, s or more, ...): slots past the last are to be cut off."""
        table: Tensor = getattr(self, name)
        if self.row is not None:
            return table[self.row.to(torch.int64)]
        return table.repeat_interleave(self.group, 1)

    def groups(self, lanes: int, slots: int) -> int:
        """How many rows each table has, over all lanes."""
        return lanes * -(-slots // self.group) if self.row is None else int(self.row.max()) + 1

    def index_bytes(self, lanes: int, slots: int) -> int:
        """Bytes of `row`."""
        return 0 if self.row is None else 4 * lanes * slots

    def _tables(self) -> dict[str, Tensor]:
        """The tables as (rows, ...), by name."""
        start = 0 if self.row is not None else 1
        return {name: getattr(self, name).flatten(0, start) for name in self.shared}

    def _rows_at(self, lane: Tensor, slot: Tensor) -> Tensor:
        """The row of `_tables` that each token uses, of tokens at these lanes and slots, (m', s') int64 each."""
        if self.row is not None:
            return self.row[lane, slot]
        table: Tensor = getattr(self, self.shared[0])
        return lane * table.shape[1] + torch.div(slot, self.group, rounding_mode="floor")


@dataclass(frozen=True, kw_only=True)
class PairSegment(Segment):
    """Keys in one encoding and values in one.

    Attributes:
        layout: which tokens these are.
        keys, values: the two sides.
        kinds: the encodings that a side can have.
    """

    kinds: ClassVar[tuple[type[Coded], ...]] = ()
    layout: Layout
    keys: Coded
    values: Coded

    def decode(self) -> tuple[Tensor, Tensor]:
        return self.keys.decode(), self.values.decode()

    def rows(self, index: Tensor) -> Self:
        lanes, layout = self.layout.lanes_of_rows(index)
        lanes = lanes.to(next(iter(self.keys.tensors().values())).device)
        return replace(self, layout=layout, keys=self.keys.rows(lanes), values=self.values.rows(lanes))

    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Self:
        keys, values = self.keys.regather(lane, slot), self.values.regather(lane, slot)
        return replace(self, layout=layout, keys=keys, values=values)

    def regather_with(self, others: Sequence[Segment], lane: Tensor, slot: Tensor, layout: Layout) -> Self | None:
        """See `Segment.regather_with`."""
        pairs = [each for each in others if isinstance(each, PairSegment) and type(each) is type(self)]
        if len(pairs) < len(others):
            return None
        at = places_in_all([self.layout, *(each.layout for each in others)], lane, slot)
        keys = self.keys.regather_with([each.keys for each in pairs], at)
        values = None if keys is None else self.values.regather_with([each.values for each in pairs], at)
        return None if keys is None or values is None else replace(self, layout=layout, keys=keys, values=values)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.state()[1], **self.layout.tensors()}

    def closed_form_bytes(self) -> int:
        sides = sum(each.closed_form_bytes(self.layout.lanes, self.layout.size) for each in (self.keys, self.values))
        return sides + self.layout.closed_form_bytes()

    def state(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        numbers: dict[str, object] = {}
        tensors: dict[str, Tensor] = {}
        for name, side in (("keys", self.keys), ("values", self.values)):
            numbers |= {name: type(side).__name__, **{f"{name}.{key}": each for key, each in side.numbers().items()}}
            tensors |= {f"{name}.{key}": each for key, each in side.tensors().items()}
        return numbers, tensors

    @classmethod
    def from_state(
        cls,
        layout: Layout,
        fields: Mapping[str, object],
        tensors: Mapping[str, Tensor],
        *,
        kinds: Sequence[type[Coded]] | None = None,
    ) -> Self:
        """Return the segment that `state` described.

        Args:
            layout: which tokens these are.
            fields, tensors: what `state` gave.
            kinds: the encodings that a side can have, where they depend on the codec's arguments; None: the class's.

        Raises:
            LookupError: a side is of another encoding.
        """
        known = {kind.__name__: kind for kind in (cls.kinds if kinds is None else kinds)}
        sides = {}
        for name in ("keys", "values"):
            given: dict[str, Any] = {**under(f"{name}.", fields), **under(f"{name}.", tensors)}
            sides[name] = known[str(fields[name])](**given)
        return cls(layout=layout, **sides)


def layout_of(side: Coded) -> CodeLayout:
    """How codes lie in memory, of a side that is read as it is stored.

    Raises:
        TypeError: it is decoded to be read.
    """
    if side.code_layout is None:
        raise TypeError(f"no kernel reads {type(side).__name__}")
    return side.code_layout


def places_in_all(layouts: Sequence[Layout], lane: Tensor, slot: Tensor) -> Tensor:
    """Where slots lie among all of these layouts, lane by lane, one layout behind the other; see `regather_with`."""
    sizes = [layout.size for layout in layouts]
    if len({*sizes}) == 1:
        return lane * sizes[0] + slot
    # (lanes of all,) the slots in front of each lane.
    widths = torch.repeat_interleave(torch.tensor(sizes), torch.tensor([layout.lanes for layout in layouts]))
    return (widths.cumsum(0) - widths).to(lane.device)[lane] + slot


def _used(row: Tensor, tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """The rows of the tables that tokens of these rows use, and for each token its row among them."""
    used, place = torch.unique(row, return_inverse=True)
    used = used.to(torch.int64)
    return {**{name: table[used] for name, table in tables.items()}, "row": place.view_as(row).to(torch.int32)}


def under(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): each for name, each in named.items() if name.startswith(prefix)}


def alone(states: Tensor) -> Tensor:
    """The states in a storage of their own size, so that no buffer they were cut from stays alive."""
    own = states.is_contiguous() and states.untyped_storage().nbytes() == states.numel() * states.element_size()
    return states if own else huge_pages.copied(states)
