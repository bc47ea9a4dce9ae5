"""Numbers and questions of a fit in words, and the pieces of HTML that every part of the page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.pages.html import quoted
from kvtailor.bench.report.words import byte_text, significant
from kvtailor.fitting.page.reads import Answer

__all__ = [
    "DASH",
    "ORIGINS",
    "badge",
    "cell",
    "ends",
    "head",
    "in_words",
    "interval",
    "load",
    "percent",
    "section",
    "table",
]

DASH = "–"
"""Stands where nothing was measured."""
ORIGINS = {
    "layers": "fitted by layers",
    "words": "fitted in words",
    "fitted": "fitted",
    "preset": "preset",
    "full": "uncompressed",
}
"""What the page calls the origins of plans."""


def percent(part: float, whole: float) -> str:
    """A share of a whole."""
    return f"{significant(100 * part / whole)} %" if whole else DASH


def ends(found: Estimate) -> str | None:
    """The interval of an estimate; None where there is none."""
    if found.low is None or found.high is None:
        return None
    return f"{significant(found.low)} to {significant(found.high)}"


def interval(found: Estimate) -> str:
    """An estimate with its interval, in nats."""
    within = ends(found)
    return f"{significant(found.value)} ({within or 'no interval: too few samples'})"


def load(found: Answer) -> str:
    """The context and the batch of the question."""
    rows = f"{found.question.batch:,} rows" if found.question.batch > 1 else "1 row"
    return f"{found.question.context:,} tokens and {rows}"


def in_words(found: Answer) -> str:
    """The question as a sentence without its verb."""
    asked = found.question
    limits = []
    if asked.memory is not None:
        limits.append(f"in {byte_text(asked.memory)}, {percent(asked.memory, found.full)} of the uncompressed bytes")
    bounds = []
    if asked.loss is not None:
        bounds.append(f"at most {asked.loss:g} nats per token lost")
    if asked.points is not None:
        bounds.append(f"at most {asked.points:g} points of right answers lost in any family")
    if asked.seconds is not None:
        bounds.append(f"at most {1e3 * asked.seconds:g} ms for a decoded token")
    if bounds:
        limits.append(f"with {' and '.join(bounds)}")
    goal = {"loss": "the least loss", "bytes": "the fewest bytes", "time": "the least time for a token"}[asked.aim]
    return f"{goal} {', '.join(limits)}, at {load(found)}"


def badge(kind: str) -> str:
    """Where the numbers of a part are from: "search", "unseen", "computed" or "both"."""
    words = {
        "search": "measured on search text",
        "unseen": "measured on unseen text",
        "computed": "computed, not measured",
        "documented": "from documentation, not measured",
    }
    return f'<span class="from {kind}">{words[kind]}</span>'


def section(name: str, title: str, body: str, *, kind: str | None = None, note: str = "") -> str:
    """A part of the page under its heading.

    Args:
        name: its id.
        title: the heading.
        body: HTML.
        kind: see `badge`; None: no badge.
        note: HTML of what a reader must know of the numbers.
    """
    mark = f" {badge(kind)}" if kind else ""
    shown = f'<p class="dim">{note}</p>' if note else ""
    return f'<section id="{name}"><h2>{escape(title)}{mark}</h2>{shown}{body}</section>'


def head(text: str, small: str = "", *, left: bool = False) -> str:
    """The head of a column."""
    note = f"<small>{escape(small)}</small>" if small else ""
    return f'<th scope="col"{" class=name" if left else ""}><button type="button">{escape(text)}{note}</button></th>'


def cell(text: str | None, value: float | str | None = None, small: str | None = None, *, kind: str = "") -> str:
    """A cell of a sortable table.

    Args:
        text: what it shows; None: it was not measured.
        value: what it is sorted by.
        small: a second line.
        kind: its class.
    """
    if text is None:
        return f'<td class="{kind}" data-value="">{DASH}</td>'
    below = f"<small>{escape(small)}</small>" if small else ""
    return f'<td class="{kind}" data-value="{quoted(text if value is None else value)}">{escape(text)}{below}</td>'


def table(name: str, title: str, heads: Sequence[str], rows: Sequence[str], *, tall: bool = False) -> str:
    """Lines of cells in a box of its own that scrolls across, and down too where the table is tall."""
    return (
        f'<div class="wide{" tall" if tall else ""}" tabindex="0" role="region" aria-label="{quoted(title)}">'
        f'<table class="sortable" id="table-{name}"><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
