"""Gaussian: each key and each value in levels that are best for normal numbers, with one scale.

*Idea* After a random rotation each channel of a vector is a sum of all, and nearly a normal number, whatever the vector
was. The levels with the least squared error for such numbers are known beforehand, so that a vector stores its norm and
its codes, and nothing is fitted or calibrated.
*Paper* `zandieh2025turboquant` (arXiv 2504.19874), the form for squared errors; `malinovskii2024higgs` (arXiv
2411.17525) has the same for weights. Write it inside a rotation with signs: `hadamard(of=gaussian(bits=4), signs=0)`,
the presets `turboquant4`, `turboquant3` and `turboquant2`.
*Source* The papers; kvtailor's own code.
*Departs* The rotation is `hadamard`'s, not a dense random one. Levels are those of the normal distribution, of which a
channel of a rotated vector of c channels is off by some 1 / c. The paper's second stage (its section 3.2, after QJL:
`zandieh2024qjl`, arXiv 2406.03482) is left out unless `qjl` asks for it: codes of a bit less, the signs of a random
projection of what they leave, and its norm. Products with it are unbiased, and their variance is larger; several groups
found that it harms (docs/measured.md has what was found here). The residual is that of what is stored, so that rounded
scales and `keep_norm` leave products unbiased.
*Cost* bits / 8 bytes for each element and one element for each vector, two with `qjl`. A decoded token reads codes of 4
bits as they lie on a CPU, others 16 tokens at a time; more tokens at once decode the segment, with a look-up for each
element. With `qjl` codes and signs become twice as many numbers at every step, which a projected query reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import ByBlocks, InBits
from kvtailor.ops.codes.gaussian import GaussianCodes, ResidualCodes
from kvtailor.ops.codes.quant import packed_size
from kvtailor.ops.dispatch import quantiser
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Gaussian", "GaussianSegment"]


@dataclass(frozen=True, kw_only=True)
class GaussianSegment(PairSegment):
    """Codes of fixed levels with one scale for each token, and signs of what they leave where they are asked for."""

    codec = "gaussian"
    kinds = (GaussianCodes, ResidualCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Gaussian(ByBlocks, InBits, TwoSided, Codec):
    """Fixed levels of the normal distribution.

    Attributes:
        bits: of a code, 1 to 8.
        key_bits: of a key's code, where it is to differ.
        value_bits: of a value's code, where it is to differ.
        keep_norm: a decoded vector has the norm that it had; else its levels have the variance that they were made for.
            With `qjl` the same of the levels alone.
        qjl: the sides whose codes have a bit less, for the signs of a random projection of what they leave.
        projection: random state of that projection.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    bits: int = 4
    key_bits: int | None = None
    value_bits: int | None = None
    keep_norm: bool = True
    qjl: Literal["none", "both", "keys", "values"] = "none"
    projection: int = 0
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = GaussianSegment
    examples: ClassVar[tuple[str, ...]] = (
        "gaussian",
        "gaussian(key_bits=4, value_bits=3, keep_norm=false)",
        "gaussian(qjl=both)",
    )

    def __post_init__(self) -> None:
        self.check_bits("gaussian", lambda name, bits: "; the paper's are 2, 3 and 4")
        if self.qjl not in ("none", self.only) and "both" not in (self.qjl, self.only):
            raise ValueError(f"gaussian: only={self.only} leaves qjl={self.qjl} nothing to code: leave one of them out")
        for projects, name, bits in (
            (self._projects_keys, "keys", self.bits_of_keys),
            (self._projects_values, "values", self.bits_of_values),
        ):
            if projects and bits < 2:
                raise ValueError(f"gaussian: qjl takes one bit of a code, and {name} have bits=1: write 2 or more")
        self.check_tokens("gaussian")

    @property
    def bears_offset(self) -> bool:
        """Where keys are coded: in 8 bits."""
        return not self.codes_keys or self.holds_offset

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> GaussianCodes | ResidualCodes:
        return self._coded(keys, self.bits_of_keys, self._projects_keys)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> GaussianCodes | ResidualCodes:
        return self._coded(values, self.bits_of_values, self._projects_values)

    def key_bytes(self, size: int, element_size: int) -> float:
        """The code and the scale, and where it is asked for the signs and the norm of the residual."""
        return _bytes_of(size, element_size, self.bits_of_keys, self._projects_keys)

    def value_bytes(self, size: int, element_size: int) -> float:
        """As `key_bytes`."""
        return _bytes_of(size, element_size, self.bits_of_values, self._projects_values)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """3 for each value, its square, the sum and the division by the norm; 2 more where the norm is kept.

        With `qjl` besides 2 c for each of c values, the product with S, and 3: what is left, its square, the sum.
        """
        each = (5 if self.keep_norm else 3) * self.sizes_coded(key_size, value_size)
        return tokens * (each + sum(2 * c * c + 3 * c for c in self._projected(key_size, value_size)))

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value, times the scale; with `qjl` 2 c + 2 more: the product with S, times the norm, the sum."""
        each = self.sizes_coded(key_size, value_size)
        return tokens * (each + sum(2 * c * c + 2 * c for c in self._projected(key_size, value_size)))

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int:
        """1 for each value; with `qjl` 3 more, its sign times the norm and 2 of attention; 2 c^2 + c for each query."""
        projected = self._projected(key_size, value_size)
        return tokens * (self.sizes_coded(key_size, value_size) + 3 * sum(projected)) + queries * sum(
            2 * c * c + c for c in projected
        )

    @property
    def _projects_keys(self) -> bool:
        return self.codes_keys and self.qjl in ("both", "keys")

    @property
    def _projects_values(self) -> bool:
        return self.codes_values and self.qjl in ("both", "values")

    def _projected(self, key_size: int, value_size: int) -> tuple[int, ...]:
        sides = (self._projects_keys, key_size), (self._projects_values, value_size)
        return tuple(size for projects, size in sides if projects)

    def _coded(self, states: Tensor, bits: int, projects: bool) -> GaussianCodes | ResidualCodes:
        if projects:
            return ResidualCodes.of(states, bits, self.projection, keep_norm=self.keep_norm)
        return quantiser(states).bell(states, bits, keep_norm=self.keep_norm)


def _bytes_of(size: int, element_size: int, bits: int, projects: bool) -> float:
    if projects:
        return packed_size(size, bits - 1) + packed_size(size, 1) + 2 * element_size
    return packed_size(size, bits) + element_size
