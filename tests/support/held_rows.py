"""Random evidence for scorers: rows alone, the same rows left-padded into a batch, and the same rows with holes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.calibration_file import calibrated
from kvtailor.engine.observe import observe
from kvtailor.method import Method
from kvtailor.plan.arguments import with_nested
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs, Rotation
from kvtailor.types.evidence import Evidence


@dataclass(frozen=True)
class Row:
    """What one prompt of n tokens leaves behind in one layer, without padding or batch."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    mass: Tensor
    previous: Tensor
    reconstruction: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]


def make_row(tokens: int, *, heads: int, group: int, size: int, generator: torch.Generator) -> Row:
    """Keys (h, n, d), values (h, n, d + 1), queries (q, n, d) of all tokens, and what is known of each (h, n)."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Row(
        keys=draw(heads, tokens, size),
        values=draw(heads, tokens, size + 1),
        queries=draw(heads * group, tokens, size) * 2,
        mass=torch.rand(heads, tokens, generator=generator) * 3,
        previous=draw(heads, tokens).where(torch.arange(tokens) < tokens - 3, torch.nan),
        reconstruction=torch.rand(heads, tokens, generator=generator).where(torch.arange(tokens) < tokens - 3, -1.0),
    )


def row_of(keys: Tensor, values: Tensor | None = None, queries: Tensor | None = None) -> Row:
    """A row of known keys (h, n, d), of which nothing else is known but what is given; queries (q, n, d)."""
    unknown = torch.zeros(keys.shape[:2])
    return Row(
        keys=keys,
        values=keys if values is None else values,
        queries=keys if queries is None else queries,
        mass=unknown,
        previous=unknown + torch.nan,
        reconstruction=unknown,
    )


def held_of(
    rows: list[Row],
    needs: Needs,
    *,
    layer: int = 1,
    layers: int = 3,
    dtype: torch.dtype = torch.float32,
    query_order: Tensor | None = None,
    calibration: dict[str, Tensor] | None = None,
) -> Held:
    """The rows as one left-padded batch. Padding holds large numbers, so that a scorer that reads it is found out.

    `query_order`: in which order the query heads stand, for what belongs to the layer and not to a row.
    """
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
    rotation = Rotation(frequencies=torch.tensor([1.0, 0.1])) if keys.shape[-1] >= 4 else None
    queries = stack("queries", 30.0).to(dtype)
    real = positions[:, 0] >= first[:, None]
    gathered = replace(needs, window=0, mass=False)
    evidence = observe(gathered, Evidence(), queries, 0, None, real=real, rotation=rotation)
    output = torch.randn(queries.shape[1], keys.shape[-1] + 1, 5, generator=torch.Generator().manual_seed(77))
    output = output if query_order is None else output[query_order]
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
        budget=torch.tensor([max(1, row.tokens // 3) for row in rows]),
        queries=queries[:, :, longest - window :] if needs.window else None,
        query_columns=torch.arange(longest - window, longest) if needs.window else None,
        mass=stack("mass", 30.0) if needs.mass else None,
        sampled=evidence.sampled,
        sampled_columns=evidence.sampled_columns,
        moments=evidence.moments,
        previous=_previous(stack("previous", 30.0), needs) if needs.previous else None,
        reconstruction=stack("reconstruction", 30.0) if needs.reconstruction else None,
        output=output.to(dtype) if needs.output else None,
        rotation=rotation if needs.rotation or needs.moments else None,
        calibration=calibration,
    )


def _previous(drawn: Tensor, needs: Needs) -> Tensor:
    """Scores (b, h, n) of the eviction before, or notes (b, h, c, n) that are not below 0."""
    return torch.stack([drawn.abs() * (5 - i) for i in range(needs.notes)], 2) if needs.notes else drawn


def held_by(scorer: Scorer, rows: list[Row], *, head_order: Tensor | None = None, **given: Any) -> Held:
    """`held_of` with what a scorer needs, examples of its calibration among it.

    `head_order`: in which order the kv heads of `rows` stand now; what belongs to a head and not to a row goes along.
    """
    heads, group = rows[0].keys.shape[0], rows[0].queries.shape[0] // rows[0].keys.shape[0]
    layers, layer = given.get("layers", 3), given.get("layer", 1)
    sizes = {"size": rows[0].keys.shape[-1], "value_size": rows[0].values.shape[-1]}
    tensors = example_tensors(scorer, layers=layers, heads=heads, group=group, **sizes)
    for each in calibrated(with_nested(scorer)) if head_order is not None else ():
        tensors |= {name: tensors[name][:, head_order] for name in each.per_head}
    calibration = {name: tensor[layer] for name, tensor in tensors.items()}
    return held_of(rows, scorer.needs, calibration=calibration or None, **given)


def example_tensors(
    method: Method, *, layers: int, heads: int, group: int, size: int, value_size: int | None = None
) -> dict[str, Tensor]:
    """Random tensors of all the files that a method and the methods among its arguments read.

    `value_size`: None where values are as long as keys.
    """
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Tensor] = {}
    for each in calibrated(with_nested(method)):
        found |= each.example_for(
            layers=layers, heads=heads, group=group, size=size, value_size=value_size or size, generator=generator
        )
    return found


def with_holes(held: Held, holes: int, generator: torch.Generator) -> tuple[Held, Tensor]:
    """The same tokens with `holes` filler slots strewn in, elsewhere in each lane; where each token went (b, h, n)."""
    rows, heads, n, _ = held.keys.shape
    where = torch.stack(
        [torch.randperm(n + holes, generator=generator)[:n].sort().values for _ in range(rows * heads)]
    ).view(rows, heads, n)

    def spread(tensor: Tensor, filler: float) -> Tensor:
        if tensor is held.previous and tensor.ndim == 4:
            return torch.stack([spread(each, filler) for each in tensor.unbind(2)], 2)
        if tensor.ndim == 3:
            return tensor.new_full((rows, heads, n + holes), filler).scatter(2, where, tensor)
        wide = tensor.new_full((rows, heads, n + holes, tensor.shape[-1]), filler)
        return wide.scatter(2, where[..., None].expand_as(tensor), tensor)

    return replace(
        held,
        keys=spread(held.keys, 50.0),
        values=spread(held.values, 50.0),
        positions=spread(held.positions, 0),
        valid=spread(held.valid, False),
        **{
            name: None if getattr(held, name) is None else spread(getattr(held, name), 70.0)
            for name in ("mass", "previous", "reconstruction")
        },
    ), where
