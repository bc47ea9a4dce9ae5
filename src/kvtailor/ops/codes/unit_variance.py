"""Vectors brought to a mean square of 1, for codes that are made for numbers of variance 1; and the scale back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["of_unit_variance", "scale_back", "within"]


def of_unit_variance(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors (..., c) float32 whose mean square is 1, and their lengths in two factors (..., 1): norm and top.

    Args:
        states: (..., c), finite. A vector of zeros stays one, of norm 0.
    """
    part = states.float()
    # The largest number first: the squares of large states overflow float32.
    top = part.abs().amax(-1, keepdim=True)
    top = torch.where(top > 0, top, 1.0)
    part = part / top
    norm = part.norm(dim=-1, keepdim=True)
    return part * (math.sqrt(states.shape[-1]) / torch.where(norm > 0, norm, 1.0)), norm, top


def scale_back(norm: Tensor, top: Tensor, made: Tensor | float, dtype: torch.dtype) -> Tensor:
    """(..., 1): what gives vectors of the length `made` the length norm * top, in a cache's dtype; 0 for zeros."""
    return within(norm / made * top, dtype)


def within(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 numbers in a cache's dtype; its largest in place of any beyond it."""
    # Float64 has room for more than float32 can be asked to keep below.
    most = min(torch.finfo(dtype).max, torch.finfo(numbers.dtype).max)
    return numbers.clamp(-most, most).to(dtype)
