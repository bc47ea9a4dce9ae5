"""Turning states by positions, as a rotary embedding does."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.ops.lanes.pieces import pieces
from kvtailor.types import Rotation

__all__ = ["cosines_and_sines", "turn", "turn_on_average", "turned_exactly", "turned_planes"]

# Elements that are turned at once: what is made on the way, in float32, stays in a core's cache.
_PIECE = 1 << 18


def turn(states: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """States turned by so many positions; negative ones turn back.

    Angles are float32 products, as in the models themselves, so that turning back what a model turned is exact up to
    one rounding.

    Args:
        states: (..., n, d), d at least `rotation.size`.
        positions: broadcasts to (..., n).
        rotation: of the layer.

    Returns:
        (..., n, d) in the dtype of `states`, a new tensor.

    Raises:
        ValueError: the rotation turns more channels than the states have.
    """
    cos, sin = cosines_and_sines(positions, rotation.frequencies.to(states.device))
    if states.device.type != "cpu" or states.ndim != 3 or states.numel() <= _PIECE:
        return _combined(states, cos, sin, rotation)
    turned = torch.empty(states.shape, dtype=states.dtype)
    cos, sin = (each.expand(*states.shape[:2], -1) for each in (cos, sin))
    for lanes, slots in pieces(states.shape[0], states.shape[1], states.shape[2], _PIECE):
        turned[lanes, slots] = _combined(states[lanes, slots], cos[lanes, slots], sin[lanes, slots], rotation)
    return turned


def turned_exactly(states: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """States (..., n, d) as `turn` gives them, by angles that are products in float64.

    Where several parts of an angle are taken apart and put together again, that is the angle they give.
    """
    angle = positions.to(torch.float64)[..., None] * rotation.frequencies.to(positions.device, torch.float64)
    cos, sin = (each.to(states.device, torch.float32) for each in (angle.cos(), angle.sin()))
    return _combined(states, cos, sin, rotation)


def cosines_and_sines(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """What states are turned by at these positions (..., n): (..., n, r / 2) each, of `Rotation.frequencies`."""
    angle = positions.to(torch.float32)[..., None] * frequencies
    return angle.cos(), angle.sin()


def turn_on_average(states: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """The mean of states over turning them by each of the positions.

    Args:
        states: (..., d).
        positions: (p,), p >= 1.
        rotation: of the layer.

    Returns:
        (..., d) in the dtype of `states`.

    Raises:
        ValueError: as `turn`.
    """
    angle = positions.to(torch.float32)[:, None] * rotation.frequencies.to(states.device)
    return _combined(states, angle.cos().mean(0), angle.sin().mean(0), rotation)


def turned_planes(states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """The two channels of each plane, (..., r / 2) each, as views."""
    turned = states[..., : rotation.size]
    if rotation.interleaved:
        return turned[..., 0::2], turned[..., 1::2]
    return turned[..., : rotation.size // 2], turned[..., rotation.size // 2 :]


def _combined(states: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> Tensor:
    size = rotation.size
    if size > states.shape[-1]:
        raise ValueError(f"the rotation turns {size} channels, and the states {tuple(states.shape)} have fewer")
    first, second = turned_planes(states, rotation)
    first, second = first.float(), second.float()
    one, two = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack([one, two], -1).flatten(-2) if rotation.interleaved else torch.cat([one, two], -1)
    turned = turned.to(states.dtype)
    if size == states.shape[-1]:
        return turned
    return torch.cat([turned, states[..., size:].expand(*turned.shape[:-1], -1)], -1)
