"""Pictures as SVG text, without any library: points with intervals, heat maps. A mark says its numbers on hover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Mark", "heat_map", "scatter", "ticks"]

_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 52


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One point of a scatter plot.

    Attributes:
        x, y: where it stands.
        low, high: ends of its interval along y; None without one.
        label: what it is.
        number: how the table calls it; written beside the point.
        hover: all of its numbers, a line each.
    """

    x: float
    y: float
    label: str
    number: str
    hover: str
    low: float | None = None
    high: float | None = None


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that cover ``low`` to ``high``."""
    if not high > low:
        high = low + 1.0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    found = [first * step]
    while found[-1] < high - 1e-9 * step:
        found.append((first + len(found)) * step)
    return [round(value, 10) for value in found]


def scatter(marks: Sequence[Mark], *, x: str, y: str, title: str, front: Sequence[Mark] = ()) -> str:
    """Points over two named axes; the marks of ``front`` are joined by a line, in the order given.

    The x axis begins at 0. The y axis has 0 in it.
    """
    across = ticks(0.0, max(mark.x for mark in marks))
    lows = [mark.y if mark.low is None else mark.low for mark in marks]
    highs = [mark.y if mark.high is None else mark.high for mark in marks]
    up = ticks(min(0.0, *lows), max(0.0, *highs))

    def at_x(value: float) -> float:
        return _LEFT + (value - across[0]) / (across[-1] - across[0]) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - up[0]) / (up[-1] - up[0]) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_open(_WIDTH, _HEIGHT, title)]
    for value in up:
        parts.append(
            f'<line class="{"zero" if value == 0 else "grid"}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
            f'y1="{at_y(value):.1f}" y2="{at_y(value):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{at_y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for value in across:
        parts.append(_text("tick", at_x(value), _HEIGHT - _BOTTOM + 20, f"{value:g}"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>')
    parts.append(
        f'<text class="axis" transform="translate(14 {(_HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y)}</text>'
    )
    if len(front) > 1:
        path = " ".join(f"{at_x(mark.x):.1f},{at_y(mark.y):.1f}" for mark in front)
        parts.append(f'<polyline class="front" points="{path}"/>')
    for mark in marks:
        place, height = at_x(mark.x), at_y(mark.y)
        parts.append(f'<g class="mark"><title>{escape(mark.label)}\n{escape(mark.hover)}</title>')
        if mark.low is not None and mark.high is not None:
            parts.append(
                f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{at_y(mark.low):.1f}" y2="{at_y(mark.high):.1f}"/>'
            )
        parts.append(
            f'<circle cx="{place:.1f}" cy="{height:.1f}" r="5"/>'
            f'<text x="{place + 8:.1f}" y="{height - 6:.1f}">{escape(mark.number)}</text></g>'
        )
    return "".join(parts) + "</svg>"


def heat_map(
    cells: Sequence[Sequence[tuple[float, str] | None]], *, columns: Sequence[str], rows: Sequence[str], title: str
) -> str:
    """A grid of shares from 0.0 to 1.0.

    Args:
        cells: for each row the (share, hover text) of each column; None where nothing was measured.
        columns: labels under the grid.
        rows: labels on its left.
        title: what it shows.
    """
    wide, high = 54, 24
    width, height = 64 + wide * len(columns), 8 + high * len(rows) + 22
    parts = [_open(width, height, title)]
    for i, row in enumerate(cells):
        parts.append(f'<text class="tick" x="56" y="{8 + high * i + 16}" text-anchor="end">{escape(rows[i])}</text>')
        for j, cell in enumerate(row):
            if cell is None:
                continue
            share, hover = cell
            colour = f"fill-opacity:{0.08 + 0.92 * share:.3f}"
            shade = "light" if share > 0.55 else "dark"
            parts.append(
                f'<g><title>{escape(hover)}</title><rect class="cell" style="{colour}" x="{64 + wide * j}" '
                f'y="{8 + high * i}" width="{wide - 2}" height="{high - 2}"/>'
            )
            middle = 64 + wide * j + wide / 2 - 1
            parts.append(_text(f"on-{shade}", middle, 8 + high * i + 15, f"{100 * share:.0f}") + "</g>")
    for j, column in enumerate(columns):
        parts.append(_text("tick", 64 + wide * j + wide / 2, height - 6, column))
    return "".join(parts) + "</svg>"


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">'
    )
