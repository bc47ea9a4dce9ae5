"""The room `encode`: kept keys and values of some lanes -> an immutable segment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.method import Method
from kvtailor.types import Layout, Segment

__all__ = ["Codec", "refuse_non_finite"]


class Codec(Method, ABC):
    """One way to store tokens. A subclass is a frozen, keyword-only dataclass of its hyper-parameters.

    Attributes:
        exact: decode(encode(x)) == x bit for bit.
    """

    exact: ClassVar[bool] = False

    @property
    def tail(self) -> int:
        """The newest tokens that stay in full precision."""
        return 0

    @property
    def block(self) -> int:
        """Tokens that leave the tail together once there are `tail + block` of them (0: the tail is never encoded)."""
        return 0

    @property
    def lane_multiple(self) -> int:
        """Ragged lanes are cut to a multiple of this many slots (groups along time)."""
        return 1

    @abstractmethod
    def segment_type(self) -> type[Segment]:
        """The class of segments that `encode` gives, with which a saved cache is read back."""

    @abstractmethod
    def encode(self, layout: Layout, keys: Tensor, values: Tensor) -> Segment:
        """The segment of keys (m, s, d) and values (m, s, dv). Filler slots repeat a filled one of their lane.

        Raises:
            CacheMisuse: NaN or infinity in a filled slot, which no code can hold.
        """

    @abstractmethod
    def bytes_per_token(self, key_size: int, value_size: int, element_size: int) -> float:
        """Closed form for one encoded token of one kv head, scales included, layout and tail not.

        Args:
            key_size, value_size: d and dv.
            element_size: bytes of the cache's dtype.
        """

    def encode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """What encoding these tokens of one kv head computes, counted as in `Scorer.flops`; None: not known.

        Args:
            tokens: that are encoded at once.
            key_size, value_size: d and dv.
        """
        return None

    def decode_flops(self, *, tokens: int, key_size: int, value_size: int) -> int | None:
        """What decoding these tokens of one kv head computes, as `encode_flops`."""
        return None


def refuse_non_finite(codec: str, keys: Tensor, values: Tensor, why: str) -> None:
    """Raises `CacheMisuse` for NaN or infinity in keys (m, s, d) or values (m, s, dv); `why` completes the sentence."""
    for name, states in (("keys", keys), ("values", values)):
        if not torch.isfinite(states).all():
            raise CacheMisuse(
                f"{codec} was given {name} of shape {tuple(states.shape)} with NaN or infinity, {why}; check the "
                "model's inputs and dtype (float16 overflow is the usual cause), or use encode=plain"
            )
