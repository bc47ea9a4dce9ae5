"""Adaptive: as many drafted tokens as the measured costs and acceptance make worth while.

The predicted speed is largest for one k between 1 and `most`, see `RunCosts.gain`. Before costs are known, `first`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.errors import ArgumentError
from kvtailor.speculate.contract import Lookahead, RunCosts

__all__ = ["Adaptive"]


@dataclass(frozen=True, kw_only=True)
class Adaptive(Lookahead):
    """The best length by what was measured.

    Attributes:
        first: before anything was measured.
        most: at most so many.
    """

    first: int = 4
    most: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.most:
            raise ArgumentError(f"gamma must go from 1 up: found first={self.first}, most={self.most}")

    def length(self, measured: RunCosts) -> int:
        """See `Lookahead.length`."""
        if measured.gain(1) is None:
            return self.first
        return max(range(1, self.most + 1), key=lambda count: measured.gain(count) or 0.0)
