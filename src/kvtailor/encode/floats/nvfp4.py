"""NVFP4: keys and values in 4-bit floats (E2M1), 16 channels to an 8-bit float as scale, and one float32 above those.

*Idea* Blocks of 16 channels are half as large as those of `mxfp4`, and their scale has 3 bits of mantissa, so that the
largest number of a block is nearly always the largest element: no power of two lies between. 8 bits do not hold every
size that a scale can have, hence one float32 above the scales of many blocks.
*Paper* `nvidia2025nvfp4` (arXiv 2509.25149), which has both scales.
*Source* The paper, and for caches the presets of NVIDIA's Model Optimizer; kvtailor's own code.
*Departs* Systems calibrate the float32 scale beforehand, one for the keys of a layer and one for its values. Here it is
that of the tokens themselves, for `group` tokens of a head, keys and values apart, as `fp8` has its scale: nothing is
clipped, nothing has to be calibrated, no stored token is rewritten when a larger one comes, and a row of a batch is
encoded as it would be alone, which one scale for all rows or heads would forbid. It costs 4 / `group` bytes a token.
A block whose largest number is below a 458,752nd of its run's (no scale of E4M3 is as small) becomes zeros. Of a head
size that 16 does not divide, the last block is shorter.
*Cost* 4.5 bits for each element of a head size that 16 divides, and the float32; a decoded token reads the codes as
they lie on a CPU, more tokens at once decode the segment. Tokens that an eviction moves later take 4 bytes more, a
number of their run. On the embedded model it lost 0.018 nats a token (0.001 to 0.042, twelve novels) more than
`vector(bits=4)`, and 0.029 (0.011 to 0.055) less inside a rotation: `hadamard(of=nvfp4, signs=0)`; docs/measured.md has
all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides
from kvtailor.encode.floats.in_blocks import FloatsInBlocks
from kvtailor.encode.settings import ByGroups
from kvtailor.ops.codes.floats import NvCodes
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.segments.coded import PairSegment, Whole

__all__ = ["NvFp4", "NvFp4Segment"]

_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class NvFp4Segment(PairSegment):
    """4-bit floats with an 8-bit float for each block of channels, and a float32 for each run of tokens."""

    codec = "nvfp4"
    kinds = (NvCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class NvFp4(ByGroups, FloatsInBlocks, Codec):
    """E2M1 with scales of E4M3 and float32.

    Attributes:
        group: tokens of a head that share a float32 scale.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once; a multiple of `group`.
        only: what is encoded; the other side stays as it is.
    """

    group: int = 32
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = NvFp4Segment

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"nvfp4: group must be 1 token or more, found {self.group}; 32 is usual")
        self.check_tokens("nvfp4")
        self.check_groups("nvfp4")

    def coded(self, states: Tensor) -> NvCodes:
        return NvCodes.of(states, _BLOCK, self.group)

    def bytes_of(self, size: int) -> float:
        """Half a byte for each channel, a byte for each block, and the float32 shared by a group of tokens."""
        return packed_size(size, 4) + -(-size // _BLOCK) + 4 / self.group

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value, and 2 for each block's scale: over 6, over the float32."""
        sides = (key_size if self.codes_keys else 0), (value_size if self.codes_values else 0)
        blocks = sum(-(-size // _BLOCK) for size in sides)
        return tokens * (sum(sides) + 2 * blocks)
