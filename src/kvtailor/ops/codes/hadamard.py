"""Hadamard rotation: each output is a sum of all inputs with signs, so that no channel stands out of the others."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvtailor.types import Coordinates
from kvtailor.types.late_checks import send

__all__ = ["block_of", "coordinates", "mixed", "unmixed"]


def mixed(states: Tensor, state: int | None = None) -> Tensor:
    """H D x / b for each block of b channels, in the dtype of the states.

    Divided by b and not by its root: no result is larger than the largest input, so that float16 cannot overflow, and
    as b is a power of two the division is exact.

    Args:
        states: (..., c); b is the largest power of two that divides c.
        state: of the random signs on D's diagonal, the same for all blocks; None: D is 1.
    """
    block = block_of(states.shape[-1])
    return _product(states, _matrix(block, state, states.device) / block)


def unmixed(states: Tensor, state: int | None = None) -> Tensor:
    """What `mixed` was given: D H x for each block of channels, as H H = b."""
    return _product(states, _matrix(block_of(states.shape[-1]), state, states.device).mT)


def coordinates(size: int, device: torch.device, state: int | None = None) -> Coordinates | None:
    """What `mixed` states of so many channels on a device are to those that they were; None for no channels."""
    if size == 0:
        return None
    block = block_of(size)
    return Coordinates(matrix=_matrix(block, state, device)[None], blocks=size // block)


def block_of(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def _product(states: Tensor, matrix: Tensor) -> Tensor:
    blocks = states.float().unflatten(-1, (-1, matrix.shape[0]))
    product: Tensor = blocks @ matrix
    return product.flatten(-2).to(states.dtype)


@cache
def _matrix(size: int, state: int | None, device: torch.device) -> Tensor:
    """D H, (size, size) float32 of 1 and -1: Sylvester's symmetric H, of which row i has the sign of D's number i.

    Made once for each device.
    """
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float32)
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        if state is not None:
            signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(state))
            matrix = matrix * (2 * signs - 1)
        return send(matrix, device)
