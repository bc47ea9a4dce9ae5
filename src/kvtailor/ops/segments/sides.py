"""The two sides of a segment, where attention reads them as they are stored."""

from __future__ import annotations

from kvtailor.ops.segments.coded import Coded, PairSegment, Whole
from kvtailor.types import PlainSegment, Segment

__all__ = ["stored_sides"]


def stored_sides(part: Segment) -> tuple[Coded, Coded] | None:
    """Return keys and values of a part as they are stored, where they are all that attention needs; else None."""
    if isinstance(part, PlainSegment):
        return Whole(states=part.keys), Whole(states=part.values)
    # A codec with a view of its own gives attention other values than those it decodes.
    if isinstance(part, PairSegment) and type(part).view is Segment.view:
        return part.keys, part.values
    return None
