"""What a layer of multi-head latent attention stores, as the one kv head that its absorbed queries read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.segments.around import AroundSegment
from kvtailor.types import Segment, SegmentView

__all__ = ["LatentKeys", "as_one_head", "joined", "parted"]


@dataclass(frozen=True, kw_only=True)
class LatentKeys(AroundSegment):
    """Keys [latent ; rotated key] and values that are the latents, of a segment whose sides are the two parts.

    It is made for reading and never stored: the latent is stored once.
    """

    codec = "latent_keys"

    def decode(self) -> tuple[Tensor, Tensor]:
        return joined(*self.inner.decode())

    def view(self) -> SegmentView:
        read = self.inner.view()
        if read.lift is not None or read.shared is not None:
            raise ValueError(f"a segment of {self.inner.codec} shows attention other values than it decodes")
        # The two parts of a key stay where they are: joining them would copy all that is held at each token.
        return SegmentView(keys=read.keys, more_keys=read.values, values=read.keys, log_weight=read.log_weight)


def as_one_head(part: Segment) -> LatentKeys:
    """Return a stored part, latents (m, s, r) as keys and rotated keys (m, s, e) as values, as attention reads it."""
    return LatentKeys(layout=part.layout, inner=part)


def joined(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys (..., r + e) and values (..., r) of latents (..., r) and rotated keys (..., e)."""
    return torch.cat([latents, rotated], -1), latents


def parted(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents (..., r) and rotated keys (..., e) of keys (..., r + e) and values (..., r): `joined` undone."""
    return values, keys[..., values.shape[-1] :]
