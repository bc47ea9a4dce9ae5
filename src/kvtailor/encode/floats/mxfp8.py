"""MXFP8: keys and values in 8-bit floats (E4M3 or E5M2), 32 channels to a scale that is a power of two.

*Idea* As `mxfp4` with elements of 8 bits: 3 bits of mantissa keep some 3 % of every number whatever its size, and a
scale for each block of channels leaves the elements' own exponents for what differs within the block.
*Paper* `ocp2023mx`, sections 5 and 6.3; `rouhani2023microscaling` (arXiv 2310.10537) tries the format, and
`micikevicius2022fp8` (arXiv 2209.05433) has the elements.
*Source* The specifications; kvtailor's own code.
*Departs* Nothing known from the specification: the scale is 2^(floor(log2(largest)) - 8), for E5M2 - 15; elements are
rounded to nearest with ties to even, and what lies above the largest becomes the largest. Of a head size that 32 does
not divide, the last block is shorter. `fp8` has one scale for a head's run of tokens instead, in the cache's dtype.
*Cost* 8.25 bits for each element of a head size that 32 divides; a decoded token reads the codes on a CPU, 16 tokens at
a time into floats; more tokens at once decode the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides
from kvtailor.encode.floats.in_blocks import FloatsInBlocks
from kvtailor.ops.codes.floats import MxCodes
from kvtailor.ops.segments.coded import PairSegment, Whole

__all__ = ["MxFp8", "MxFp8Segment"]

_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class MxFp8Segment(PairSegment):
    """8-bit floats with a power of two for each block of channels."""

    codec = "mxfp8"
    kinds = (MxCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class MxFp8(FloatsInBlocks, Codec):
    """E4M3 or E5M2 with scales of E8M0.

    Attributes:
        element: e4m3 has 3 bits of mantissa and the numbers from 2^-9 to 448, e5m2 has 2 and those from 2^-16 to 57344.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    element: Literal["e4m3", "e5m2"] = "e4m3"
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = MxFp8Segment
    examples: ClassVar[tuple[str, ...]] = ("mxfp8", "mxfp8(element=e5m2)")

    def __post_init__(self) -> None:
        if self.element not in ("e4m3", "e5m2"):
            raise ValueError(f"mxfp8: element must be e4m3 or e5m2, found {self.element!r}")
        self.check_tokens("mxfp8")

    @property
    def bears_offset(self) -> bool:
        """A float's error is a share of its own channel."""
        return True

    def coded(self, states: Tensor) -> MxCodes:
        return MxCodes.of(states, self.element, _BLOCK)

    def bytes_of(self, size: int) -> float:
        """A byte for each channel, and a byte for each block."""
        return size + -(-size // _BLOCK)
