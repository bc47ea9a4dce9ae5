"""Plain: tokens stay as the model made them.

*Idea* The null object of the stage: nothing is encoded, so nothing leaves the tail, unless it has a block size, so that
tokens can live elsewhere.
*Paper* None.
*Source* None.
*Departs* Nothing known.
*Cost* No extra memory, no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Codec
from kvtailor.ops.segments.coded import alone
from kvtailor.types import Layout, PlainSegment

__all__ = ["Plain"]


@dataclass(frozen=True, kw_only=True)
class Plain(Codec):
    """Keys and values in the cache's dtype.

    Attributes:
        block_size: tokens that leave the tail together; 0: none ever does.
    """

    block_size: int = 0
    examples: ClassVar[tuple[str, ...]] = ("plain", "plain(block_size=40)")
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block_size < 0:
            raise ValueError(f"plain: block_size must be 0 tokens or more, found {self.block_size}; 0 is usual")

    @property
    def block(self) -> int:
        """`block_size`."""
        return self.block_size

    def in_blocks(self, tokens: int) -> Plain:
        """See `Codec.in_blocks`."""
        return self if self.block_size else replace(self, block_size=tokens)

    def segment_type(self) -> type[PlainSegment]:
        return PlainSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> PlainSegment:
        """Keys (m, s, d) and values (m, s, dv); NaN passes, as it does without a cache.

        They are held as they are, but copied where blocks of them outlive the buffer that they were cut from.
        """
        if self.block_size:
            keys, values = alone(keys), alone(values)
        return PlainSegment(layout=layout, keys=keys, values=values)

    def restore(self, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> PlainSegment:
        return PlainSegment.from_state(layout, fields, tensors)

    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """(d + dv) elements."""
        return float((key_size + value_size) * element_size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """0: nothing is encoded."""
        return 0

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """0: nothing was encoded."""
        return 0
