"""The words that every room shares: shapes, lanes, segments, and what a query may see.

Shape letters, used everywhere and nowhere else:
`b` batch rows, `l` layers, `q` query heads, `h` kv heads, `g = q / h`, `t` new tokens, `n` held tokens,
`k` kept tokens, `d` head size, `m` lanes, `s` slots of a lane.

A *lane* is a run of `s` slots that belong to one (row, kv head). A uniform cache is `m = b * h` lanes, one for each
(row, head), in that order. A ragged cache, in which each (row, head) holds its own number of tokens, is cut into
lanes of equal size (pages), and `owner` says to which `row * h + head` each lane belongs. Everything that is stored,
encoded and attended is lanes, so no room knows whether a cache is ragged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvtailor.held import Held, Moments, Needs, Repetition, Rotation
from kvtailor.reading import Lift, Reading

__all__ = [
    "Held",
    "Layout",
    "Lift",
    "Moments",
    "Needs",
    "PlainSegment",
    "Reading",
    "Repetition",
    "Rotation",
    "Segment",
    "Visibility",
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which token sits in which slot.

    Attributes:
        rows: b, batch rows.
        heads: h, kv heads.
        size: s, slots of each lane.
        start: column of slot 0 where every lane holds the columns start, start + 1, ...; None where `positions` says.
        positions: (m, s) int32 column of each slot, counted from 0 with padding included; None with `start`.
            Columns grow along a lane, and along the lanes of one owner.
        owner: (m,) int64 row * heads + head of each lane, ascending; None where lane i belongs to owner i.
        lengths: (m,) int32 filled slots of each lane, the rest is filler; None where all are filled.
    """

    rows: int
    heads: int
    size: int
    start: int | None = None
    positions: Tensor | None = None
    owner: Tensor | None = None
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.start is None) == (self.positions is None):
            raise ValueError("a layout has either a start column or a position for each slot, and exactly one of them")

    @property
    def lanes(self) -> int:
        """m, the number of lanes."""
        return self.rows * self.heads if self.owner is None else int(self.owner.shape[0])

    def columns(self, device: torch.device) -> Tensor:
        """(m, s) int64 column of each slot; (1, s) where all lanes hold the same columns."""
        if self.positions is not None:
            return self.positions.to(device=device, dtype=torch.int64)
        assert self.start is not None
        return torch.arange(self.start, self.start + self.size, device=device)[None]

    def owners(self, device: torch.device) -> Tensor:
        """(m,) int64 row * heads + head of each lane."""
        if self.owner is None:
            return torch.arange(self.rows * self.heads, device=device)
        return self.owner.to(device)

    def filled(self, device: torch.device) -> Tensor | None:
        """(m, s) bool: a token sits in this slot; None where every slot is filled."""
        if self.lengths is None:
            return None
        return torch.arange(self.size, device=device)[None] < self.lengths.to(device)[:, None]

    def counts(self) -> Tensor:
        """(b, h) int64 on the CPU: tokens held by each row and kv head."""
        if self.owner is None and self.lengths is None:
            return torch.full((self.rows, self.heads), self.size, dtype=torch.int64)
        each = torch.full((self.lanes,), self.size) if self.lengths is None else self.lengths.cpu().to(torch.int64)
        total = torch.zeros(self.rows * self.heads, dtype=torch.int64)
        return total.index_add_(0, self.owners(torch.device("cpu")), each).view(self.rows, self.heads)

    def lanes_of_rows(self, index: Tensor) -> tuple[Tensor, Layout]:
        """The lanes, and the layout, of a batch made of the rows `index` (k,) of this one, in that order."""
        if self.owner is None:
            lanes = (index[:, None] * self.heads + torch.arange(self.heads, device=index.device)).flatten()
            owner = None
        else:
            row_of = torch.div(self.owner, self.heads, rounding_mode="floor").to(index.device)
            picked = [torch.nonzero(row_of == row).flatten() for row in index.tolist()]
            lanes = torch.cat(picked) if picked else index.new_empty(0)
            head_of = (self.owner % self.heads).to(index.device)[lanes]
            new_row = torch.repeat_interleave(
                torch.arange(len(picked), device=index.device),
                torch.tensor([p.shape[0] for p in picked], device=index.device),
            )
            owner = new_row * self.heads + head_of
        take = lambda x: None if x is None else x.index_select(0, lanes.to(x.device))  # noqa: E731
        layout = replace(
            self,
            rows=int(index.shape[0]),
            owner=owner,
            positions=take(self.positions),
            lengths=take(self.lengths),
        )
        return lanes, layout

    def tensors(self) -> dict[str, Tensor]:
        """What the layout itself costs in memory, by name."""
        named = {"positions": self.positions, "owner": self.owner, "lengths": self.lengths}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def closed_form_bytes(self) -> int:
        """Bytes of the layout's own tensors, from the numbers of lanes and slots alone."""
        slots = 4 * self.lanes * self.size if self.positions is not None else 0
        return (
            slots
            + (8 * self.lanes if self.owner is not None else 0)
            + (4 * self.lanes if self.lengths is not None else 0)
        )


class Segment(ABC):
    """Keys and values of some lanes in one encoding. Immutable: new tokens make new segments.

    A codec's segment is a frozen dataclass with a `layout` field. Its name in a saved cache is `codec`.
    """

    layout: Layout
    codec: str

    @abstractmethod
    def decode(self) -> tuple[Tensor, Tensor]:
        """Keys (m, s, d) and values (m, s, dv) in the cache's dtype. Filler slots hold finite numbers."""

    def reading(self) -> Reading:
        """What attention reads: the same keys, and values that say the same once they are lifted."""
        keys, values = self.decode()
        return Reading(keys=keys, values=values)

    @abstractmethod
    def rows(self, index: Tensor) -> Segment:
        """The same segment for a batch made of rows `index` (k,) int64 (beam search, repeated or chosen rows)."""

    @abstractmethod
    def regather(self, lane: Tensor, slot: Tensor, layout: Layout) -> Segment:
        """A segment of some of this one's tokens, moved but never encoded again.

        Args:
            lane: (m', s') int64 lane of this segment from which each new slot is filled.
            slot: (m', s') int64 slot of that lane. Filler slots of `layout` repeat some filled one.
            layout: the new layout, m' lanes of s' slots.
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


class Visibility(Protocol):
    """What the new tokens of one forward may see, evaluated lazily at stored columns.

    Attributes:
        new_tokens: t, queries of this forward.
        first_column: column of the first of them.
        causal_only: nothing but causality restricts them (no padding, no custom mask).
        real: (b, first_column + new_tokens) bool: this column is a token and not padding; None where all are.
    """

    @property
    def new_tokens(self) -> int: ...

    @property
    def first_column(self) -> int: ...

    @property
    def causal_only(self) -> bool: ...

    @property
    def real(self) -> Tensor | None: ...

    def without_last(self, count: int) -> Visibility:
        """The same without the last `count` new tokens (rejected drafts)."""
        ...

    def without_first(self, count: int) -> Visibility:
        """The same without the first `count` new tokens (a prompt that a draft follows)."""
        ...

    def with_earlier(self, count: int) -> Visibility:
        """The same with the `count` tokens before the new ones among them (forwards that are judged together)."""
        ...

    def at(self, rows: Tensor, columns: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Whether queries first..last of this forward see the given columns.

        Args:
            rows: (m,) int64 batch row of each lane.
            columns: (m, s) int64 columns, or (1, s) where all lanes hold the same.
            first, last: a slice of the t queries.

        Returns:
            (m, t', s) bool, broadcastable: any of its sizes may be 1.
        """
        ...
