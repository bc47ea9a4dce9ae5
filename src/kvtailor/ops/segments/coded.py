"""One side of a segment, its keys or its values, in one encoding; and the segment that two sides make.

A codec decides how each side is encoded; what a segment has to do besides (rows, moves, bytes, saving) is done here,
once for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.types import Coordinates, Layout, Segment

__all__ = ["Coded", "PairSegment", "TimeGrouped", "Whole", "alone", "under"]


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

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this side keeps alive, by name."""
        return {name: value for name, value in self._named().items() if isinstance(value, Tensor)}

    def numbers(self) -> dict[str, Any]:
        """What else there is, by name, JSON-able."""
        return {name: value for name, value in self._named().items() if not isinstance(value, Tensor | None)}

    def _of_tokens(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in self.of_tokens}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _named(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Whole(Coded):
    """States (m, s, c) as the model made them."""

    states: Tensor
    of_tokens = ("states",)

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
            return replace(picked, **self._used(self.row[lanes]))
        return replace(picked, **{name: getattr(self, name)[lanes] for name in self.shared})

    def regather(self, lane: Tensor, slot: Tensor) -> Self:
        if self.row is not None:
            row = self.row[lane, slot]
        else:
            groups = getattr(self, self.shared[0]).shape[1]
            row = lane * groups + torch.div(slot, self.group, rounding_mode="floor")
        return replace(super().regather(lane, slot), **self._used(row))

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

    def _used(self, row: Tensor) -> dict[str, Any]:
        """The rows of the tables that tokens of these rows use, and for each token its row among them."""
        used, place = torch.unique(row, return_inverse=True)
        used, start = used.to(torch.int64), 0 if self.row is not None else 1
        tables = {name: getattr(self, name).flatten(0, start)[used] for name in self.shared}
        return {**tables, "row": place.view_as(row).to(torch.int32)}


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


def under(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): each for name, each in named.items() if name.startswith(prefix)}


def alone(states: Tensor) -> Tensor:
    """The states in a storage of their own size, so that no buffer they were cut from stays alive."""
    own = states.is_contiguous() and states.untyped_storage().nbytes() == states.numel() * states.element_size()
    return states if own else huge_pages.copied(states)
