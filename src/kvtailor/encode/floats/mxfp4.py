"""MXFP4: keys and values in 4-bit floats (E2M1), 32 channels to a scale that is a power of two.

*Idea* Channels of a token differ in size more than 4 bits can tell, so that every 32 of them have a scale of their own.
A power of two takes a byte, and to multiply by it adds to an exponent; elements are floats, whose steps are small where
most numbers are.
*Paper* `ocp2023mx`, sections 5 and 6.3; `rouhani2023microscaling` (arXiv 2310.10537) tries the format.
*Source* The specification; kvtailor's own code. Serving systems have it for caches (SGLang pull request 12612, with
blocks of 16).
*Departs* Nothing known from the specification: the scale is 2^(floor(log2(largest)) - 2), elements are rounded to
nearest with ties to the even code, and what lies above 6 becomes 6. So a block whose largest number lies from 6 to 8
times its scale has it cut, by a quarter at most. Of a head size that 32 does not divide, the last block is shorter.
*Cost* 4.25 bits for each element of a head size that 32 divides; a decoded token reads the codes as they lie on a CPU,
more tokens at once decode the segment. On the embedded model it loses most of all 4-bit codecs that were tried
(docs/measured.md); inside a rotation it loses less: `hadamard(of=mxfp4, signs=0)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides
from kvtailor.encode.floats.in_blocks import FloatsInBlocks
from kvtailor.ops.codes.floats import MxCodes
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.segments.coded import PairSegment, Whole

__all__ = ["MxFp4", "MxFp4Segment"]

_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class MxFp4Segment(PairSegment):
    """4-bit floats with a power of two for each block of channels."""

    codec = "mxfp4"
    kinds = (MxCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class MxFp4(FloatsInBlocks, Codec):
    """E2M1 with scales of E8M0.

    Attributes:
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = MxFp4Segment

    def __post_init__(self) -> None:
        self.check_tokens("mxfp4")

    def coded(self, states: Tensor) -> MxCodes:
        return MxCodes.of(states, "e2m1", _BLOCK)

    def bytes_of(self, size: int) -> float:
        """Half a byte for each channel, and a byte for each block."""
        return packed_size(size, 4) + -(-size // _BLOCK)
