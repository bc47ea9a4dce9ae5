"""Gaussian: each key and each value in levels that are best for normal numbers, with one scale.

*Idea* After a random rotation each channel of a vector is a sum of all, and nearly a normal number, whatever the vector
was. The levels with the least squared error for such numbers are known beforehand, so that a vector stores its norm and
its codes, and nothing is fitted or calibrated.
*Paper* `zandieh2025turboquant` (arXiv 2504.19874), the form for squared errors; `malinovskii2024higgs` (arXiv
2411.17525) has the same for weights. Write it inside a rotation with signs: `hadamard(of=gaussian(bits=4), signs=0)`,
the presets `turboquant4`, `turboquant3` and `turboquant2`.
*Source* The papers; kvtailor's own code.
*Departs* The rotation is `hadamard`'s, not a dense random one. Levels are those of the normal distribution, of which a
channel of a rotated vector of c channels is off by some 1 / c. The paper's second stage, signs of a random projection
of the residual (QJL), is not there: several groups found that it harms.
*Cost* bits / 8 bytes for each element and one element for each vector. A decoded token reads codes of 4 bits as they
lie on a CPU, others 16 tokens at a time; more tokens at once decode the segment, with a look-up for each element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings.by_blocks import ByBlocks
from kvtailor.encode.settings.in_bits import InBits
from kvtailor.ops.codes.gaussian import GaussianCodes
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Gaussian", "GaussianSegment"]


@dataclass(frozen=True, kw_only=True)
class GaussianSegment(PairSegment):
    """Codes of fixed levels with one scale for each token."""

    codec = "gaussian"
    kinds = (GaussianCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Gaussian(ByBlocks, InBits, TwoSided, Codec):
    """Fixed levels of the normal distribution.

    Attributes:
        bits: of a code, 1 to 8.
        key_bits: of a key's code, where it is to differ.
        value_bits: of a value's code, where it is to differ.
        keep_norm: a decoded vector has the norm that it had; else its levels have the variance that they were made for.
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
    segment = GaussianSegment
    examples: ClassVar[tuple[str, ...]] = (
        "gaussian",
        "gaussian(key_bits=4, value_bits=3, keep_norm=false)",
    )
    splits_heads: ClassVar[bool] = True
    latent_refusal: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        self.check_bits("gaussian", lambda name, bits: "; the paper's are 2, 3 and 4")
        self.check_tokens("gaussian")

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> GaussianCodes:
        return GaussianCodes.of(keys, self.bits_of_keys, keep_norm=self.keep_norm)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> GaussianCodes:
        return GaussianCodes.of(values, self.bits_of_values, keep_norm=self.keep_norm)

    def key_bytes(self, size: int, element_size: int) -> float:
        """The code and the scale."""
        return packed_size(size, self.bits_of_keys) + element_size

    def value_bytes(self, size: int, element_size: int) -> float:
        """The code and the scale."""
        return packed_size(size, self.bits_of_values) + element_size

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """3 for each value, its square, the sum and the division by the norm; 2 more where the norm is kept."""
        return (5 if self.keep_norm else 3) * tokens * self.sizes_coded(key_size, value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: times the scale."""
        return tokens * self.sizes_coded(key_size, value_size)
