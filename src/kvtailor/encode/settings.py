"""Settings that several codecs have: how many tokens stay whole, how many are encoded at once, and bits of a code.

Codecs that share a tail must leave as many tokens in it, and encode as many at once (`check_agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtailor.encode.contract import Codec

__all__ = ["ByBlocks", "ByGroups", "InBits", "check_agreement"]


class ByBlocks:
    """Codecs that keep the newest `recent` tokens and encode `block_size` at once. Stands before `Codec`."""

    recent: int
    block_size: int

    @property
    def tail(self) -> int:
        return self.recent

    @property
    def block(self) -> int:
        return self.block_size

    def check_tokens(self, codec: str) -> None:
        """Raise `ValueError` for numbers of tokens that make no sense."""
        if self.recent < 0:
            raise ValueError(f"{codec}: recent must be 0 or more tokens, found {self.recent}")
        if self.block_size < 1:
            raise ValueError(f"{codec}: block_size must be 1 token or more, found {self.block_size}; 128 is usual")


class ByGroups(ByBlocks):
    """Codecs whose blocks are whole groups of `group` tokens, which share a scale. Stands before `Codec`."""

    group: int

    @property
    def lane_multiple(self) -> int:
        """Scales run along time."""
        return self.group

    def check_groups(self, codec: str) -> None:
        """Raise `ValueError` for blocks that are not whole groups."""
        if self.block_size < self.group or self.block_size % self.group:
            raise ValueError(
                f"{codec}: block_size must be a multiple of its group, and block_size={self.block_size} is none of "
                f"group={self.group}; write block_size={max(1, round(self.block_size / self.group)) * self.group}"
            )


class InBits:
    """Codecs of `bits` for a code, unless `key_bits` or `value_bits` says otherwise. Stands before `Codec`."""

    bits: int
    key_bits: int | None
    value_bits: int | None

    @property
    def bits_of_keys(self) -> int:
        return self.key_bits or self.bits

    @property
    def bits_of_values(self) -> int:
        return self.value_bits or self.bits

    @property
    def holds_offset(self) -> bool:
        """Whether a key's code, one scale for all of its channels, has levels enough for a constant in all keys.

        On Qwen2.5-Coder-0.5B, whose key biases are up to 180 times what keys differ by, codes of 8 bits lost 0.004 nats
        a token, and codes of 4 bits 0.06 to 1.8.
        """
        return self.bits_of_keys >= 8

    def check_bits(self, codec: str, more: Callable[[str, int], str], *, least: int = 1) -> None:
        """Raise `ValueError` for bits that are not `least` to 8; `more` ends the sentence on a name and its bits."""
        for name in ("bits", "key_bits", "value_bits"):
            bits = getattr(self, name)
            if not (bits is None and name != "bits") and not least <= bits <= 8:
                raise ValueError(f"{codec}: {name} must be {least} to 8, found {bits}{more(name, bits)}")


def check_agreement(asked: str, what: str, codecs: Sequence[Codec]) -> None:
    """Raise `ValueError` where two codecs differ in the recent window or in the block; `what` are they in `asked`."""
    one = codecs[0]
    other = next((each for each in codecs if (each.tail, each.block) != (one.tail, one.block)), None)
    if other is not None:
        raise ValueError(
            f"{asked}: the {what} must agree in the recent window and in the block, and {type(one).__name__} has "
            f"{one.tail} and {one.block} tokens where {type(other).__name__} has {other.tail} and {other.block}: "
            "give each the same `recent` and the same `block_size` (kivi's block is its `recent`, or its `group` "
            "where that is 0)"
        )
