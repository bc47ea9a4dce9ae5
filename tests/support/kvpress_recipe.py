"""The inputs of the recorded kvpress cases: weights and hidden states by an integer formula, and what follows.

No random stream is used, so that every machine and every version of torch makes the same bits: an integer hash of a
name and a place gives each number, and all of them are exact in bfloat16. kvpress is not needed here.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF
MIX = 0x45D9F3B


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One Llama attention: rotary embedding of base 10000 over all channels, no biases, scaling d ** -0.5."""

    name: str
    query_heads: int
    heads: int
    tokens: int
    rows: int = 1
    layers: int = 1
    size: int = 16
    width: int = 64

    @property
    def scaling(self) -> float:
        return float(self.size**-0.5)

    @property
    def frequencies(self) -> Tensor:
        """(d / 2,) float32 radians per position, as transformers makes them."""
        return 1.0 / 10000.0 ** (torch.arange(0, self.size, 2, dtype=torch.int64).float() / self.size)


GEOMETRIES = {
    each.name: each
    for each in (
        Geometry(name="two-rows", query_heads=4, heads=2, tokens=63, rows=2),
        Geometry(name="three-heads", query_heads=6, heads=3, tokens=137),
        Geometry(name="two-layers", query_heads=4, heads=2, tokens=200, layers=2),
        Geometry(name="one-head", query_heads=4, heads=1, tokens=300),
        Geometry(name="ungrouped", query_heads=3, heads=3, tokens=65, size=8, width=24),
    )
}


@dataclass(frozen=True, kw_only=True)
class States:
    """One layer's states. Queries and keys are as the attention sees them: after the rotation."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    unrotated_queries: Tensor


def numbers(name: str, *shape: int, step: float) -> Tensor:
    """Float32 multiples of `step`, bell-shaped, from -126 to 126 steps with a deviation of about 42."""
    count = math.prod(shape)
    place = torch.arange(3 * count, dtype=torch.int64) * 2654435761 + zlib.crc32(name.encode())
    mixed = place & LOW_32
    for _ in range(3):
        mixed = ((mixed ^ (mixed >> 16)) * MIX) & LOW_32
    mixed = mixed ^ (mixed >> 16)
    return (mixed.view(count, 3) % 85 - 42).sum(-1).float().mul(step).view(shape)


def weights(geometry: Geometry, layer: int) -> dict[str, Tensor]:
    """The four projections as a linear layer holds them, (out, in), by transformers' names."""
    of_layer = f"{geometry.name}.{layer}"
    inside, width = geometry.query_heads * geometry.size, geometry.width
    groups = geometry.heads * geometry.size
    return {
        "q_proj": numbers(f"{of_layer}.q_proj", inside, width, step=1 / 256),
        "k_proj": numbers(f"{of_layer}.k_proj", groups, width, step=1 / 256),
        "v_proj": numbers(f"{of_layer}.v_proj", groups, width, step=1 / 128),
        "o_proj": numbers(f"{of_layer}.o_proj", width, inside, step=1 / 128),
    }


def hidden_states(geometry: Geometry, layer: int, *, tokens: int | None = None, part: str = "context") -> Tensor:
    """(b, n, D) what enters the attention: noise about a mean of each channel, which all tokens share."""
    of_layer = f"{geometry.name}.{layer}"
    shape = (geometry.rows, geometry.tokens if tokens is None else tokens, geometry.width)
    noise = numbers(f"{of_layer}.{part}", *shape, step=1 / 64)
    return noise + numbers(f"{of_layer}.mean", geometry.width, step=1 / 64)


def rotated(states: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """(..., n, d) turned by positions (n,): plane i is the channels i and i + d / 2."""
    angle = (positions.float()[:, None] * frequencies).double()
    first, second = states.chunk(2, dim=-1)
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, dim=-1)


def states(geometry: Geometry, layer: int, *, start: int = 0, hidden: Tensor | None = None) -> States:
    """What one layer makes of its hidden states, whose first token has the position `start`; computed in float64."""
    entering = (hidden_states(geometry, layer) if hidden is None else hidden).double()
    projected = {
        name: (entering @ weight.double().T).unflatten(-1, (-1, geometry.size)).transpose(1, 2)
        for name, weight in weights(geometry, layer).items()
        if name != "o_proj"
    }
    positions = torch.arange(start, start + entering.shape[1])
    turn = [rotated(projected[name], positions, geometry.frequencies) for name in ("q_proj", "k_proj")]
    return States(
        queries=turn[0].float(),
        keys=turn[1].float(),
        values=projected["v_proj"].float(),
        unrotated_queries=projected["q_proj"].float(),
    )


def filters(geometry: Geometry) -> Tensor:
    """(l, h, d) one direction for each kv head, in the place of calibrated ones."""
    return numbers(f"{geometry.name}.filters", geometry.layers, geometry.heads, geometry.size, step=1 / 64)


def curve(geometry: Geometry) -> Tensor:
    """(99, l, h) float64 share of its tokens that each kv head drops where 1 to 99 percent of all go, for two heads a
    layer: some drop more than that, others less.
    """
    apart = torch.tensor([-0.5, 0.25, 0.0, 0.25], dtype=torch.float64).view(2, 2)[: geometry.layers]
    gone = torch.arange(1, 100, dtype=torch.float64)[:, None, None] / 100
    return gone + torch.minimum(gone, 1 - gone) * apart


WHOLE = Geometry(name="whole", query_heads=4, heads=2, tokens=40, layers=3, width=64)
"""A whole model, for what needs gradients through it: its weights are `whole_weight`, its vocabulary 50 words."""


def whole_weight(name: str, *shape: int) -> Tensor:
    """A parameter of that model by its name in transformers' Llama: norms near one, projections, embeddings."""
    if len(shape) == 1:
        return 1 + numbers(f"whole.{name}", *shape, step=1 / 512)
    return numbers(f"whole.{name}", *shape, step=1 / 64 if "embed" in name else 1 / 256)


def whole_ids() -> tuple[Tensor, Tensor]:
    """(n,) int64 tokens of a context, and (3,) of an instruction to repeat it."""
    drawn = numbers("whole.ids", WHOLE.tokens + 3, step=1.0).long() % 50
    return drawn[:-3], drawn[-3:]


def head_scores(geometry: Geometry) -> Tensor:
    """(l, h) how much each kv head is worth keeping whole, all different, from 0 to 1."""
    order = numbers(f"{geometry.name}.heads", geometry.layers * geometry.heads, step=1.0).argsort().argsort()
    return ((order + 1) / (order.numel() + 1)).view(geometry.layers, geometry.heads)
