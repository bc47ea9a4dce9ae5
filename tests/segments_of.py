"""Random segments of every kind of layout, and a stand-in for what the model's mask says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.types import Layout


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


def states(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers; one channel in five is an outlier, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., ::5] = x[..., ::5] * 4 + 3
    return x.to(dtype)


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
