"""Plain: tokens stay as the model made them.

*Idea* The null object of the room: nothing is encoded, so nothing leaves the tail.
*Paper* None.
*Source* None.
*Departs* Nothing known.
*Cost* No extra memory, no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.encode.contract import Codec
from kvtailor.types import Layout, PlainSegment

__all__ = ["Plain"]


@dataclass(frozen=True, kw_only=True)
class Plain(Codec):
    """Keys and values in the cache's dtype; `block` is 0, so the tail of such a plan is never encoded."""

    exact: ClassVar[bool] = True

    def segment_type(self) -> type[PlainSegment]:
        return PlainSegment

    def encode(self, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> PlainSegment:
        """Keys (m, s, d) and values (m, s, dv), held as they are (no copy); NaN passes, as it does without a cache."""
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
