"""Whole numbers of bytes that are known exactly, or only to lie between two bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtailor.errors import ArgumentError

__all__ = ["NOTHING", "Bounds", "hull", "summed"]


@dataclass(frozen=True)
class Bounds:
    """A number that lies between `low` and `high`, both included.

    Attributes:
        low, high: whole numbers; equal where the number is known exactly.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ArgumentError(f"bounds from {self.low} to {self.high} hold no number")

    @classmethod
    def exactly(cls, number: int) -> Bounds:
        """Return the bounds of a number that is known."""
        return cls(number, number)

    @property
    def exact(self) -> bool:
        """Whether the number is known exactly."""
        return self.low == self.high

    @property
    def middle(self) -> int:
        """The number itself where it is known; else the middle of the bounds."""
        return (self.low + self.high) // 2

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)

    def __mul__(self, times: int) -> Bounds:
        return Bounds(self.low * times, self.high * times)

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


NOTHING = Bounds(0, 0)


def summed(each: Iterable[Bounds]) -> Bounds:
    """Return the bounds of a sum."""
    return sum(each, NOTHING)


def hull(first: Bounds, *others: Bounds) -> Bounds:
    """Return bounds that hold for each of several cases."""
    every = (first, *others)
    return Bounds(min(b.low for b in every), max(b.high for b in every))
