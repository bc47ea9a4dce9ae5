"""The one page: a run, a suite, a leaderboard and a fit are shown by the same template, style sheet and scripts.

A page is one HTML file without any other: light and dark, on paper and on a phone, and the browser itself refuses it
the network. It is parts under headings, and a part is blocks. `page.html.jinja` writes them, `page.js` is what a reader
can do with them, `chart.js` draws every chart from its numbers. Plans are known by their numbers all over the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import ClassVar, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from kvtailor.bench.report.front import front_of
from kvtailor.bench.report.tables.grid import Cell, Grid
from kvtailor.bench.schema import Record
from kvtailor.ops.sizes import byte_text

__all__ = [
    "COLOURS",
    "DASH",
    "Block",
    "Charts",
    "Facts",
    "Front",
    "HeatMap",
    "Maps",
    "PALETTE",
    "Page",
    "Part",
    "Plan",
    "Point",
    "Records",
    "Table",
    "Text",
    "Texts",
    "behind",
    "colour",
    "numbered",
    "question",
    "render",
]

DASH = "–"
"""Stands where nothing was measured."""
PALETTE = {
    "ink": ("#1c1e21", "#e6e8eb"),
    "paper": ("#ffffff", "#14171b"),
    "dim": ("#5f6670", "#98a1ad"),
    "rule": ("#e3e6ea", "#2c323a"),
    "accent": ("#1f6feb", "#6ea8fe"),
    "warm": ("#9a4b00", "#f0a35e"),
    "good": ("#1a7f37", "#56c271"),
    "soft": ("#f6f8fa", "#1b1f25"),
    "edge": ("#c3c9d1", "#363d47"),
    "p0": ("#0072b2", "#56a8e6"),
    "p1": ("#c04d00", "#f08a4b"),
    "p2": ("#00805f", "#2fbf95"),
    "p3": ("#b0457d", "#e58fbf"),
    "p4": ("#7a5ccc", "#b39ddb"),
    "p5": ("#8a6d00", "#e0c040"),
    "p6": ("#2a8fc7", "#8fd3f4"),
    "pf": ("#5f6670", "#98a1ad"),
}
"""Colours on light and on dark paper. The plans' (p0 to p6, pf for 'full') are Okabe and Ito's, moved until each stands
out 3:1 from the paper."""
COLOURS = 7
"""How many plans have a colour of their own; then they come round, as squares and with dashed lines."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan as the page and its scripts know it.

    Attributes:
        number: its number on the page.
        label: what it is called.
        kind: class of its colour.
        whole: whether it is 'full', which all others are compared with.
        plan: its text, where the label is none that the package reads.
        shape: of its point in the large chart; empty: a circle, and a square where colours have come round.
        group: what it is shown and hidden with, such as "preset"; empty: nothing.
        told: what else is said of it where it is looked at, whole sentences.
    """

    number: str
    label: str
    kind: str
    whole: bool = False
    plan: str = ""
    shape: str = ""
    group: str = ""
    told: tuple[str, ...] = ()


class Point(NamedTuple):
    """A plan in the large chart: its number, bytes, their share of the uncompressed, and its loss with its ends."""

    number: str
    bytes: int
    share: float
    loss: float
    low: float | None
    high: float | None


class Block:
    """What parts of a page are made of; `block` names the macro of the template that writes it."""

    block: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Text(Block):
    """A paragraph with words in bold type before it or in code type behind it."""

    block: ClassVar[str] = "text"
    text: str
    lead: str = ""
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Texts(Block):
    """The lines of a list, under a heading where there is one."""

    block: ClassVar[str] = "texts"
    texts: Sequence[str]
    heading: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts(Block):
    """Names with their values, behind a line that opens where there is one; definitions have more space."""

    block: ClassVar[str] = "facts"
    facts: Sequence[tuple[str, str]]
    summary: str = ""
    definitions: bool = False


@dataclass(frozen=True, kw_only=True)
class Table(Block):
    """A grid as a table whose heads sort it.

    Attributes:
        grid: what is shown; a second line of a head is set small.
        heading: above it; empty: none.
        numbered: whether its lines are of plans of the page, which then have their numbers.
        tags: words beside the names of some plans, by the plans of the grid.
        classes: of the lines of some plans.
        folded: whether it stands behind a line that opens.
    """

    block: ClassVar[str] = "table"
    grid: Grid
    heading: str = ""
    numbered: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False

    @property
    def left(self) -> list[bool]:
        """Whether each column is of words, which begin at its left."""
        return [
            all(not isinstance(row[i].value, (int, float)) for row in self.grid.rows)
            and any(row[i].text is not None for row in self.grid.rows)
            for i in range(len(self.grid.heads))
        ]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Numbers by two coordinates, darker where they are more.

    Attributes:
        caption: what it is of.
        number: of the plan that it is of; empty: of none.
        across: what the rows are.
        columns, rows: their heads.
        cells: for each row its cells: what is written, how dark it is from 0.0 to 1.0, and what it says when it is
            pointed at; None where nothing was measured.
    """

    caption: str
    number: str = ""
    across: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[tuple[str, float, str] | None]]

    @property
    def small(self) -> bool:
        """Whether it has so many columns that no cell has space for a text."""
        return len(self.columns) > _READABLE


@dataclass(frozen=True, kw_only=True)
class Maps(Block):
    """Heat maps beside each other."""

    block: ClassVar[str] = "maps"
    maps: Sequence[HeatMap]
    heading: str = ""


@dataclass(frozen=True, kw_only=True)
class Charts(Block):
    """Small charts: see `charts.py` for what one is."""

    block: ClassVar[str] = "charts"
    charts: Sequence[Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class Front(Block):
    """The large chart of bytes against loss, with the reader's memory and the filter of plans.

    Attributes:
        note: what a point is.
        size: of what a memory is, a sentence.
        groups: of the plans, and how many there are of each; empty: no boxes.
        chart: False: the filter and the legend alone, for a run without a loss to draw.
    """

    block: ClassVar[str] = "front"
    note: str = ""
    size: str = ""
    groups: Sequence[tuple[str, int]] = ()
    chart: bool = True


@dataclass(frozen=True, kw_only=True)
class Records(Block):
    """The records of the page, a line each."""

    block: ClassVar[str] = "records"


@dataclass(frozen=True)
class Part:
    """Blocks under a heading.

    Attributes:
        name: id, for links to it.
        title: the heading.
        blocks: in their order; a text is a paragraph.
        note: how to read them, above them; empty: nothing.
        source: where its numbers are from, a key of `SOURCES`; empty: where all others are from.
    """

    name: str
    title: str
    blocks: Sequence[Block | str]
    note: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page shows.

    Attributes:
        title: its heading.
        about: what was measured, where and with what, a line.
        advice: what to do, in large type; empty: nothing can be said.
        next: what to type; None: nothing follows.
        verdict: what was shown; empty: nothing was asked.
        source: where the advice is from, see `Part.source`.
        judged: id of the part that says how the verdict was found; empty: none does.
        rules: how to read the page, a paragraph each.
        facts: names with their values.
        spellings: what a reader may copy, each with an id, a name and the text; the last may be long.
        missing: plans that are not there, each with what it lacks.
        parts: in their order.
        plans: in the order of their numbers.
        questions: of the large chart, see `question`.
        memory: bytes that the reader's memory has at first, and how they are written; None: none is set.
        records: whose lines numbers lead to.
    """

    title: str
    about: str
    advice: str = ""
    next: str | None = None
    verdict: str = ""
    source: str = ""
    judged: str = ""
    rules: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    spellings: Sequence[tuple[str, str, str]] = ()
    missing: Sequence[tuple[str, str]] = ()
    parts: Sequence[Part]
    plans: Mapping[str, Plan]
    questions: Sequence[Mapping[str, object]] = ()
    memory: tuple[int, str] | None = None
    records: Sequence[Record] = ()

    def data(self) -> dict[str, object]:
        """Return what the scripts read; of plans their numbers and words, of charts the numbers that are drawn."""
        plans = [{k: v for k, v in vars(each).items() if v or k in ("number", "label")} for each in self.plans.values()]
        blocks = [block for part in self.parts for block in part.blocks]
        charts = [chart for block in blocks if isinstance(block, Charts) for chart in block.charts]
        return {"plans": plans, "asked": self.questions, "charts": charts, "memory": self.memory}


_READABLE = 10
SOURCES = {
    "search": "measured on search text",
    "unseen": "measured on unseen text",
    "computed": "computed, not measured",
    "documented": "from documentation, not measured",
}


def colour(index: int) -> str:
    """Return the class of the index-th plan's colour, 'full' not counted."""
    return f"p{index % COLOURS}" + (" again" if index >= COLOURS else "")


def question(
    name: str,
    axis: str,
    unit: str,
    full: int,
    points: Sequence[Point],
    *,
    whole: str | None = None,
    **more: object,
) -> dict[str, object]:
    """Return a question of the large chart: bytes against the loss in something.

    Args:
        name: what the loss is in.
        axis: what a loss is, with its unit.
        unit: of the losses, in a few words.
        full: bytes of the uncompressed cache.
        points: of the plans.
        whole: number of 'full', which loses 0 at all bytes, where it may be on the front; None: it is not asked.
        more: `tokens` that the cache held, `limit` and `loss_limit` to draw, `plan`: the number of one to ring,
            `plans`: their texts by number, where they are not those of the page's plans.
    """
    places = [(each.share, each.loss, each.number) for each in points] + ([] if whole is None else [(1.0, 0.0, whole)])
    return {
        "name": name,
        "axis": axis,
        "unit": unit,
        "full": full,
        "full_text": byte_text(full),
        "front": [number for *_, number in front_of(places, lambda each: each[:2])],
        "points": [[each.number, each.bytes, byte_text(each.bytes), *each[2:]] for each in points],
        **more,
    }


def render(page: Page) -> str:
    """Return the page as text; no text of a plan or a record becomes HTML or a script."""
    lines = numbered(page.records)
    return _template().render(
        page=page,
        sources=SOURCES,
        dash=DASH,
        style=Markup(_style()),
        scripts=Markup(_text("chart.js") + _text("page.js")),
        data=_embedded(page.data()),
        lines=lines,
        behind=lambda keys: behind(keys, lines),
        same_records=lambda row: _same_records(row, lines),
        record_tables=_record_tables,
    )


@cache
def _template() -> Template:
    loader = PackageLoader("kvtailor.bench.report", "page")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja")


@cache
def _text(name: str) -> str:
    """A style sheet or a script without the depth of its lines and without remarks, which are no part of a page."""
    text = (files("kvtailor.bench.report.page") / name).read_text(encoding="utf-8")
    return re.sub(r"^\s*(//[^\n]*\n|/\*.*?\*/\n)?[ ]*", "", text, flags=re.MULTILINE | re.DOTALL)


def _style() -> str:
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
    plans = "\n".join(f".p{i} {{ color: var(--p{i}); }}" for i in [*range(COLOURS), "f"])
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{plans}\n{_text('page.css')}"
    )


def _embedded(data: object) -> Markup:
    """Data as JSON that no text in it can end; a number that is NaN or infinite is a ValueError."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


def numbered(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of each record's line on the page, by key: the line's id is "r" and the number."""
    return {record.key: number for number, record in enumerate(records, 1)}


def behind(keys: Sequence[str], lines: Mapping[str, int]) -> str:
    """Return the lines of records, neighbours as ranges such as "4-9 12": a page of many plans has thousands of these.

    Args:
        keys: of the records; those that are not on the page are left out.
        lines: from `numbered`.
    """
    runs: list[list[int]] = []
    for line in (lines[key] for key in dict.fromkeys(keys) if key in lines):
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _same_records(cells: Sequence[Cell], lines: Mapping[str, int]) -> str:
    """The lines of records of a row where all of its numbers are of the same; else none.

    Its name then leads to them, so that a keyboard has one stop for the row and not one for each number.
    """
    found = {cell.keys for cell in cells if cell.text is not None and cell.keys}
    return behind(found.pop(), lines) if len(found) == 1 else ""


_OF_RECORD: dict[str, Callable[[Record], object]] = {
    "version": lambda record: record.task_version,
    "text": lambda record: record.text,
    "samples": lambda record: record.samples,
    "seen": lambda record: record.tokens_seen,
    "held": lambda record: record.tokens_held,
    "bytes": lambda record: record.bytes_held,
    "run": lambda record: record.run,
    "key": lambda record: record.key,
    "error": lambda record: record.error,
}


def _record_tables(
    records: Sequence[Record], plans: Mapping[str, Plan]
) -> Iterator[tuple[str, list[str], dict[str, list[str]], list[int]]]:
    """For each task and kind of document its name, what is the same in all its lines, its columns and its line numbers.

    That two columns are the same is said as well, instead of the second. A plan is its number, in whose place the
    script writes its words: with them, the records of sixty plans would have most of the page.
    """
    lines = list(enumerate(records, 1))
    for task, kind in dict.fromkeys((record.task, record.point.get("kind")) for record in records):
        mine = [each for each in lines if (each[1].task, each[1].point.get("kind")) == (task, kind)]
        points = dict.fromkeys(name for _, record in mine for name in record.point)
        plan = [plans[r.plan_hash].number if r.plan_hash in plans else r.label for _, r in mine]
        columns: dict[str, list[str]] = {"plan": plan}
        columns |= {name: [_written(record.point.get(name)) for _, record in mine] for name in points}
        columns |= {name: [_written(of(record)) for _, record in mine] for name, of in _OF_RECORD.items()}
        same: list[str] = []
        shown: dict[str, list[str]] = {}
        for name, values in columns.items():
            words = name.replace("_", " ")
            twin = next((other for other, known in shown.items() if known == values), None)
            # Plans and keys tell lines from each other, so they stay where they happen to be the same.
            if name not in ("plan", "key") and len(set(values)) == 1:
                same += [f"{words} {values[0]}"] if values[0] != DASH else []
            elif twin is not None:
                same.append(f"{words} as {twin}")
            else:
                shown[words] = values
        yield task, same, shown, [number for number, _ in mine]


def _written(value: object) -> str:
    if value is None or value == "":
        return DASH
    return f"{value:g}" if isinstance(value, float) else str(value)
