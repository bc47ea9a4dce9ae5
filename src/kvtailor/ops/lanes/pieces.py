"""Lanes cut into pieces that stay in a core's cache, for work that would else write each step of it to memory."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pieces"]


def pieces(lanes: int, slots: int, size: int, most: int, *, multiple: int = 1) -> Iterator[tuple[slice, slice]]:
    """Lanes and slots of each piece: several short lanes, or some slots of a long one.

    Args:
        lanes, slots, size: m, s and c of states (m, s, c).
        most: elements of a piece, about.
        multiple: of so many slots a piece is made, but for the last of a lane.
    """
    deep = min(slots, max(1, most // size // multiple) * multiple)
    broad = min(lanes, max(1, most // max(1, deep * size)))
    for lane in range(0, lanes, broad):
        for slot in range(0, slots, max(1, deep)):
            yield slice(lane, min(lane + broad, lanes)), slice(slot, min(slot + deep, slots))
