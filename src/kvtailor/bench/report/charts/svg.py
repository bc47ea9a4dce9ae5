"""Pictures as SVG text, without any library: points with intervals, and lines. A mark shows its numbers on hover."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Line", "Mark", "group", "label", "lines", "opened", "scatter", "ticks", "width_of"]

WIDTH, HEIGHT = 480, 330
_RIGHT, _TOP, _BOTTOM = 26, 14, 48
_NAME = 34  # for the name of the y axis and the gap beside its numbers
_LETTER, _HIGH = 7.3, 13.0  # of the 13 px font, generously


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One point.

    Attributes:
        x, y: where it stands.
        low, high: ends of its interval along y; None without one.
        label: what it is.
        number: how the table calls it; written beside the point.
        hover: all of its numbers, a line each. In lines and bars they stand below the plan's number, in whose place
            report.js writes its words when the mark is pointed at.
        kind: class of its colour.
        behind: attribute that leads to its records, see `pages.html.behind`.
    """

    x: float
    y: float
    label: str
    number: str
    hover: str
    kind: str = ""
    behind: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points of one plan, in order along x; its number is written at its end.

    Attributes:
        marks: the points.
        behind: attribute that leads to the records of all of them, see `pages.html.behind`.
    """

    marks: tuple[Mark, ...]
    behind: str = ""


@dataclass
class _Frame:
    """Two axes, and the boxes that text has taken."""

    across: list[float]
    up: list[float]
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def left(self) -> float:
        return _NAME + max(width_of(f"{value:g}") for value in self.up)

    def x(self, value: float) -> float:
        share = (value - self.across[0]) / (self.across[-1] - self.across[0])
        return self.left + share * (WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.up[0]) / (self.up[-1] - self.up[0])
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def drawn(self, x: str, y: str, title: str) -> Iterator[str]:
        yield opened(WIDTH, HEIGHT, title)
        for value in self.up:
            if value == 0:
                yield (
                    f'<line class="zero" x1="{self.left:.1f}" x2="{WIDTH - _RIGHT}" y1="{self.y(value):.1f}" '
                    f'y2="{self.y(value):.1f}"/>'
                )
            else:
                yield f'<path class="grid" d="M{self.left:.1f} {self.y(value):.1f}H{WIDTH - _RIGHT}"/>'
            yield label("tick", self.left - 8, self.y(value) + 4.5, f"{value:g}", "end")
        for value in self.across:
            yield label("tick", self.x(value), HEIGHT - _BOTTOM + 18, f"{value:g}")
        yield label("axis", (self.left + WIDTH - _RIGHT) / 2, HEIGHT - 8, x)
        yield (
            f'<text class="axis" transform="translate(14 {(HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)" '
            f'text-anchor="middle">{escape(y)}</text>'
        )

    def number(self, at_x: float, at_y: float, text: str) -> tuple[float, float, str]:
        """Where a number beside a point covers nothing: x, y of its baseline, and its anchor."""
        wide = width_of(text)
        places = [
            (at_x + 7, at_y - 4, "start"),
            (at_x + 7, at_y + 13, "start"),
            (at_x - 7, at_y - 4, "end"),
            (at_x - 7, at_y + 13, "end"),
            (at_x, at_y - 10, "middle"),
            (at_x, at_y + 19, "middle"),
            (at_x + 19, at_y + 4, "start"),
            (at_x - 19, at_y + 4, "end"),
            (at_x + 7, at_y - 18, "start"),
            (at_x + 7, at_y + 26, "start"),
        ]

        def box(place: tuple[float, float, str]) -> tuple[float, float, float, float]:
            left = place[0] - {"start": 0.0, "middle": wide / 2, "end": wide}[place[2]]
            return left, place[1] - _HIGH + 3, left + wide, place[1] + 2

        def cost(place: tuple[float, float, str]) -> float:
            left, top, right, bottom = box(place)
            if left < self.left or right > WIDTH - 2 or top < 2 or bottom > HEIGHT - _BOTTOM:
                return math.inf
            return sum(
                max(0.0, min(right, r) - max(left, x)) * max(0.0, min(bottom, b) - max(top, t))
                for x, t, r, b in self.taken
            )

        best = min(places, key=cost)
        self.taken.append(box(best))
        return best


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


def scatter(marks: Sequence[Mark], *, x: str, y: str, title: str, front: Sequence[Mark] = (), zero: bool = True) -> str:
    """Points over two named axes; the marks of ``front`` are joined by a dashed line, in the order given.

    The x axis begins at 0. The y axis has 0 in it, but for ``zero=False``.
    """
    frame = _Frame(ticks(0.0, max(mark.x for mark in marks)), _up(marks, zero))
    parts = [*frame.drawn(x, y, title)]
    if len(front) > 1:
        path = " ".join(f"{frame.x(mark.x):.1f},{frame.y(mark.y):.1f}" for mark in front)
        parts.append(f'<polyline class="front" points="{path}"/>')
    places = [(frame.x(mark.x), frame.y(mark.y)) for mark in marks]
    frame.taken += [(a - 5, b - 5, a + 5, b + 5) for a, b in places]
    for mark, (at_x, at_y) in zip(marks, places, strict=True):
        parts.append(_point(frame, mark, at_x, at_y, radius=5))
        left, base, anchor = frame.number(at_x, at_y, mark.number)
        parts.append(label("", left, base, mark.number, anchor) + "</g>")
    return "".join(parts) + "</svg>"


def lines(drawn: Sequence[Line], *, x: str, y: str, title: str, zero: bool = True, whole: bool = False) -> str:
    """Lines through the points that were measured; the number of each stands at its last point.

    Args:
        drawn: the lines.
        x, y: names of the axes.
        title: what it shows.
        zero: whether the y axis has 0 in it.
        whole: whether x counts things, so that only whole numbers are marked, from the first one on.
    """
    marks = [mark for line in drawn for mark in line.marks]
    left, right = min(mark.x for mark in marks), max(mark.x for mark in marks)
    if whole:
        step = max(1, math.ceil((right - left) / 8))
        across = [left + step * i for i in range(math.ceil((right - left) / step) + 1)]
    else:
        across = ticks(0.0, right)
    frame = _Frame(across if len(across) > 1 else [left, left + 1], _up(marks, zero))
    parts = [*frame.drawn(x, y, title)]
    for line in drawn:
        first = line.marks[0]
        path = " ".join(f"{frame.x(mark.x):.1f},{frame.y(mark.y):.1f}" for mark in line.marks)
        hover = "\n".join([first.number, *(mark.hover for mark in line.marks)])
        parts.append(f"{group('mark', first.number, first.kind, line.behind)}<title>{escape(hover)}</title>")
        parts.append(f'<polyline class="line" points="{path}"/>')
        parts += [_dot(frame.x(mark.x), frame.y(mark.y), radius=4) for mark in line.marks]
        parts.append("</g>")
    ends: dict[float, list[Mark]] = {}
    for line in drawn:
        ends.setdefault(line.marks[-1].x, []).append(line.marks[-1])
    for last in ends.values():
        last.sort(key=lambda mark: -mark.y)
        for mark, height in zip(last, _apart([frame.y(mark.y) for mark in last]), strict=True):
            parts.append(label("value", frame.x(mark.x) + 7, height + 4.5, mark.number, "start", of=mark.number))
    return "".join(parts) + "</svg>"


def label(kind: str, x: float, y: float, text: str, anchor: str = "middle", *, of: str = "") -> str:
    """Text at a place.

    Args:
        kind: its class; empty: none.
        x, y: of the baseline.
        text: what is written.
        anchor: which end of it stands at x.
        of: number of the plan that it belongs to, where it stands in no group of that plan; empty: of none.
    """
    # In the middle is what the style sheet has for texts without an anchor; the two others are classes of it.
    classes = " ".join(filter(None, [kind, "" if anchor == "middle" else anchor]))
    name = f' class="{classes}"' if classes else ""
    plan = f' data-n="{escape(of, quote=True)}"' if of else ""
    # Whole pixels are enough for a text.
    return f'<text{name}{plan} x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def width_of(text: str) -> float:
    """About how wide text is, in pixels."""
    return _LETTER * len(text)


def opened(width: float, height: float, title: str) -> str:
    """The start of a picture."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}">'
    )


def _up(marks: Sequence[Mark], zero: bool) -> list[float]:
    # Six figures: what stands above 1 by a rounding error needs no tick above 1.
    lows = [float(f"{mark.y if mark.low is None else mark.low:.6g}") for mark in marks]
    highs = [float(f"{mark.y if mark.high is None else mark.high:.6g}") for mark in marks]
    return ticks(min(0.0, *lows), max(0.0, *highs)) if zero else ticks(min(lows), max(highs))


def group(kind: str, number: str, colour: str, behind: str) -> str:
    """The start of a group of one plan, whose number links it to the plan's rows and other marks.

    Args:
        kind: class of what is drawn.
        number: of the plan.
        colour: class of its colour.
        behind: see `Mark.behind`.
    """
    return f'<g class="{kind} {colour}" data-n="{escape(number, quote=True)}"{behind}>'


def _point(frame: _Frame, mark: Mark, x: float, y: float, *, radius: int) -> str:
    """A point with its interval and its hover text, in a group that is left open."""
    text = (
        f"{group('mark', mark.number, mark.kind, mark.behind)}<title>{escape(mark.label)}\n{escape(mark.hover)}</title>"
    )
    if mark.low is not None and mark.high is not None:
        text += f'<path d="M{x:.1f} {frame.y(mark.low):.1f}V{frame.y(mark.high):.1f}"/>'
    return text + _dot(x, y, radius=radius)


def _dot(x: float, y: float, *, radius: int) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _apart(heights: Sequence[float], least: float = 13.0) -> list[float]:
    """Heights from top to bottom, moved as little as it takes to be readable and inside of the frame."""
    bottom = HEIGHT - _BOTTOM
    least = min(least, (bottom - _TOP) / max(1, len(heights) - 1))
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + least) if found else height)
    over = bottom - 2.0
    for i in range(len(found) - 1, -1, -1):
        found[i] = min(found[i], over)
        over = found[i] - least
    return found
