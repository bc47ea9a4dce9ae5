"""Centred: any codec, of keys without the constant that the model adds to all of them.

*Idea* Where the projection of the keys has a bias, every key of a head is that bias, turned to the key's position, and
a rest that depends on the token. The bias may be many times the rest, and a code with one scale for a whole key spends
its levels on it. It follows from the weights and the position, so it is taken off before the code, nothing is stored
for it, and reading adds it again.
*Paper* None; biases of keys are what `liu2024kivi` (arXiv 2402.02750), section 3, sees as channels of large magnitude.
*Source* kvtailor's own. The constant is found by asking each attention module what its keys are for no input.
*Departs* Nothing known. A key is its constant and the rest whatever the constant is, so a wrong one costs precision
and no correctness. Where a model has no such bias, or its attention cannot be asked, the codec is the inner one.
A saved cache has the codes and not the constant, which is the model's: biases are among the parameters whose
fingerprint `load_cache` compares, so a model with another bias is refused.
*Cost* Nothing in memory. 4 operations for each channel of a key when it is encoded. On a CPU the codes are read as they
lie, and a decoded token multiplies each query head with some 24 numbers a token more (docs/kernels.md, decision 0032);
on a GPU what is stored is decoded at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.encode.contract import Around, Codec, CodecContext, Sides, refuse_non_finite
from kvtailor.ops.lanes.rotate import turned_exactly
from kvtailor.ops.segments.around import PositionedSegment, first_of_lanes, positions_of
from kvtailor.ops.segments.attention_inputs import Offsetting
from kvtailor.types import KeyOffset, Layout, Segment

__all__ = ["Centred", "CentredSegment"]


@dataclass(frozen=True, kw_only=True)
class CentredSegment(PositionedSegment):
    """Keys from which a constant was taken before they were encoded.

    Attributes:
        offset: of the layer's heads that are here; it is the model's, and shared.
    """

    offset: KeyOffset
    codec = "centred"

    def keys_back(self, keys: Tensor) -> Tensor:
        return (_wide(keys) + _constants(self.layout, self.first, self.offset, keys)).to(keys.dtype)

    def offsetting(self) -> Offsetting:
        return Offsetting(offset=self.offset, first=self.first, layout=self.layout)

    def of_heads(self, first: int, count: int) -> Segment:
        found = super().of_heads(first, count)
        assert isinstance(found, CentredSegment)
        return replace(found, offset=self.offset.of_heads(first, count))


@dataclass(frozen=True, kw_only=True)
class Centred(Around, Codec):
    """Taking the constant off before another codec.

    Attributes:
        of: the codec.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "centred(of=vector(bits=4, block_size=32))",
        "centred(of=hadamard(of=gaussian))",
    )
    _offset: KeyOffset | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        inner = type(self.of).__name__
        if self.of.exact:
            raise ValueError(f"centred: of={inner} stores keys as they are, which a constant does not harm")
        if self.of.needs_rotation or self.of.needs_offset:
            raise ValueError(f"centred: of={inner} changes keys by their positions itself: leave one of the two out")
        if self.of.weighs_tokens:
            raise ValueError(f"centred: of={inner} lets a token stand for several positions: leave one of the two out")

    @property
    def needs_offset(self) -> bool:
        return True

    @property
    def bears_offset(self) -> bool:
        """Yes, by taking it off."""
        return True

    def one_sided(self, side: Sides, asked: str) -> Any:
        """See `Codec.one_sided`; of values, which have no such constant, it is the inner codec."""
        inner = self.of.one_sided(side, asked)
        return inner if side == "values" else replace(self, of=inner)

    def for_layer(self, context: CodecContext) -> Codec:
        """This codec with the layer's constant; the inner codec where there is none."""
        offset, inner = context.offset, self.of.for_layer(context)
        if offset is None:
            return inner
        made = replace(self, of=inner)
        object.__setattr__(made, "_offset", replace(offset, rotation=None) if context.unrotated else offset)
        return made

    def segment_type(self) -> type[Segment]:
        """`CentredSegment` on a layer that has a constant; else that of the inner codec."""
        return self.of.segment_type() if self._offset is None else CentredSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> CentredSegment:
        """Keys (m, s, d) without their constant, and values (m, s, dv), encoded.

        Raises:
            CacheMisuse: NaN or infinity.
        """
        refuse_non_finite("centred", keys, values, "which no code can hold")
        of_lane, wide = first_of_lanes(layout, first, keys.device), _wide(keys)
        rest = wide - _constants(layout, of_lane, self._bound(), keys)
        if of_lane is not None:
            # A model that is given no positions counts padding as well: what is left of its keys is less that way.
            counted = wide - _constants(layout, torch.zeros_like(of_lane), self._bound(), keys)
            less = counted.square().sum((1, 2)) < rest.square().sum((1, 2))
            of_lane = torch.where(less if of_lane.ndim == 1 else less[:, None], 0, of_lane)
            rest = torch.where(less[:, None, None], counted, rest)
        return self._around(self.of.encode(layout, rest.to(keys.dtype), values, first), of_lane)

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> CentredSegment:
        return self._around(self.of.restore(layout, fields, tensors), tensors.get("first"))

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec; where there is a constant, 4 for each key channel more, to turn and add it."""
        inner = self.of.encode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + self._turning(tokens, key_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """As `encode_flops`."""
        inner = self.of.decode_flops(tokens=tokens, key_size=key_size, value_size=value_size)
        return None if inner is None else inner + self._turning(tokens, key_size)

    def read_flops(self, *, tokens: int, queries: int, key_size: int, value_size: int) -> int | None:
        """Those of the inner codec; where there is a constant, some 24 products and sums for each token and query."""
        inner = self.of.read_flops(tokens=tokens, queries=queries, key_size=key_size, value_size=value_size)
        return inner if inner is None or self._offset is None else inner + 48 * tokens * queries

    def _turning(self, tokens: int, key_size: int) -> int:
        return 0 if self._offset is None else 4 * tokens * key_size

    def _around(self, inner: Segment, first: Tensor | None) -> CentredSegment:
        return CentredSegment(layout=inner.layout, inner=inner, offset=self._bound(), first=first)

    def _bound(self) -> KeyOffset:
        if self._offset is None:
            raise ValueError("centred: no constant of the keys was given; call for_layer first, with the offset")
        return self._offset


def _wide(keys: Tensor) -> Tensor:
    """In float32 at least: a rest that is small beside the constant keeps its digits."""
    return keys if keys.dtype.itemsize >= 4 else keys.float()


def _constants(layout: Layout, first: Tensor | None, offset: KeyOffset, like: Tensor) -> Tensor:
    """(m, s, d) or (m, 1, d) float32: the constant of each slot's key."""
    head = layout.owners(like.device) % layout.heads
    vectors = offset.vectors.to(like.device)[head][:, None]
    if offset.rotation is None:
        return vectors
    return turned_exactly(vectors, positions_of(layout, first, like.device), offset.rotation)
