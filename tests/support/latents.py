"""Multi-head latent attention by its definition: projections that are random matrices, and every head expanded."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.types.latent_attention import LatentAttention

__all__ = ["RandomProjections"]


class RandomProjections(LatentAttention):
    """Matrices (H, d', r) that make keys, (H, dv, r) that make values; `expands` forces one form of reading."""

    def __init__(
        self, heads: int, nope: int, rope: int, value: int, rank: int, *, seed: int = 0, expands: bool = False
    ):
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.nope, self.rope, self.value, self.rank = heads, nope, rope, value, rank
        self.of_keys = torch.randn(heads, nope, rank, generator=generator) * rank**-0.5
        self.of_values = torch.randn(heads, value, rank, generator=generator) * rank**-0.5
        self.expands = expands

    def absorbed(self, query: Tensor) -> Tensor:
        turned = torch.einsum("bhtd,hdr->bhtr", query[..., : self.nope], self.of_keys.to(query))
        return torch.cat([turned, query[..., self.nope :]], -1)

    def lifted(self, sums: Tensor) -> Tensor:
        return torch.einsum("bhtr,hvr->bhtv", sums, self.of_values.to(sums))

    def expanded(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.einsum("msr,hdr->mhsd", latents, self.of_keys.to(latents))
        values = torch.einsum("msr,hvr->mhsv", latents, self.of_values.to(latents))
        return torch.cat([keys, rotated[:, None].expand(-1, self.heads, -1, -1)], -1), values

    def expands_cheaply(self, new: int, held: int) -> bool:
        return self.expands

    def __deepcopy__(self, memo: object) -> RandomProjections:
        return self
