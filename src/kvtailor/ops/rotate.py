"""Turning states by positions, as a rotary embedding does."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.types import Rotation

__all__ = ["turn", "turned_planes"]


def turn(states: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """States turned by so many positions; negative ones turn back.

    Angles are float32 products, as in the models themselves, so that turning back what a model turned is exact up to
    one rounding.

    Args:
        states: (..., n, d), d at least `rotation.size`.
        positions: broadcasts to (..., n).
        rotation: of the layer.

    Returns:
        (..., n, d) in the dtype of `states`.

    Raises:
        ValueError: the rotation turns more channels than the states have.
    """
    size = rotation.size
    if size > states.shape[-1]:
        raise ValueError(f"the rotation turns {size} channels, and the states {tuple(states.shape)} have fewer")
    angle = positions.to(torch.float32)[..., None] * rotation.frequencies.to(states.device)
    cos, sin = angle.cos(), angle.sin()
    first, second = turned_planes(states, rotation)
    first, second = first.float(), second.float()
    one, two = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack([one, two], -1).flatten(-2) if rotation.interleaved else torch.cat([one, two], -1)
    rest = states[..., size:].expand(*turned.shape[:-1], -1)
    return torch.cat([turned.to(states.dtype), rest], -1)


def turned_planes(states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """The two channels of each plane, (..., r / 2) each, as views."""
    turned = states[..., : rotation.size]
    if rotation.interleaved:
        return turned[..., 0::2], turned[..., 1::2]
    return turned[..., : rotation.size // 2], turned[..., rotation.size // 2 :]
