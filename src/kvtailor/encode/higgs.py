"""Higgs: pairs of channels in points of a grid that is best for pairs of normal numbers, with one scale for a vector.

*Idea* After a random rotation channels are nearly independent normal numbers. Points in the plane cover a pair of them
better than levels of each alone: cells are hexagons and not squares, and no point stands in a corner where no pair is.
So a pair of as many bits loses less, 8 % in 2 bits to 18 % in 4, and nothing is fitted or calibrated.
*Paper* `malinovskii2024higgs` (arXiv 2411.17525), which has it for weights, with grids of n points for p numbers; here
p is 2 and n is 16, 64 or 256. Write it inside a rotation with signs: `hadamard(of=higgs(bits=4), signs=0)`.
*Source* The paper; kvtailor's own code. Grids are our own (`docs/write_grids.py`: Lloyd's rounds over a mesh, the best
of several beginnings with fixed seeds).
*Departs* The paper has one scale for 1,024 weights, here each key and each value has one, as `gaussian` has. A pair is
channel i and channel c - 1 - i: random signs do not take the covariance from a Hadamard rotation of channels that
differ in size, and such pairs have least of it (i and i + c / 2 lose a sixth more where sizes grow along the channels).
Of an odd number of channels the middle one has a pair of its own. `keep_norm` is `gaussian`'s.
*Cost* bits / 8 bytes for each element and one element for each vector. To encode takes 4^bits comparisons for each
pair. No kernel of the CPU reads the codes: at every step they become numbers, which rotated queries read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import ByBlocks, InBits
from kvtailor.ops.codes.grids import GridCodes, pairs_of
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Higgs", "HiggsSegment"]

_BITS = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class HiggsSegment(PairSegment):
    """Codes of a grid's points with one scale for each token."""

    codec = "higgs"
    kinds = (GridCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Higgs(ByBlocks, InBits, TwoSided, Codec):
    """Points of a grid for pairs of normal numbers.

    Attributes:
        bits: for each channel, 2 to 4; a pair's code has twice as many.
        key_bits: for each channel of a key, where it is to differ.
        value_bits: for each channel of a value, where it is to differ.
        keep_norm: a decoded vector has the norm that it had; else its points have the variance that they were made for.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    bits: int = 4
    key_bits: int | None = None
    value_bits: int | None = None
    keep_norm: bool = True
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = HiggsSegment
    examples: ClassVar[tuple[str, ...]] = ("higgs", "higgs(key_bits=3, value_bits=2, keep_norm=false)")

    def __post_init__(self) -> None:
        for name in ("bits", "key_bits", "value_bits"):
            bits = getattr(self, name)
            if not (bits is None and name != "bits") and bits not in _BITS:
                raise ValueError(f"higgs: {name} must be 2, 3 or 4, for which there are grids, found {bits}")
        self.check_tokens("higgs")

    @property
    def bears_offset(self) -> bool:
        """Where keys are coded: in 8 bits."""
        return not self.codes_keys or self.holds_offset

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> GridCodes:
        return GridCodes.of(keys, self.bits_of_keys, keep_norm=self.keep_norm)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> GridCodes:
        return GridCodes.of(values, self.bits_of_values, keep_norm=self.keep_norm)

    def key_bytes(self, size: int, element_size: int) -> float:
        """The codes of the pairs and the scale."""
        return packed_size(pairs_of(size), 2 * self.bits_of_keys) + element_size

    def value_bytes(self, size: int, element_size: int) -> float:
        """As `key_bytes`."""
        return packed_size(pairs_of(size), 2 * self.bits_of_values) + element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """For each pair 5 for each point, its product, less a constant, and the largest; 3 for each value, its square,
        the sum and the division by the norm; 2 more where the norm is kept."""
        points = (4**self.bits_of_keys * pairs_of(key_size) if self.codes_keys else 0) + (
            4**self.bits_of_values * pairs_of(value_size) if self.codes_values else 0
        )
        return tokens * (5 * points + (5 if self.keep_norm else 3) * self.sizes_coded(key_size, value_size))

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: times the scale."""
        return tokens * self.sizes_coded(key_size, value_size)
