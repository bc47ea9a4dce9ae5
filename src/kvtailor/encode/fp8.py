"""Fp8: keys and values in 8-bit floats (e4m3), with a scale for each head and run of tokens.

*Idea* A float keeps its relative precision at any size, about 6 % for 3 bits of mantissa, so that one scale can serve
channels and tokens of very different magnitudes. The scale takes the largest magnitude to 448, the largest e4m3.
*Paper* `micikevicius2022fp8` (arXiv 2209.05433) for the format; scales by head are common practice of serving systems.
*Source* The paper; kvtailor's own code.
*Departs* Systems calibrate one scale beforehand. Here it is that of the tokens themselves, `group` at a time, so that
nothing is clipped and no stored token has to be rewritten when a larger one comes. What is smaller than 2^-18 of the
largest becomes zero.
*Cost* 1 byte for each element and an element for `group` tokens; a decoded token reads them as they lie on a CPU,
more tokens at once decode the segment.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import ByGroups
from kvtailor.ops.codes.sides import FloatCodes
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Fp8", "Fp8Segment"]


@dataclass(frozen=True, kw_only=True)
class Fp8Segment(PairSegment):
    """8-bit floats with one scale for a run of tokens of a head."""

    codec = "fp8"
    kinds = (FloatCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Fp8(ByGroups, TwoSided, Codec):
    """e4m3.

    Attributes:
        group: tokens of a head that share a scale.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once; a multiple of `group`.
        only: what is encoded; the other side stays as it is.
    """

    group: int = 32
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = Fp8Segment

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"fp8: group must be 1 token or more, found {self.group}; 32 is usual")
        if self.recent < 0:
            raise ValueError(f"fp8: recent must be 0 or more tokens, found {self.recent}")
        self.check_groups("fp8")

    @property
    def bears_offset(self) -> bool:
        """A float's error is a share of its own channel."""
        return True

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> FloatCodes:
        return FloatCodes.of(keys, self.group)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> FloatCodes:
        return FloatCodes.of(values, self.group)

    def key_bytes(self, size: int, element_size: int) -> float:
        """A byte for each channel, and the scale shared by a group of tokens."""
        return size + element_size / self.group

    def value_bytes(self, size: int, element_size: int) -> float:
        """As `key_bytes`."""
        return self.key_bytes(size, element_size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value, and 1 for each scale."""
        sides = self.codes_keys + self.codes_values
        return tokens * self.sizes_coded(key_size, value_size) + -(-tokens // self.group) * sides

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: times the scale."""
        return tokens * self.sizes_coded(key_size, value_size)
