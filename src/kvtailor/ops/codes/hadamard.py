"""Hadamard rotation: each output is a sum of all inputs with signs, so that no channel stands out of the others."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvtailor.types import Coordinates
from kvtailor.types.late_checks import sent

__all__ = ["block_of", "coordinates", "mixed", "unmixed"]


def mixed(states: Tensor) -> Tensor:
    """H x / b for each block of b channels, in the dtype of the states.

    Divided by b and not by its root: no result is larger than the largest input, so that float16 cannot overflow, and
    as b is a power of two the division is exact.

    Args:
        states: (..., c); b is the largest power of two that divides c.
    """
    block = block_of(states.shape[-1])
    return _product(states, _matrix(block, states.device) / block)


def unmixed(states: Tensor) -> Tensor:
    """What `mixed` was given: H x for each block of channels, as H H = b."""
    return _product(states, _matrix(block_of(states.shape[-1]), states.device))


def coordinates(size: int, device: torch.device) -> Coordinates | None:
    """What `mixed` states of so many channels on a device are to those that they were; None for no channels."""
    if size == 0:
        return None
    block = block_of(size)
    return Coordinates(matrix=_matrix(block, device)[None], blocks=size // block)


def block_of(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def _product(states: Tensor, matrix: Tensor) -> Tensor:
    blocks = states.float().unflatten(-1, (-1, matrix.shape[0]))
    product: Tensor = blocks @ matrix
    return product.flatten(-2).to(states.dtype)


@cache
def _matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's: (size, size) float32 of 1 and -1, symmetric; made once for each device."""
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        return sent(matrix, device)
