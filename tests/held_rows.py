"""Random evidence for scorers: rows alone, the same rows left-padded into a batch, and the same rows with holes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.types import Held, Needs


@dataclass(frozen=True)
class Row:
    """What one prompt of n tokens leaves behind in one layer, without padding or batch."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    mass: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


def make_row(tokens: int, *, heads: int, group: int, size: int, generator: torch.Generator) -> Row:
    """Keys (h, n, d), values (h, n, d + 1), queries (q, n, d) of all tokens, mass (h, n)."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Row(
        keys=draw(heads, tokens, size),
        values=draw(heads, tokens, size + 1),
        queries=draw(heads * group, tokens, size) * 2,
        mass=torch.rand(heads, tokens, generator=generator) * 3,
    )


def held_of(
    rows: list[Row], needs: Needs, *, layer: int = 1, layers: int = 3, dtype: torch.dtype = torch.float32
) -> Held:
    """The rows as one left-padded batch. Padding holds large numbers, so that a scorer that reads it is found out."""
    longest = max(row.tokens for row in rows)
    pads = [longest - row.tokens for row in rows]

    def stack(name: str, filler: float) -> Tensor:
        parts = []
        for row, pad in zip(rows, pads, strict=True):
            tensor = getattr(row, name)
            shape = list(tensor.shape)
            shape[1] = pad
            noise = filler * (1 + torch.rand(shape, generator=torch.Generator().manual_seed(pad)))
            parts.append(torch.cat([noise, tensor], 1))
        return torch.stack(parts)

    keys = stack("keys", 30.0)
    positions = torch.arange(longest).expand(*keys.shape[:3]).clone()
    first = torch.tensor(pads)
    window = min(needs.window, longest)
    return Held(
        keys=keys.to(dtype),
        values=stack("values", 30.0).to(dtype),
        positions=positions,
        valid=positions >= first[:, None, None],
        first=first,
        seen=longest,
        layer=layer,
        layers=layers,
        scaling=keys.shape[-1] ** -0.5,
        queries=stack("queries", 30.0)[:, :, longest - window :].to(dtype) if needs.window else None,
        query_columns=torch.arange(longest - window, longest) if needs.window else None,
        mass=stack("mass", 30.0) if needs.mass else None,
    )


def with_holes(held: Held, holes: int, generator: torch.Generator) -> tuple[Held, Tensor]:
    """The same tokens with `holes` filler slots strewn in, elsewhere in each lane; where each token went (b, h, n)."""
    rows, heads, n, _ = held.keys.shape
    where = torch.stack(
        [torch.randperm(n + holes, generator=generator)[:n].sort().values for _ in range(rows * heads)]
    ).view(rows, heads, n)

    def spread(tensor: Tensor, filler: float) -> Tensor:
        if tensor.ndim == 3:
            return tensor.new_full((rows, heads, n + holes), filler).scatter(2, where, tensor)
        wide = tensor.new_full((rows, heads, n + holes, tensor.shape[-1]), filler)
        return wide.scatter(2, where[..., None].expand_as(tensor), tensor)

    return Held(
        keys=spread(held.keys, 50.0),
        values=spread(held.values, 50.0),
        positions=spread(held.positions, 0),
        valid=spread(held.valid, False),
        first=held.first,
        seen=held.seen,
        layer=held.layer,
        layers=held.layers,
        scaling=held.scaling,
        queries=held.queries,
        query_columns=held.query_columns,
        mass=None if held.mass is None else spread(held.mass, 70.0),
    ), where
