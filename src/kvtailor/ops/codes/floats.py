"""Small floats with scales for blocks of neighbouring channels: the element formats, and the encodings of one side.

A number is an element times the scale of its block. Elements are 4-bit floats (E2M1) or 8-bit ones (E4M3, E5M2), as the
OCP Microscaling specification (MX, version 1.0, section 5.3) defines them; they are rounded to nearest, halfway to the
even code, and what is larger than the largest element becomes that one. The last block of a token holds what channels
are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvtailor.ops import huge_pages
from kvtailor.ops.codes.quant import MOST_E4M3, count_below, pack, packed_size, scale_to, to_e4m3, unpack
from kvtailor.ops.codes.sides import padded_groups
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded, TimeGrouped
from kvtailor.types.late_checks import send

__all__ = ["ELEMENTS", "ElementFormat", "MxCodes", "NvCodes", "element_codes", "exponent_scales", "levels_of"]

# Elements that are worked on at once.
_PIECE = 1 << 20
# An exponent of the format E8M0 is stored as itself plus this.
_BIAS = 127


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A float of few bits.

    Attributes:
        bits: of a code: the sign, the exponent, the mantissa.
        most: the largest element.
        most_exponent: floor(log2(most)).
        dtype: of torch, which has it where it takes a whole byte; None for E2M1.
    """

    bits: int
    most: float
    most_exponent: int
    dtype: torch.dtype | None = None


ELEMENTS = {
    "e2m1": ElementFormat(bits=4, most=6.0, most_exponent=2),
    "e4m3": ElementFormat(bits=8, most=MOST_E4M3, most_exponent=8, dtype=torch.float8_e4m3fn),
    "e5m2": ElementFormat(bits=8, most=57344.0, most_exponent=15, dtype=torch.float8_e5m2),
}
"""The element formats by name."""
# The magnitudes of E2M1: code 2 e + m is 2^(e - 1) (1 + m / 2), and m / 2 where e is 0. Bit 3 is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def levels_of(element: str) -> Tensor:
    """Return what each code of an element format stands for: (2^bits,) float32 on the CPU, NaN and infinities as 0.

    Args:
        element: one of `ELEMENTS`.
    """
    kind = ELEMENTS[element].dtype
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        if kind is None:
            positive = torch.tensor(_E2M1, dtype=torch.float32)
            return torch.cat([positive, -positive])
        levels = torch.arange(256, dtype=torch.uint8).view(kind).float()
        # No state has these codes; so a table of finite numbers is enough for all of them.
        return torch.where(levels.isfinite(), levels, 0.0)


@cache
def _levels_on(element: str, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return send(levels_of(element), device)


@cache
def _borders(device: torch.device) -> Tensor:
    """The magnitudes at which the next code of E2M1 begins, less the least difference where the tie goes up."""
    with torch.inference_mode(False):
        levels = torch.tensor(_E2M1, dtype=torch.float32)
        middle = (levels[1:] + levels[:-1]) / 2
        # Between the codes i and i + 1 the even one takes the middle: the upper one, where i is odd.
        middle[1::2] = torch.nextafter(middle[1::2], middle.new_zeros(()))
        return send(middle, device)


def element_codes(x: Tensor, element: str) -> Tensor:
    """Return the codes of the elements nearest to x, ties to the even code, as uint8 of x's shape.

    Args:
        x: float32, finite; magnitudes above the largest element become that one.
        element: one of `ELEMENTS`.
    """
    kind = ELEMENTS[element]
    if kind.dtype is not None:
        return x.clamp(-kind.most, kind.most).to(kind.dtype).view(torch.uint8)
    return count_below(x.abs(), _borders(x.device)) | (x.signbit().to(torch.uint8) << 3)


def exponent_scales(codes: Tensor) -> Tensor:
    """Return the powers of two that codes (uint8) of the format E8M0 stand for, as float32: 2^(code - 127)."""
    bits = codes.to(torch.int32) << 23
    # 2^-127 is below the normal numbers, whose exponents those bits are.
    return torch.where(codes > 0, bits, 1 << 22).view(torch.float32)


def _largest(states: Tensor, block: int) -> Tensor:
    """(..., ceil(c / block)) float32 largest magnitudes of the blocks of states (..., c)."""
    magnitudes = states.abs().float()
    missing = -states.shape[-1] % block
    if missing:
        magnitudes = torch.nn.functional.pad(magnitudes, (0, missing))
    top: Tensor = magnitudes.unflatten(-1, (-1, block)).amax(-1)
    return top


def _by_channel(scales: Tensor, block: int, size: int) -> Tensor:
    """(..., size): for each channel the scale of its block, of scales (..., ceil(size / block))."""
    return scales.repeat_interleave(block, -1)[..., :size]


@dataclass(frozen=True, kw_only=True)
class MxCodes(Coded):
    """Elements whose blocks have a power of two as their scale.

    Attributes:
        element: one of `ELEMENTS`.
        block: channels that share a scale.
        size: c.
        dtype: name of the cache's dtype, for instance "bfloat16".
        codes: (m, s, bytes) uint8, packed along the channels.
        scales: (m, s, ceil(c / block)) uint8 of the format E8M0.
    """

    element: str
    block: int
    size: int
    dtype: str
    codes: Tensor
    scales: Tensor
    of_tokens = ("codes", "scales")

    @classmethod
    def of(cls, states: Tensor, element: str, block: int) -> MxCodes:
        """Codes of finite states (m, s, c); the scale of a block is 2^(floor(log2(largest)) - most_exponent)."""
        lanes, slots, size = states.shape
        kind = ELEMENTS[element]
        codes = torch.zeros((lanes, slots, packed_size(size, kind.bits)), dtype=torch.uint8, device=states.device)
        scales = torch.zeros((lanes, slots, -(-size // block)), dtype=torch.uint8, device=states.device)
        for at in pieces(lanes, slots, size, _PIECE):
            part = states[at].float()
            top = _largest(part, block)
            # frexp gives magnitudes from 0.5 to 1; a block of zeros gets the least scale.
            exponent = top.frexp().exponent - 1 - kind.most_exponent
            exponent = torch.where(top > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
            scale = (exponent + _BIAS).to(torch.uint8)
            scales[at] = scale
            # A power of two: the quotient is exact, but where it falls below the normal numbers.
            found = element_codes(part / _by_channel(exponent_scales(scale), block, size), element)
            codes[at] = pack(found, kind.bits)
        name = str(states.dtype).removeprefix("torch.")
        return cls(element=element, block=block, size=size, dtype=name, codes=codes, scales=scales)

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.BLOCKS,
            codes=self.codes,
            size=self.size,
            dtype=getattr(torch, self.dtype),
            bits=ELEMENTS[self.element].bits,
            step=self.scales,
            block=self.block,
            levels=levels_of(self.element),
            element=self.element,
            exponents=True,
        )

    def decode(self) -> Tensor:
        return _decoded(self, lambda at: exponent_scales(self.scales[at]))

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        return lanes * slots * (packed_size(self.size, ELEMENTS[self.element].bits) + -(-self.size // self.block))


@dataclass(frozen=True, kw_only=True)
class NvCodes(TimeGrouped):
    """Elements of E2M1 whose blocks have a scale of E4M3, and a run of tokens one of float32 above those.

    Attributes:
        block: channels that share a scale.
        size: c.
        dtype: name of the cache's dtype, for instance "bfloat16".
        codes: (m, s, bytes) uint8, packed along the channels.
        scales: (m, s, ceil(c / block)) uint8, bits of E4M3.
        tensor_scale: (m, ceil(s / group), 1) float32; with `row` (rows, 1).
    """

    block: int
    size: int
    dtype: str
    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    of_tokens = ("codes", "scales")
    shared = ("tensor_scale",)
    dtypes = {**TimeGrouped.dtypes, "tensor_scale": (torch.float32,)}
    element = "e2m1"

    @classmethod
    def of(cls, states: Tensor, block: int, group: int) -> NvCodes:
        """Codes of finite states (m, s, c), `group` tokens to a float32 scale.

        That scale is largest / (448 * 6), so that the block of the largest number has the largest scale of E4M3; a
        block's is the E4M3 number nearest to its largest / 6 over that scale.
        """
        lanes, slots, size = states.shape
        most = ELEMENTS["e2m1"].most
        top = padded_groups(states, group).unflatten(1, (-1, group)).abs().amax((2, 3)).float()
        tensor_scale = scale_to(top, MOST_E4M3 * most)[..., None]
        codes = torch.zeros((lanes, slots, packed_size(size, 4)), dtype=torch.uint8, device=states.device)
        scales = torch.zeros((lanes, slots, -(-size // block)), dtype=torch.uint8, device=states.device)
        for lane, slot in pieces(lanes, slots, size, _PIECE, multiple=group):
            part = states[lane, slot].float()
            runs = tensor_scale[lane, slot.start // group : -(-slot.stop // group)]
            outer = runs.repeat_interleave(group, 1)[:, : part.shape[1]]
            scale = to_e4m3(_largest(part, block) / most / outer)
            scales[lane, slot] = scale
            each = _by_channel(_levels_on("e4m3", scale.device)[scale.int()] * outer, block, size)
            # A block that is too small for any scale has the scale 0 and codes of 0.
            codes[lane, slot] = pack(element_codes(torch.where(each > 0, part / each, 0.0), "e2m1"), 4)
        name = str(states.dtype).removeprefix("torch.")
        return cls(
            group=group, block=block, size=size, dtype=name, codes=codes, scales=scales, tensor_scale=tensor_scale
        )

    @cached_property
    def code_layout(self) -> CodeLayout:
        return CodeLayout(
            kind=CodeKind.BLOCKS,
            codes=self.codes,
            size=self.size,
            dtype=getattr(torch, self.dtype),
            bits=ELEMENTS[self.element].bits,
            step=self.scales,
            row=self.row,
            group=self.group,
            block=self.block,
            levels=levels_of(self.element),
            element=self.element,
            outer=self.tensor_scale,
        )

    def decode(self) -> Tensor:
        levels = _levels_on("e4m3", self.scales.device)
        outer = self.per_token("tensor_scale")[:, : self.codes.shape[1]]
        return _decoded(self, lambda at: levels[self.scales[at].int()] * outer[at])

    def closed_form_bytes(self, lanes: int, slots: int) -> int:
        each = packed_size(self.size, 4) + -(-self.size // self.block)
        return lanes * slots * each + 4 * self.groups(lanes, slots) + self.index_bytes(lanes, slots)


def _decoded(side: MxCodes | NvCodes, scales_at: Callable[[tuple[slice, slice]], Tensor]) -> Tensor:
    """(m, s, c) in the cache's dtype; `scales_at` gives the float32 scales of the blocks of some lanes and slots."""
    lanes, slots = side.codes.shape[:2]
    levels, bits = _levels_on(side.element, side.codes.device), ELEMENTS[side.element].bits
    like = side.codes.new_empty((), dtype=getattr(torch, side.dtype))
    states = huge_pages.read_buffer(like, (lanes, slots, side.size))
    for at in pieces(lanes, slots, side.size, _PIECE):
        index = unpack(side.codes[at], bits, side.size).int()
        states[at] = levels[index].mul_(_by_channel(scales_at(at), side.block, side.size)).to(states.dtype)
    return states
