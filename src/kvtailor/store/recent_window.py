"""The recent window of one layer in full precision (the tail): a buffer that grows in place.

Growing by a thirty-second of what is held costs one copy of the cache every n / 32 tokens, about 64 bytes moved for
each byte appended, where concatenation at every step moves 2 n; and it leaves at most 3 % of the buffer empty. The
empty part is counted: the ledger reads storages.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.types import Layout, PlainSegment

__all__ = ["SPARE", "Tail", "capacity_for"]

SPARE = 16
"""Slots for more tokens that a tail has at least when its buffer has just been made."""


def capacity_for(tokens: int) -> int:
    """Slots of a tail buffer that has just been made to hold `tokens` more than it could."""
    return tokens + max(SPARE, tokens // 32)


class Tail:
    """Keys and values of the newest tokens, the same number for each row and kv head.

    Attributes:
        length: tokens held.
        start: column of the first of them while the columns are consecutive; None after an eviction.
        run: so many of the newest tokens are known to be at consecutive columns that end with the last one seen, in
            each row and kv head; there may be more. None: it is not known.
        anchor: so many of the first tokens are known to be at the columns from 0 on, in each row and kv head.
    """

    def __init__(self, rows: int, heads: int):
        self.rows, self.heads = rows, heads
        self.length = 0
        self.start: int | None = None
        # Views of buffers that have `_gone` slots more in front, which hold nothing any more.
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._positions: Tensor | None = None
        self._gone, self._run, self._anchor = 0, 0, 0
        self._shared = False

    _run: int | None

    @property
    def run(self) -> int | None:
        return self.length if self._positions is None else self._run

    @property
    def anchor(self) -> int:
        if self._positions is None:
            return self.length if self.start == 0 else 0
        return min(self._anchor, self.length)

    def copied(self) -> Tail:
        """Return a tail of the same buffers, of which each writes but behind its last token from now on."""
        self._shared = True
        return copy.copy(self)

    def append(self, keys: Tensor, values: Tensor, column: int, *, exactly: bool = False) -> None:
        """Add new tokens.

        Args:
            keys: (b, h, t, d). values: (b, h, t, dv).
            column: column of the first new token; the others follow.
            exactly: allocate no slots for more (the buffer is about to be compressed).
        """
        new = keys.shape[2]
        self._comes(column)
        self._reserve(self.length + new, keys, values, exactly)
        assert self._keys is not None and self._values is not None
        end = self.length + new
        shape = (self.rows, self.heads, new, -1)
        self._keys.view(self.rows, self.heads, -1, keys.shape[-1])[:, :, self.length : end].copy_(keys.view(shape))
        self._values.view(self.rows, self.heads, -1, values.shape[-1])[:, :, self.length : end].copy_(
            values.view(shape)
        )
        self._came(new, column)

    def reserve(self, tokens: int) -> None:
        """Slots for so many more than it holds, all zero: a masked slot that is read all the same must be finite."""
        if self._keys is None or self._values is None:
            raise ValueError("an empty tail has no buffer to reserve slots in; append tokens first")
        if self._keys.shape[1] < self.length + tokens or not self._writable:
            self._grow(self.length + tokens, self._keys, self._values)
        for buffer in (self._keys, self._values):
            buffer[:, self.length :].zero_()

    def make_room(self) -> None:
        """Slots for one more token than it can hold, and for those that `append` would make room for with it."""
        if self._keys is None or self._values is None:
            raise ValueError("an empty tail has no buffer to make room in; append tokens first")
        self._grow(capacity_for(self.length + 1), self._keys, self._values)

    def filled(self, tokens: int, column: int) -> None:
        """Count tokens that were written into its free slots from outside, at the columns from `column` on."""
        self._comes(column)
        self._came(tokens, column)

    def moved_on(self, first: int) -> None:
        """Count one token that was written into a free slot from outside, and its column.

        For it the oldest behind the `first` tokens is forgotten, over which these were moved from outside, too.
        """
        self.length += 1
        self._run = None if self._run is None else self._run + 1
        self._begin_later(first, 1)

    @property
    def free(self) -> int:
        """Slots behind the last token that are there and empty."""
        return 0 if self._keys is None else self._keys.shape[1] - self.length

    @property
    def shared(self) -> bool:
        """Whether others hold its buffers as well, which are copied before what is written in them changes."""
        return self._shared

    @property
    def slots(self) -> int:
        """All slots of its buffers, those in front that hold nothing any more among them."""
        return 0 if self._keys is None else self._gone + self._keys.shape[1]

    def buffers(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys (b * h, slots, d), values (b * h, slots, dv) and columns (b * h, slots) int32, with free slots.

        The columns are None where they are consecutive.
        """
        assert self._keys is not None and self._values is not None
        return self._keys, self._values, self._positions

    def is_followed_by(self, column: int) -> bool:
        """Whether a token of this column can be written behind the last one without another change."""
        if self.length == 0 or not self._writable:
            return False
        return self._positions is not None or (self.start is not None and column == self.start + self.length)

    def replace(self, segment: PlainSegment, run: int | None = None, anchor: int = 0) -> None:
        """Holds the segment's tokens, one lane for each row and head, instead of what it held; `run`: see there."""
        layout = segment.layout
        if layout.owner is not None or layout.lengths is not None:
            raise ValueError("a tail holds the same number of tokens for each row and head; this segment is ragged")
        self._keys, self._values = segment.keys, segment.values
        self.length, self.start, self._positions = layout.size, layout.start, layout.positions
        self._made_anew()
        self._run, self._anchor = run, anchor

    def drop_behind(self, first: int, count: int) -> None:
        """Forget `count` tokens behind the `first` ones, which move up to the rest: no other token does.

        The slots that get free so are in front, and counted, until the buffer grows the next time.
        """
        keys, values = self._keys, self._values
        assert keys is not None and values is not None
        if self._shared or not self._writable:
            keys, values = self._own(keys), self._own(values)
            self._positions = None if self._positions is None else self._own(self._positions)
            self._shared = False
        if first and self._positions is None:
            self._spell_out_positions(run=self.length)
        for buffer in (keys, values, self._positions) if first else ():
            if buffer is not None:
                # The places of those that move may overlap.
                buffer[:, count : count + first] = buffer[:, :first].clone()
        self._keys, self._values = keys, values
        self._begin_later(first, count)

    def _begin_later(self, first: int, count: int) -> None:
        """Forget so many slots in front: behind them the `first` tokens follow, which have just been moved."""
        assert self._keys is not None and self._values is not None
        self._keys, self._values = self._keys[:, count:], self._values[:, count:]
        if self._positions is not None:
            self._positions = self._positions[:, count:]
        if self.start is not None:
            self.start += count
        self._gone, self.length = self._gone + count, self.length - count
        self._run = None if self._run is None else min(self._run, self.length - first)
        self._anchor = min(self._anchor, first)

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest tokens, whose block has just been encoded, and their memory."""
        if self._keys is None or self._values is None:
            return
        if count == self.length:
            self.clear()
            return
        self._keys = huge_pages.copied(self._keys[:, count : self.length])
        self._values = huge_pages.copied(self._values[:, count : self.length])
        if self._positions is not None:
            self._positions = self._positions[:, count : self.length].clone()
        if self.start is not None:
            self.start += count
        self.length -= count
        self._made_anew()
        self._run, self._anchor = None if self._run is None else min(self._run, self.length), 0

    def rewrite(self, keys: Tensor, values: Tensor) -> None:
        """Holds keys (b * h, length, d) and values (b * h, length, dv) in place of its own, at the same columns."""
        if self.length != keys.shape[1] or self.length != values.shape[1]:
            raise ValueError(f"a tail of {self.length} tokens cannot become {keys.shape[1]} at the same columns")
        self._keys, self._values = keys, values
        if self._positions is not None:
            self._positions = self._positions[:, : self.length].clone()
        self._made_anew()

    def crop(self, count: int) -> None:
        """Forget the newest tokens. The buffer stays: the next tokens take its slots."""
        if count > self.length:
            raise ValueError(f"cannot forget {count} tokens of a tail that holds {self.length}")
        self.length -= count
        self._run = None if self._run is None else max(self._run - count, 0)
        self._anchor = min(self._anchor, self.length)

    def clear(self) -> None:
        """Holds nothing and no memory."""
        self._made_anew()
        self._run = self._anchor = 0
        self._keys = self._values = self._positions = self.start = None
        self.length = 0

    def select_rows(self, index: Tensor) -> None:
        """Become the tail of a batch made of the rows `index` (k,) of this one."""
        if self._keys is not None:
            segment = self.as_segment().rows(index)
            self._keys, self._values = segment.keys.contiguous(), segment.values.contiguous()
            self._positions = segment.layout.positions
            self._made_anew()
        self.rows = int(index.shape[0])

    def as_segment(self) -> PlainSegment:
        """The tail as attention reads it: (b * h, length, d) views of the buffer, nothing copied."""
        if self._keys is None or self._values is None:
            raise ValueError("an empty tail has no segment")
        positions = None if self._positions is None else self._positions[:, : self.length]
        layout = Layout(rows=self.rows, heads=self.heads, size=self.length, start=self.start, positions=positions)
        if positions is not None:
            layout.ending_in(self._run)
        return PlainSegment(layout=layout, keys=self._keys[:, : self.length], values=self._values[:, : self.length])

    def tensors(self) -> dict[str, Tensor]:
        """The whole buffers, free slots included."""
        named = {"keys": self._keys, "values": self._values, "positions": self._positions}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def closed_form_bytes(self) -> int:
        """Bytes of the buffers from their number of slots and the element size."""
        if self._keys is None or self._values is None:
            return 0
        slots = self.rows * self.heads * self.slots
        width = self._keys.shape[-1] + self._values.shape[-1]
        return slots * width * self._keys.element_size() + (0 if self._positions is None else 4 * slots)

    def state(self) -> tuple[dict[str, int | None], dict[str, Tensor]]:
        """JSON-able fields and tensors for a saved cache; only filled slots are kept."""
        fields = {"length": self.length, "start": self.start}
        return fields, {name: tensor[:, : self.length].contiguous() for name, tensor in self.tensors().items()}

    @classmethod
    def from_state(cls, rows: int, heads: int, fields: Mapping[str, int | None], tensors: Mapping[str, Tensor]) -> Tail:
        """The tail that `state()` described."""
        tail = cls(rows, heads)
        tail.length, tail.start = int(fields["length"] or 0), fields["start"]
        tail._keys, tail._values = tensors.get("keys"), tensors.get("values")
        tail._positions, tail._run = tensors.get("positions"), None
        return tail

    def look(self, seen: int) -> None:
        """Learns how many of its tokens are the text's first, and its newest where so many were seen."""
        if self._positions is not None and self.length:
            columns, at = self._positions[:, : self.length], torch.arange(self.length, device=self._positions.device)
            first, newest = ((columns == at + begin).all(0) for begin in (0, seen - self.length))
            found = torch.stack([first, newest.flip(0)]).to(torch.int64).cumprod(1).sum(1)
            self._anchor, self._run = found.tolist()

    def _reserve(self, tokens: int, keys: Tensor, values: Tensor, exactly: bool) -> None:
        if self._keys is None or not self._writable or self._keys.shape[1] < tokens:
            self._grow(tokens if exactly else capacity_for(tokens), keys, values)

    @property
    def _writable(self) -> bool:
        return torch.is_inference_mode_enabled() or self._keys is None or not self._keys.is_inference()

    def _grow(self, slots: int, keys: Tensor, values: Tensor) -> None:
        def grown(old: Tensor | None, like: Tensor) -> Tensor:
            buffer = huge_pages.new_empty(like, (self.rows * self.heads, slots, like.shape[-1]))
            if old is not None and self.length:
                buffer[:, : self.length] = old[:, : self.length]
            return buffer

        self._keys = grown(self._keys, keys if self._keys is None else self._keys)
        self._values = grown(self._values, values if self._values is None else self._values)
        if self._positions is not None:
            positions = self._positions.new_empty((self.rows * self.heads, slots))
            positions[:, : self.length] = self._positions[:, : self.length]
            self._positions = positions
        self._made_anew()

    def _made_anew(self) -> None:
        """The buffers are this tail's own, and have no slots in front."""
        self._gone, self._shared = 0, False

    def _own(self, buffer: Tensor) -> Tensor:
        """A buffer (b * h, slots, ...) of as many slots, those in front too, with the same tokens."""
        made = huge_pages.new_empty(buffer, (buffer.shape[0], self._gone + buffer.shape[1], *buffer.shape[2:]))
        own = made[:, self._gone :]
        own[:, : self.length] = buffer[:, : self.length]
        return own

    def _comes(self, column: int) -> None:
        """Stores columns one by one where the next token is not at the column after the last."""
        if self._keys is None or self.length == 0:
            self.start, self._positions, self._run = column, None, 0
        elif self.start is not None and column != self.start + self.length:
            # The next token is not behind the last one.
            self._spell_out_positions(run=0)

    def _came(self, new: int, column: int) -> None:
        if self._positions is not None:
            self._positions[:, self.length : self.length + new] = torch.arange(
                column, column + new, dtype=torch.int32, device=self._positions.device
            )
        self.length += new
        self._run = None if self._run is None else self._run + new

    def _spell_out_positions(self, run: int) -> None:
        assert self._keys is not None and self.start is not None
        self._anchor = self.anchor
        columns = torch.arange(self.start, self.start + self.length, dtype=torch.int32, device=self._keys.device)
        self._positions = columns.new_empty((self.rows * self.heads, self._gone + self._keys.shape[1]))[:, self._gone :]
        self._positions[:, : self.length] = columns
        self.start, self._run = None, run
