"""What codecs of small floats in blocks of channels have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from kvtailor.encode.contract import TwoSided
from kvtailor.encode.settings import ByBlocks
from kvtailor.ops.segments.coded import Coded
from kvtailor.types import Layout

__all__ = ["FloatsInBlocks"]


class FloatsInBlocks(ByBlocks, TwoSided, ABC):
    """Keys and values alike in floats of one format, each token by itself. Stands before `Codec` among the bases."""

    @abstractmethod
    def coded(self, states: Tensor) -> Coded:
        """States (m, s, c) in this encoding."""

    @abstractmethod
    def bytes_of(self, size: int) -> float:
        """Closed form for one token of `size` channels on one side, scales included."""

    @property
    def bears_offset(self) -> bool:
        """Where keys are coded: floats of 4 bits share a scale among channels, and the large ones take it."""
        return not self.codes_keys

    def code_keys(self, keys: Tensor, layout: Layout, first: Tensor | None) -> Coded:
        return self.coded(keys)

    def code_values(self, values: Tensor, layout: Layout, first: Tensor | None) -> Coded:
        return self.coded(values)

    def key_bytes(self, size: int, element_size: int) -> float:
        """Codes and scales, whatever the cache's dtype."""
        return self.bytes_of(size)

    def value_bytes(self, size: int, element_size: int) -> float:
        """As `key_bytes`."""
        return self.bytes_of(size)

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: over the scale."""
        return tokens * self.sizes_coded(key_size, value_size)

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int:
        """1 for each value: times the scale."""
        return tokens * self.sizes_coded(key_size, value_size)
