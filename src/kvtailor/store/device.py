"""Everything stays on the device where the model computes.

*Idea*: no tier at all, the null object of this room.
*Paper*: none.
*Source*: none.
*Departs*: nothing known.
*Cost*: none: a segment is handed back as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.store.contract import Placement
from kvtailor.types import Segment

__all__ = ["Device"]


@dataclass(frozen=True, kw_only=True)
class Device(Placement):
    """One tier: the device of the model."""

    def put(self, segment: Segment) -> Segment:
        return segment

    def get(self, segment: Segment) -> Segment:
        return segment

    def tier(self, segment: Segment) -> str:
        return "device"
