"""Lanes: which token sits in which slot.

A *lane* is a run of `s` slots that belong to one (row, kv head). A uniform cache is `m = b * h` lanes, one for each
(row, head), in that order. A ragged cache, in which each (row, head) holds its own number of tokens, is cut into lanes
of equal size (pages), and `owner` has the `row * h + head` that each lane belongs to. Everything that is stored,
encoded and attended is lanes, so no stage depends on whether a cache is ragged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which token sits in which slot.

    Attributes:
        rows: b, batch rows.
        heads: h, kv heads.
        size: s, slots of each lane.
        start: column of slot 0 where every lane holds the columns start, start + 1, ...; None where `positions` has the
            columns.
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
    # Tokens of each owner, once the host knows them. Another layout that is made of this one does not take them over.
    _counts: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _run: int | None = field(default=None, init=False, repr=False, compare=False)

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
        if self._counts is not None:
            return torch.tensor(self._counts, dtype=torch.int64).view(self.rows, self.heads)
        each = torch.full((self.lanes,), self.size) if self.lengths is None else self.lengths.cpu().to(torch.int64)
        total = torch.zeros(self.rows * self.heads, dtype=torch.int64)
        return self.counted(total.index_add_(0, self.owners(torch.device("cpu")), each)).counts()

    def counted(self, counts: Tensor) -> Layout:
        """Return this layout, which knows from now on that its owners hold `counts` (b * h,) int64 on the CPU.

        Of lanes on another device the host would else have to wait for them.
        """
        # Of a frozen value only what follows from its other parts is set.
        object.__setattr__(self, "_counts", tuple(counts.flatten().tolist()))
        return self

    @property
    def run(self) -> int | None:
        """So many of the last slots of each lane are known to be at consecutive columns, there may be more.

        They end with the last column seen. None: the host does not know.
        """
        return self._run

    def ending_in(self, run: int | None) -> Layout:
        """Return this layout, which has this `run` from now on."""
        object.__setattr__(self, "_run", run)
        return self

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

    def heads_as_rows(self) -> Layout:
        """Return the same lanes as those of b * h rows with one head each: their owners keep their numbers."""
        return replace(self, rows=self.rows * self.heads, heads=1)

    def rows_of_heads(self, first: int, count: int) -> Tensor:
        """(b * count,) int64 on the CPU: the rows of `heads_as_rows` that are the heads from `first` on, in order."""
        row, head = torch.arange(self.rows)[:, None], torch.arange(first, first + count)
        return (row * self.heads + head).flatten()

    def lanes_of_heads(self, first: int, count: int) -> tuple[Tensor, Layout]:
        """The lanes, and the layout, of the heads from `first` on, so many of them, of all rows."""
        lanes, part = self.heads_as_rows().lanes_of_rows(self.rows_of_heads(first, count))
        return lanes, replace(part, rows=self.rows, heads=count)

    def owners_among(self, heads: int, first: int, device: torch.device) -> Tensor:
        """(m,) int64 owners of the lanes where the layout's heads are those from `first` on of `heads` in all."""
        owner = self.owners(device)
        return torch.div(owner, self.heads, rounding_mode="floor") * heads + first + owner % self.heads

    def among(self, heads: int, first: int, device: torch.device) -> Layout:
        """Return the same lanes where the layout's heads are those from `first` on of `heads` in all.

        Args:
            heads: of each row from now on; those of which there are no lanes hold nothing here.
            first: number of the layout's first head among them.
            device: of the owners.
        """
        if heads == self.heads:
            return self
        return replace(self, heads=heads, owner=self.owners_among(heads, first, device))

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
