"""Ggml: keys and values in the block formats of a llama.cpp cache, q8_0, q5_1, q5_0, q4_1 and q4_0.

*Idea* A step for 32 neighbouring channels of a token follows them closer than one for the whole vector, and is a number
of 16 bits. This is what llama.cpp stores under `--cache-type-k` and `--cache-type-v`, so that what a type costs on a
model is measured here, on the same tokens as every other plan.
*Paper* None.
*Source* The functions `quantize_row_*_ref` of llama.cpp's `ggml-quants.c`; kvtailor's own code.
*Departs* llama.cpp turns keys and values of head sizes that 64 divides before it stores them: `hadamard(of=ggml)` does
that where the head size is 64, and above it turns values in larger blocks than llama.cpp does. Its rows hold all kv
heads of a token, so that of a head size that 32 does not divide blocks reach into the next head; here the last block of
a head is shorter. Steps above the largest float16 become that one. llama.cpp rounds every token as soon as it comes;
here blocks of `block_size` are, behind a prompt that was read whole.
*Cost* 8.5, 6, 5.5, 5 and 4.5 bits for each element. Attention decodes a few tokens at a time; it decodes the whole
segment at every step where the head size is no multiple of 32, and codes of 5 bits on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvtailor.encode.contract import Codec, Sides, TwoSided
from kvtailor.encode.settings import ByBlocks
from kvtailor.ops.codes.ggml import FORMATS, GgmlCodes
from kvtailor.ops.segments.coded import PairSegment, Whole
from kvtailor.types import Layout

__all__ = ["Ggml", "GgmlSegment"]

Format = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


@dataclass(frozen=True, kw_only=True)
class GgmlSegment(PairSegment):
    """Codes with a step, and a minimum, for each block of channels."""

    codec = "ggml"
    kinds = (GgmlCodes, Whole)


@dataclass(frozen=True, kw_only=True)
class Ggml(ByBlocks, TwoSided, Codec):
    """llama.cpp's block formats.

    Attributes:
        type: the format: q8_0, q5_0 and q4_0 have a step for a block, q5_1 and q4_1 a minimum beside it.
        key_type: of keys, where it is to differ.
        value_type: of values, where it is to differ.
        recent: newest tokens that stay in full precision.
        block_size: tokens that are encoded at once.
        only: what is encoded; the other side stays as it is.
    """

    type: Format = "q8_0"
    key_type: Format | None = None
    value_type: Format | None = None
    recent: int = 0
    block_size: int = 128
    only: Sides = "both"
    segment = GgmlSegment
    examples: ClassVar[tuple[str, ...]] = (
        "ggml",
        "ggml(type=q4_0)",
        "ggml(key_type=q5_1, value_type=q4_1)",
        "ggml(type=q5_0, only=values)",
    )

    def __post_init__(self) -> None:
        for name in ("type", "key_type", "value_type"):
            given = getattr(self, name)
            if given not in FORMATS and not (given is None and name != "type"):
                raise ValueError(f"ggml: {name} must be one of {', '.join(FORMATS)}, found {given!r}")
        self.check_tokens("ggml")

    @property
    def bits_of_keys(self) -> int:
        """Of a key's code, without steps."""
        return FORMATS[self.key_type or self.type].bits

    @property
    def bits_of_values(self) -> int:
        """Of a value's code, without steps."""
        return FORMATS[self.value_type or self.type].bits

    @property
    def bears_offset(self) -> bool:
        """Where keys are coded: in 8 bits."""
        return not self.codes_keys or self.bits_of_keys >= 8

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> GgmlCodes:
        return GgmlCodes.of(keys, self.key_type or self.type)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> GgmlCodes:
        return GgmlCodes.of(values, self.value_type or self.type)

    def key_bytes(self, size: int, element_size: int) -> float:
        """Codes, steps and minima, whatever the cache's dtype."""
        return FORMATS[self.key_type or self.type].bytes_of(size)

    def value_bytes(self, size: int, element_size: int) -> float:
        """As `key_bytes`."""
        return FORMATS[self.value_type or self.type].bytes_of(size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value: times the inverse of the step, plus a half."""
        return 2 * tokens * self.sizes_coded(key_size, value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """2 for each value: less the zero and times the step, or times the step and plus the minimum."""
        return 2 * tokens * self.sizes_coded(key_size, value_size)
