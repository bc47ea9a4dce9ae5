"""Hadamard: any codec, of keys and values that were mixed over their channels first.

*Idea* An outlier channel takes the steps of a quantiser that other channels would need. After a Hadamard rotation each
channel is a signed sum of all, so outliers are shared out evenly; decoding rotates back. It helps codecs whose scale
serves a whole vector, and can harm those that give each channel its own.
*Paper* `ashkboos2024quarot` (arXiv 2404.00456), section 4, which rotates the cached keys and values of each head.
*Source* The paper; kvtailor's own code.
*Departs* A few new queries are rotated, and their sums are rotated back; QuaRot folds the values' rotation into the
weights. More queries at once read states that were rotated back. A head size that is no power of two is cut into blocks
of the largest one that divides it (80: five of 16; odd sizes stay as they are), all with the same signs. Without
`signs` there are none, as in the paper's rotation of the cache.
*Cost* Nothing in memory; 2 * block multiplications and additions for each element when it is encoded, and at every step
for each element of a query and of its sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Around, Codec, CodecContext, Sides, refuse_non_finite
from kvtailor.ops.codes.hadamard import block_of, coordinates, mixed, unmixed
from kvtailor.ops.segments.around import AroundSegment
from kvtailor.types import Coordinates, Layout

__all__ = ["Hadamard", "HadamardSegment"]


@dataclass(frozen=True, kw_only=True)
class HadamardSegment(AroundSegment):
    """States that were mixed before they were encoded.

    Attributes:
        only: which sides were.
        signs: random state of signs before the rotation; None: there were none.
    """

    only: Sides
    signs: int | None = None
    codec = "hadamard"

    def keys_back(self, keys: Tensor) -> Tensor:
        return keys if self.only == "values" else unmixed(keys, self.signs)

    def values_back(self, values: Tensor) -> Tensor:
        return values if self.only == "keys" else unmixed(values, self.signs)

    def coordinates(self, key_size: int, value_size: int) -> tuple[Coordinates | None, Coordinates | None]:
        device = next(iter(self.inner.tensors().values())).device
        keys = None if self.only == "values" else coordinates(key_size, device, self.signs)
        return keys, None if self.only == "keys" else coordinates(value_size, device, self.signs)


@dataclass(frozen=True, kw_only=True)
class Hadamard(Around, Codec):
    """A rotation before another codec.

    Attributes:
        of: the codec.
        only: what is rotated; the other side goes to the codec as it is.
        signs: random state of signs that channels get before the rotation, so that no vector is rotated onto few
            channels; None: none.
    """

    only: Sides = "both"
    signs: int | None = None
    examples: ClassVar[tuple[str, ...]] = (
        "hadamard(of=vector(bits=4))",
        "hadamard(of=kivi(bits=4), only=keys)",
        "hadamard(of=fp8, only=values)",
        "hadamard(of=gaussian(bits=3), signs=0)",
        "hadamard(of=nvfp4)",
        "hadamard(of=mxfp4, signs=0)",
    )

    def __post_init__(self) -> None:
        if self.of.needs_offset and self.only != "values":
            raise ValueError(
                "hadamard: it mixes keys before their constant could be taken off: write centred(of=hadamard(of=...))"
            )
        if isinstance(self.of, Hadamard) and {self.signs, self.of.signs} == {None}:
            sides = {self.only, self.of.only}
            if len(sides) == 1 or "both" in sides:
                raise ValueError("hadamard: without signs the second rotation undoes the first: write one of them")

    def segment_type(self) -> type[HadamardSegment]:
        return HadamardSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> HadamardSegment:
        """Keys (m, s, d) and values (m, s, dv), mixed and encoded.

        Raises:
            CacheMisuse: NaN or infinity.
        """
        refuse_non_finite("hadamard", keys, values, "which would be mixed into every channel")
        keys = keys if self.only == "values" else mixed(keys, self.signs)
        values = values if self.only == "keys" else mixed(values, self.signs)
        inner = self.of.encode(layout, keys, values, first)
        return HadamardSegment(layout=inner.layout, inner=inner, only=self.only, signs=self.signs)

    def one_sided(self, side: Sides, asked: str) -> Hadamard:
        made = super().one_sided(side, asked)
        return replace(made, only=side) if self.only in ("both", side) else made

    def for_layer(self, context: CodecContext) -> Hadamard:
        return replace(self, of=self.of.for_layer(context))

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> HadamardSegment:
        inner = self.of.restore(layout, fields, tensors)
        return HadamardSegment(layout=layout, inner=inner, only=self.only, signs=self.signs)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec, and 2 b for each channel of a block of b."""
        inner = self.of.encode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + self._mixing(tokens, key_size, value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """As `encode_flops`."""
        inner = self.of.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + self._mixing(tokens, key_size, value_size)

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec, and 2 b for each channel of a query and of a sum."""
        inner = self.of.read_flops(tokens=tokens, queries=queries, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + self._mixing(queries, key_size, value_size)

    def _mixing(self, tokens: int, key_size: int, value_size: int) -> int:
        key = 0 if self.only == "values" else 2 * block_of(key_size) * key_size
        return tokens * (key + (0 if self.only == "keys" else 2 * block_of(value_size) * value_size))
