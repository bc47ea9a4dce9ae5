"""Random segments of every kind of layout, and a stand-in for what the model's mask says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.encode.contract import Codec
from kvtailor.types import Layout, Segment


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Causality, and padding where `real` (b, columns) says so; `window` columns are seen where it is given."""

    new_tokens: int
    first_column: int
    real: Tensor | None = None
    window: int | None = None

    @property
    def causal_only(self) -> bool:
        return self.real is None and self.window is None

    def without_last(self, count: int) -> Padded:
        return replace(self, new_tokens=self.new_tokens - count)

    def at(self, rows: Tensor, columns: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        query = (torch.arange(self.new_tokens)[first:last] + self.first_column)[None, :, None]
        key = columns[:, None, :]
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.real is not None:
            seen = seen & self.real[rows[:, None, None], key]
        return seen


def group_of(codec: Codec, layer: int = 1, layers: int = 3) -> tuple[int, ...]:
    """The layers that are encoded together with a layer."""
    return next(group for group in codec.layer_groups(layers) if layer in group)


def encoded_group(
    codec: Codec, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None
) -> list[Segment]:
    """The segments of all layers that a codec, bound to layer 1 of 3, encodes together; all hold the same states."""
    return list(codec.encode_group(layout, [(keys, values)] * len(group_of(codec)), first))


def encoded(codec: Codec, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> Segment:
    """The segment of the first of them, with which all that they share is counted."""
    return encoded_group(codec, layout, keys, values, first)[0]


def states(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers; one channel in five is an outlier, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., ::5] = x[..., ::5] * 4 + 3
    return x.to(dtype)


def moved(layout: Layout, seed: int) -> tuple[Tensor, Tensor, Layout]:
    """Some tokens of a uniform layout, as many of each lane, in time order."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, layout.size // 3)
    draws = [torch.randperm(layout.size, generator=generator)[:count].sort().values for _ in range(layout.lanes)]
    slot = torch.stack(draws)
    positions = layout.columns(torch.device("cpu")).expand(layout.lanes, -1).gather(1, slot).to(torch.int32)
    lane = torch.arange(layout.lanes)[:, None].expand_as(slot)
    return lane, slot, Layout(rows=layout.rows, heads=layout.heads, size=count, positions=positions)


def uneven(rows: int, heads: int, size: int, most: int, columns: int, seed: int) -> tuple[Layout, Tensor, Tensor]:
    """A ragged layout over the columns 0..columns - 1, each row and head with 1..most of them; one has a single token.

    Returns:
        The layout, and for each of its slots the row * heads + head and the column that fills it (filler repeats).
    """
    generator = torch.Generator().manual_seed(seed)
    owners, lengths, positions = [], [], []
    for owner in range(rows * heads):
        count = 1 if owner == rows * heads - 1 else int(torch.randint(1, most + 1, (1,), generator=generator))
        kept = torch.randperm(columns, generator=generator)[:count].sort().values
        for first in range(0, count, size):
            page = kept[first : first + size]
            owners.append(owner)
            lengths.append(page.shape[0])
            positions.append(torch.cat([page, page[-1:].expand(size - page.shape[0])]))
    owner = torch.tensor(owners)
    table = torch.stack(positions)
    layout = Layout(
        rows=rows,
        heads=heads,
        size=size,
        positions=table.to(torch.int32),
        owner=owner,
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )
    return layout, owner[:, None].expand_as(table), table
