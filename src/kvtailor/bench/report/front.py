"""The front of bytes and loss: plans that no other beats in both. Pages, pictures and fits have it from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtailor.bench.report.table import Row

__all__ = ["front_of", "pareto"]

T = TypeVar("T")


def front_of(points: Sequence[T], place: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the points of which no other has fewer bytes and loses less, from few bytes to many.

    Of equal points the first one stands for all.

    Args:
        points: any.
        place: the bytes, or their share, and the loss of a point; of both less is better.
    """
    found: list[T] = []
    least = float("inf")
    for point in sorted(points, key=place):
        loss = place(point)[1]
        if loss < least:
            found.append(point)
            least = loss
    return found


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Return the front of the plans that have a share of bytes and a loss on text."""
    judged = [row for row in rows if row.ratio is not None and row.loss is not None]
    return front_of(judged, lambda row: (row.ratio or 0.0, row.loss.value if row.loss else 0.0))
