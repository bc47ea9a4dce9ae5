"""Grids of shares as SVG text: darker is more, and a cell shows its number on hover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvtailor.bench.report.charts.svg import label, opened, width_of

__all__ = ["HeatCell", "heat_map"]

_HIGH, _WIDE = 24, 54
_SMALL_HIGH, _SMALL_WIDE = 12, 12
_READABLE = 10  # columns beyond which cells are too small for a text


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """One cell: how dark it is from 0.0 to 1.0, what is written in it, and what it shows on hover below the plan."""

    share: float
    text: str
    hover: str


def heat_map(
    cells: Sequence[Sequence[HeatCell | None]],
    *,
    columns: Sequence[str],
    rows: Sequence[str],
    title: str,
    across: str = "",
    told: str = "",
) -> str:
    """A grid.

    Args:
        cells: for each row the cell of each column; None where nothing was measured.
        columns: labels under the grid.
        rows: labels on its left.
        title: what it shows.
        across: what the columns are; empty: no label.
        told: what cells show on hover, with "{row}" and "{column}" for their labels and "{text}" for what is written
            in them. Where that gives each cell's own words, they are not repeated in each cell: report.js puts them
            together when a cell is pointed at. Empty: each cell has its own.
    """
    readable = len(columns) <= _READABLE and len(rows) <= 4 * _READABLE
    wide, high = (_WIDE, _HIGH) if readable else (_SMALL_WIDE, _SMALL_HIGH)
    left = 14 + max(width_of(name) for name in rows)
    tail = 22 + (18 if across else 0)
    width, height = max(left + wide * len(columns), left + width_of(across)) + 6, 4 + high * len(rows) + tail
    follows = readable and all(
        cell is None or cell.hover == told.format(row=rows[i], column=columns[j], text=cell.text)
        for i, row in enumerate(cells)
        for j, cell in enumerate(row)
    )
    words = f' data-told="{escape(told)}" data-columns="{escape("|".join(columns))}"' if follows else ""
    parts = [opened(width, height, title).removesuffix(">") + f"{words}>"]
    for i, row in enumerate(cells):
        top = 4 + high * i
        if _named(i, len(rows), high):
            parts.append(label("tick", left - 8, top + high / 2 + 3.5, rows[i], "end"))
        parts.append(f'<g data-row="{escape(rows[i])}">' if follows else "<g>")
        for j, cell in enumerate(row):
            if cell is None:
                # A cell's place among its neighbours is its column.
                parts.append("<g/>")
                continue
            strength = 0.08 + 0.92 * min(1.0, max(0.0, cell.share))
            parts.append(
                f"<g>{'' if follows else f'<title>{escape(cell.hover)}</title>'}"
                f'<path class="cell" style="fill-opacity:{strength:.3f}" '
                f'd="M{left + wide * j:.1f} {top}h{wide - 2}v{high - 2}h-{wide - 2}z"/>'
            )
            if readable:
                shade = "low" if strength < 0.6 else "middle" if strength < 0.82 else "high"
                middle = left + wide * j + wide / 2 - 1
                parts.append(label(f"on-{shade}", middle, top + 15.5, cell.text))
            parts.append("</g>")
        parts.append("</g>")
    for j, column in enumerate(columns):
        if _named(j, len(columns), wide):
            parts.append(label("tick", left + wide * j + wide / 2 - 1, 4 + high * len(rows) + 14, column))
    if across:
        parts.append(label("axis", left, height - 5, across, "start"))
    return "".join(parts) + "</svg>"


def _named(index: int, count: int, size: int) -> bool:
    """Every label where there is space; else every fourth."""
    return size > _SMALL_WIDE or index % 4 == 0 or count < 4
