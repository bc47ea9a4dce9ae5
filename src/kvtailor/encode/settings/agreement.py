"""Codecs that share a tail must leave as many tokens in it, and encode as many at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvtailor.encode.contract import Codec

__all__ = ["check_agreement"]


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
