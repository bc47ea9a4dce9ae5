"""Fixed: the same number of drafted tokens in every round."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.errors import ArgumentError
from kvtailor.speculate.contract import Lookahead, RunCosts

__all__ = ["Fixed"]


@dataclass(frozen=True, kw_only=True)
class Fixed(Lookahead):
    """Always `tokens`."""

    tokens: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ArgumentError(f"gamma must be at least 1 drafted token, found {self.tokens}")

    def length(self, measured: RunCosts) -> int:
        """See `Lookahead.length`."""
        return self.tokens
