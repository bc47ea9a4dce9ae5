"""Sides that are timed in turns, so that what drifts on a machine meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["rounds_in_turns"]

_Each = TypeVar("_Each")


def rounds_in_turns(
    sides: Sequence[_Each],
    rounds: int,
    *,
    warmup: int,
    patience: int = 1,
    enough: Callable[[_Each], bool] = lambda side: True,
) -> Iterator[tuple[int, _Each]]:
    """Yield (round, side) for every sample: each side once a round, the first of a round another one each time.

    Args:
        sides: whatever is timed.
        rounds: that count; those before them have negative numbers.
        warmup: rounds that do not count.
        patience: while not every side has enough, rounds are added until there are so many times `rounds`.
        enough: whether a side has the samples that it needs; asked after `rounds`, before each round.
    """
    for index in range(-warmup, patience * rounds):
        if index >= rounds and all(enough(side) for side in sides):
            return
        first = index % len(sides)
        for side in (*sides[first:], *sides[:first]):
            yield index, side
