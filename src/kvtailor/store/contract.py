"""The room `store`: where segments live."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvtailor.method import Method
from kvtailor.types import Segment

__all__ = ["Placement"]


class Placement(Method, ABC):
    """One way to place encoded segments on tiers. A subclass is a frozen, keyword-only dataclass."""

    @abstractmethod
    def put(self, segment: Segment) -> Segment:
        """The segment on its tier, after it was encoded."""

    @abstractmethod
    def get(self, segment: Segment) -> Segment:
        """The segment where attention reads it. Encoded as it was: what travels is codes."""

    @abstractmethod
    def tier(self, segment: Segment) -> str:
        """The name under which the ledger lists the segment's bytes: "device", "host" or "disk"."""
