"""Vector: each key and each value in integers of its own scale, 2 to 8 bits.

*Idea* The plainest quantiser: a vector's largest magnitude becomes the largest code, and the rest is rounded. One
outlier channel coarsens the whole vector, which is what the other codecs of this stage avoid.
*Paper* None; `int8` and `int4` of the KV Plugin (mcgrof/knlp), and the values of MSpecKV.
*Source* A description of those; kvtailor's own code.
*Departs* 2, 3, 5, 6 and 7 bits, other bits for keys than for values, and the asymmetric form (a minimum beside the
step, so that no code is lost to a sign that a vector may not have) are kvtailor's additions. Tokens are encoded
`block_size` at a time.
*Cost* bits / 8 bytes for each element and one element for each vector, two where asymmetric; attention decodes the
segment at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import ByBlocks, InBits
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.codes.sides import TokenCodes
from kvtailor.ops.dispatch import quantiser
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Vector", "VectorSegment"]


@dataclass(frozen=True, kw_only=True)
class VectorSegment(PairSegment):
    """Codes with one scale for each token."""

    codec = "vector"
    kinds = (TokenCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Vector(ByBlocks, InBits, TwoSided, Codec):
    """One scale for each key and each value.

    Attributes:
        bits: of a code, 2 to 8; asymmetric codes may have 1.
        key_bits: of a key's code, where it is to differ.
        value_bits: of a value's code, where it is to differ.
        symmetric: codes are symmetric around zero, and there is no minimum.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    bits: int = 8
    key_bits: int | None = None
    value_bits: int | None = None
    symmetric: bool = True
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = VectorSegment

    def __post_init__(self) -> None:
        least = 2 if self.symmetric else 1
        self.check_bits("vector", lambda name, bits: "; asymmetric codes can have 1" if bits == 1 else "", least=least)
        self.check_tokens("vector")

    @property
    def bears_offset(self) -> bool:
        """Where keys are coded: in 8 bits."""
        return not self.codes_keys or self.holds_offset

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> TokenCodes:
        return self._coded(keys, self.bits_of_keys)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> TokenCodes:
        return self._coded(values, self.bits_of_values)

    def key_bytes(self, size: int, element_size: int) -> float:
        """The code and the scale."""
        return packed_size(size, self.bits_of_keys) + self._scales * element_size

    def value_bytes(self, size: int, element_size: int) -> float:
        """The code and the scale."""
        return packed_size(size, self.bits_of_values) + self._scales * element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value (divided by the step), 2 where asymmetric (less its minimum), and as many for each step."""
        vectors = self.codes_keys + self.codes_values
        return self._scales * tokens * (self.sizes_coded(key_size, value_size) + vectors)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value: less the zero and times the step, or times the step and plus the minimum."""
        return 2 * tokens * self.sizes_coded(key_size, value_size)

    @property
    def _scales(self) -> int:
        return 1 if self.symmetric else 2

    def _coded(self, states: Tensor, bits: int) -> TokenCodes:
        if self.symmetric:
            return quantiser(states).symmetric(states, bits)
        return quantiser(states).tokens(states, bits, states.shape[-1])
