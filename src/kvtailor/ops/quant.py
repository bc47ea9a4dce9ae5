"""Asymmetric group quantiser, and packing of small codes into bytes along the channels.

A group is a run along one dimension that shares a scale and a minimum. The error of a value is at most half a step,
the step being (max - min) / (2^bits - 1), plus the rounding of step and minimum to the cache's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantise", "largest_divisor", "pack", "packed_size", "quantise", "unpack"]


def quantise(x: Tensor, bits: int, dim: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups along one dimension.

    Args:
        x: finite, any shape; the size along `dim` is a multiple of `group`.
        bits: of a code, 1 to 8.
        dim: along which groups run.
        group: values that share one scale and one minimum.

    Returns:
        codes, uint8 of x's shape; step and low, of x's dtype and shape but for `dim`, which counts groups. A group of
        equal values has the step 1 and the codes 0.
    """
    dim = dim % x.ndim
    if x.shape[dim] % group:
        found = f"{x.shape[dim]} values along dimension {dim} of {tuple(x.shape)}"
        raise ValueError(f"{found} do not make groups of {group}; pad them, or use a group that divides their number")
    grouped = x.unflatten(dim, (-1, group))
    low, high = grouped.amin(dim + 1), grouped.amax(dim + 1)
    # Step and minimum are rounded to the dtype in which they are stored before codes are made from them.
    step = ((high.float() - low.float()) / (2**bits - 1)).to(x.dtype)
    step = torch.where(step > 0, step, torch.ones_like(step))
    codes = grouped.float().sub(low.float().unsqueeze(dim + 1)).div_(step.float().unsqueeze(dim + 1))
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(dim, dim + 1), step, low


def dequantise(codes: Tensor, step: Tensor, low: Tensor, dim: int) -> Tensor:
    """The values of codes, in step's dtype.

    Args:
        codes: uint8.
        step, low: of the shape of codes but for `dim`, which counts groups.
        dim: along which groups run.
    """
    dim = dim % codes.ndim
    grouped = codes.unflatten(dim, (step.shape[dim], -1)).to(step.dtype)
    # One operation, so that 16-bit dtypes round once and code * step cannot overflow before the minimum is added.
    values = torch.addcmul(low.unsqueeze(dim + 1), grouped, step.unsqueeze(dim + 1))
    return values.flatten(dim, dim + 1)


def packed_size(size: int, bits: int) -> int:
    """Bytes that `size` codes take, the last byte padded."""
    return -(-size * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes (..., c) along the last dimension, so that rows (tokens) can still be gathered.

    Args:
        codes: uint8 below 2^bits.
        bits: 1, 2, 4 or 8.

    Returns:
        (..., c') uint8, c' = packed_size(c, bits). Byte j holds the codes j, j + c', j + 2 c', ..., lowest bits first,
        so that unpacking writes runs and not every other value.
    """
    if bits == 8:
        return codes
    each, size = 8 // bits, packed_size(codes.shape[-1], bits)
    missing = each * size - codes.shape[-1]
    if missing:
        codes = torch.cat([codes, codes.new_zeros((*codes.shape[:-1], missing))], -1)
    planes = codes.unflatten(-1, (each, size))
    packed: Tensor = planes[..., 0, :].clone(memory_format=torch.contiguous_format)
    for i in range(1, each):
        packed |= planes[..., i, :] << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Codes (..., size) uint8 of the bytes that `pack` made."""
    if bits == 8:
        return packed
    each = 8 // bits
    codes = packed.new_empty((*packed.shape[:-1], each, packed.shape[-1]))
    for i in range(each):
        torch.bitwise_and(packed >> (i * bits), 2**bits - 1, out=codes[..., i, :])
    unpacked: Tensor = codes.flatten(-2)[..., :size]
    return unpacked


def largest_divisor(size: int, most: int) -> int:
    """The largest divisor of `size` that is not above `most`."""
    return next(group for group in range(min(size, most), 0, -1) if size % group == 0)
