"""Quantisers of runs that share a scale, 8-bit floats, and packing of small codes into bytes along the channels.

A group is a run along one dimension that shares a scale, and where it is asymmetric a minimum. The error of a value is
at most half a step, plus the rounding of step and minimum to the cache's dtype. The step is (max - min) / (2^bits - 1),
or, symmetric, max |x| / (2^(bits - 1) - 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "FLAT",
    "MOST_E4M3",
    "count_below",
    "dequantise",
    "from_e4m3",
    "largest_divisor",
    "largest_step",
    "pack",
    "packed_size",
    "quantise",
    "quantise_symmetric",
    "scale_to",
    "to_e4m3",
    "unpack",
]

MOST_E4M3 = 448.0
# The step of a group whose values are all equal: any would do, and this one, the least normal float16, is no larger
# than most others, beside which a kernel may have to round it.
FLAT = 2.0**-14
# A pass for each of so many takes a third of the time of a search for each number, on a CPU.
_FEW_BORDERS = 15


def quantise(x: Tensor, bits: int, dim: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of groups along one dimension.

    Args:
        x: finite, any shape; the size along `dim` is a multiple of `group`.
        bits: of a code, 1 to 8.
        dim: along which groups run.
        group: values that share one scale and one minimum.

    Returns:
        codes, uint8 of x's shape; step and low, of x's dtype and shape but for `dim`, which counts groups. A group of
        equal values has the step `FLAT` and the codes 0.
    """
    dim = dim % x.ndim
    if x.shape[dim] % group:
        found = f"{x.shape[dim]} values along dimension {dim} of {tuple(x.shape)}"
        raise ValueError(f"{found} do not make groups of {group}; pad them, or use a group that divides their number")
    grouped = x.unflatten(dim, (-1, group))
    low, high = grouped.amin(dim + 1), grouped.amax(dim + 1)
    # Step and minimum are rounded to the dtype in which they are stored before codes are made from them.
    step = ((high.float() - low.float()) / (2**bits - 1)).to(x.dtype)
    step = torch.where(step > 0, step, torch.full_like(step, FLAT))
    codes = grouped.float().sub(low.float().unsqueeze(dim + 1)).div_(step.float().unsqueeze(dim + 1))
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(dim, dim + 1), step, low


def quantise_symmetric(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of vectors along the last dimension around zero.

    Args:
        x: (..., c) finite.
        bits: of a code, 2 to 8.

    Returns:
        codes (..., c) uint8, from 0 to 2^bits - 2, of which 2^(bits - 1) - 1 stands for zero; step (..., 1) of x's
        dtype, `FLAT` for a vector of zeros.
    """
    most = 2 ** (bits - 1) - 1
    step = scale_to(x.abs().amax(-1, keepdim=True), most)
    codes = (x.float() / step.float()).round_().clamp_(-most, most).add_(most)
    return codes.to(torch.uint8), step


def scale_to(top: Tensor, most: float) -> Tensor:
    """top / most in top's dtype, such that most times it is no infinity; `FLAT` where that is 0.

    Args:
        top: largest magnitudes.
        most: the number that stands for each of them.
    """
    scale = (top.float() / most).clamp(max=largest_step(top.dtype, most)).to(top.dtype)
    return torch.where(scale > 0, scale, torch.full_like(scale, FLAT))


def largest_step(dtype: torch.dtype, most: float) -> float:
    """The largest step of which `most` are no infinity of this dtype."""
    info = torch.finfo(dtype)
    return min(info.max, torch.finfo(torch.float32).max) / most * (1 - info.eps)


def dequantise(codes: Tensor, step: Tensor, low: Tensor | None, dim: int, zero: int = 0) -> Tensor:
    """The values of codes, in step's dtype.

    Args:
        codes: uint8.
        step, low: of the shape of codes but for `dim`, which counts groups; low None where groups have no minimum.
        dim: along which groups run.
        zero: the code of zero where groups have no minimum.
    """
    dim = dim % codes.ndim
    grouped = codes.unflatten(dim, (step.shape[dim], -1)).to(step.dtype)
    if low is None:
        centred: Tensor = grouped.sub_(zero).mul_(step.unsqueeze(dim + 1))
        return centred.flatten(dim, dim + 1)
    # One operation, so that 16-bit dtypes round once and code * step cannot overflow before the minimum is added.
    values = torch.addcmul(low.unsqueeze(dim + 1), grouped, step.unsqueeze(dim + 1))
    return values.flatten(dim, dim + 1)


def count_below(x: Tensor, borders: Tensor) -> Tensor:
    """Return how many of the borders lie below each number, as uint8 of x's shape.

    Args:
        x: float32, no NaN.
        borders: (at most 255,) float32, ascending, on the device of x.
    """
    if x.device.type != "cpu" or len(borders) > _FEW_BORDERS:
        return torch.bucketize(x, borders, out_int32=True).to(torch.uint8)
    count = torch.zeros(x.shape, dtype=torch.uint8)
    above = torch.empty(x.shape, dtype=torch.bool)
    for border in borders.tolist():
        torch.gt(x, border, out=above)
        count += above.view(torch.uint8)
    return count


def to_e4m3(x: Tensor) -> Tensor:
    """8-bit floats (4 bits of exponent, 3 of mantissa, at most 448) nearest to x, as uint8; larger x are cut to 448."""
    return x.clamp(-MOST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that `to_e4m3` gave, times a scale that broadcasts to them, in the scale's dtype."""
    # As the high bits of a float16 they are the same numbers over 256: its exponent is biased by 15 and not by 7. On a
    # CPU that takes a quarter of the time of torch's own conversion (8.4 M numbers: 57 ms against 221 ms).
    halves = ((codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)).view(torch.float16)
    return halves.to(scale.dtype) * (scale * 256)


def packed_size(size: int, bits: int) -> int:
    """Bytes that `size` codes take: those of each plane (see `pack`), the last byte of a plane padded."""
    return sum(-(-size * width // 8) for width, _ in _planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes (..., c) along the last dimension, so that rows (tokens) can still be gathered.

    A code is cut into planes of 4, 2 and 1 bits, as its number of bits is a sum of powers of two: 3 bits are a plane of
    the low 2 and, behind it, a plane of the third. So 8 codes of 3 bits take 3 bytes.

    Args:
        codes: uint8 below 2^bits.
        bits: 1 to 8.

    Returns:
        (..., packed_size(c, bits)) uint8. Byte j of a plane of c' bytes holds the bits of the codes j, j + c',
        j + 2 c', ..., lowest first, so that unpacking writes runs and not every other value.
    """
    planes = _planes(bits)
    if len(planes) == 1:
        return _pack_plane(codes, bits)
    return torch.cat([_pack_plane((codes >> shift) & (2**width - 1), width) for width, shift in planes], -1)


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Codes (..., size) uint8 of the bytes that `pack` made."""
    (width, _), *rest = _planes(bits)
    end = packed_size(size, width)
    codes = _unpack_plane(packed[..., :end], width, size)
    for width, shift in rest:
        first, end = end, end + packed_size(size, width)
        codes |= _unpack_plane(packed[..., first:end], width, size) << shift
    return codes


def _planes(bits: int) -> list[tuple[int, int]]:
    """Width and lowest bit of each plane; for 1, 2, 4 and 8 bits there is one, the whole code."""
    found, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((width, shift))
            shift += width
    return found


def _pack_plane(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    each, size = 8 // bits, -(-codes.shape[-1] * bits // 8)
    missing = each * size - codes.shape[-1]
    if missing:
        codes = torch.cat([codes, codes.new_zeros((*codes.shape[:-1], missing))], -1)
    planes = codes.unflatten(-1, (each, size))
    packed: Tensor = planes[..., 0, :].clone(memory_format=torch.contiguous_format)
    for i in range(1, each):
        packed |= planes[..., i, :] << (i * bits)
    return packed


def _unpack_plane(packed: Tensor, bits: int, size: int) -> Tensor:
    if bits == 8:
        return packed
    each = 8 // bits
    if packed.device.type == "cpu" and each > 2 and packed.shape[-1] % 8 == 0:
        # The runs that unpacking writes are short here. Eight codes at a time, of all tokens, are made one behind the
        # other and put into place after; what a shift fills in from the left is masked away.
        # Flat: a dimension of one, contiguous as it is, may have a stride that no eight bytes divide.
        whole = packed.contiguous().view(-1)
        words = (whole.clone() if whole.storage_offset() % 8 else whole).view(torch.int64)
        words = words.view(*packed.shape[:-1], packed.shape[-1] // 8)
        mask = int.from_bytes(bytes([2**bits - 1] * 8), "little")
        return torch.cat([((words >> i * bits) & mask).view(torch.uint8) for i in range(each)], -1)[..., :size]
    codes = packed.new_empty((*packed.shape[:-1], each, packed.shape[-1]))
    for i in range(each):
        torch.bitwise_and(packed >> (i * bits), 2**bits - 1, out=codes[..., i, :])
    unpacked: Tensor = codes.flatten(-2)[..., :size]
    return unpacked


def largest_divisor(size: int, most: int) -> int:
    """The largest divisor of `size` that is not above `most`."""
    return next(group for group in range(min(size, most), 0, -1) if size % group == 0)
