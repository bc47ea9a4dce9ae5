"""Horizontal bars with whiskers, one panel for each question: they begin at 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvtailor.bench.report.charts.svg import WIDTH, group, label, opened, ticks, width_of

__all__ = ["Bar", "bars"]

_LEFT, _TOP, _STEP, _BOTTOM = 30, 6, 22, 40


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One plan in one question.

    Attributes:
        value: how long the bar is.
        low, high: ends of its whisker; None without one.
        goal: a tick across the bar, such as a physical floor; None without one.
        text: the value as it is written.
        label: what it is.
        number: how the table calls it.
        hover: all of its numbers.
        kind: class of its colour.
        behind: attribute that leads to its records, see `pages.html.behind`.
    """

    value: float
    text: str
    label: str
    number: str
    hover: str
    kind: str = ""
    behind: str = ""
    low: float | None = None
    high: float | None = None
    goal: float | None = None


def bars(drawn: Sequence[Bar], *, x: str, title: str, mark: float | None = None) -> str:
    """Bars below each other.

    Args:
        drawn: from top to bottom.
        x: name of the axis.
        title: what it shows.
        mark: where a dashed line stands, such as the value of 'full'.
    """
    margin = 10 + max(width_of(bar.text) for bar in drawn)
    ends = [end for bar in drawn for end in (bar.value, bar.low, bar.high, bar.goal) if end is not None]
    across = ticks(min(0.0, *ends), max(0.0, *ends), 4)
    height = _TOP + _STEP * len(drawn) + _BOTTOM
    foot = height - _BOTTOM

    def at(value: float) -> float:
        return _LEFT + (value - across[0]) / (across[-1] - across[0]) * (WIDTH - _LEFT - margin)

    parts = [opened(WIDTH, height, title)]
    for value in across:
        parts.append(
            f'<line class="zero" x1="{at(value):.1f}" x2="{at(value):.1f}" y1="{_TOP}" y2="{foot}"/>'
            if value == 0
            else f'<path class="grid" d="M{at(value):.1f} {_TOP}V{foot}"/>'
        )
        parts.append(label("tick", at(value), foot + 16, f"{value:g}"))
    parts.append(label("axis", (_LEFT + WIDTH - margin) / 2, height - 6, x))
    texts = []
    for i, bar in enumerate(drawn):
        top, middle = _TOP + _STEP * i + 3, _TOP + _STEP * i + _STEP / 2
        left, wide = min(at(0), at(bar.value)), abs(at(bar.value) - at(0))
        parts.append(group("bar", bar.number, bar.kind, bar.behind))
        parts.append(f"<title>{escape(bar.number)}\n{escape(bar.hover)}</title>")
        parts.append(f'<rect x="{left:.1f}" y="{top}" width="{max(wide, 1):.1f}" height="{_STEP - 6}"/>')
        if bar.low is not None and bar.high is not None:
            parts.append(_whisker(at(bar.low), at(bar.high), middle))
        if bar.goal is not None:
            parts.append(
                f'<line class="goal" x1="{at(bar.goal):.1f}" x2="{at(bar.goal):.1f}" y1="{top - 2}" '
                f'y2="{top + _STEP - 4}"/>'
            )
        reach = max(at(end) for end in (bar.value, bar.high, 0.0) if end is not None)
        parts.append(label("tick", _LEFT - 8, middle + 4.5, bar.number, "end"))
        parts.append("</g>")
        texts.append(label("value", reach + 6, middle + 4.5, bar.text, "start", of=bar.number))
    if mark is not None:
        parts.append(f'<line class="front" x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="{_TOP}" y2="{foot}"/>')
    parts += texts
    return "".join(parts) + "</svg>"


def _whisker(left: float, right: float, middle: float) -> str:
    path = f"M{left:.1f} {middle - 4}v8m0 -4H{right:.1f}m0 -4v8"
    return f'<path class="whisker" d="{path}"/>'
