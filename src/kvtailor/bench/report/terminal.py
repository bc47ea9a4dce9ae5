"""A run in a terminal: the answer, the table, the small print; and the tables of a suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import Summary
from kvtailor.bench.report.machines import hardware_text, versions_text
from kvtailor.bench.report.suite.tables import SuitePages
from kvtailor.bench.report.table import OWN, Row
from kvtailor.bench.report.tables.grid import Cell, Grid
from kvtailor.bench.report.tables.tables import brief_grid

__all__ = ["show", "show_suite"]

Column = tuple[str, Literal["left", "right"], list[Text]]
"""Name, side and cells; that of the plans has the name 'plan'."""

MISSING = "–"
_NARROW = 120
_PLAN_WIDTH = 60  # beyond which a plan's line is folded
_LOSS = "ΔNLL (95 %)"


def show(summary: Summary, console: Console) -> None:
    """Prints a summary.

    In a terminal of fewer than 120 columns plans are numbered, since a plan's line is too long for a cell, and
    intervals go to a second line of their cell.
    """
    console.print()
    advice = summary.advice
    if advice.sentence:
        console.print(Text(advice.sentence, style="bold"))
        console.print()
    console.print(Text(summary.headline, style="dim" if advice.sentence else "bold"))
    console.print()
    narrow = console.width < _NARROW
    if narrow:
        for number, row in enumerate(_plans(summary), 1):
            console.print(Text(f" {number}  {row.label}", style="bold" if row.is_full else ""))
        console.print()
    joint = "\n" if narrow else "  "
    for table in _fit(_columns(brief_grid(summary.rows), summary, joint, numbered=narrow), console):
        console.print(table)
        console.print()
    if _says_more(summary):
        console.print(
            Text("Every text and task; below each the 95 % interval of the difference to 'full'", style="bold")
        )
        console.print()
        every = summary.quality
        heads = tuple(head.replace(", ", "\n") for head in every.heads)
        for table in _fit(_columns(replace(every, heads=heads), summary, "\n", numbered=narrow), console):
            console.print(table)
            console.print()
    if summary.missing:
        console.print(Text("Not in this kvtailor yet, so not measured:", style="bold yellow"))
        for plan, what in summary.missing:
            console.print(Text(f"  {plan}: {what}"))
        console.print()
    for note in summary.footnotes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
    what = ", ".join(filter(None, [hardware_text(summary.machines), versions_text(summary.machines)]))
    console.print(Padding(Text(f"{what}.", style="dim"), (0, 0, 0, 1)))
    if advice.next is not None:
        console.print()
        console.print(Text(f"Next: {advice.next}", style="bold"), soft_wrap=True)


def show_suite(pages: SuitePages, console: Console) -> None:
    """Prints all tables, each in as many parts as the terminal's width needs."""
    for grid in pages.grids:
        console.print()
        console.print(Text(grid.title, style="bold"))
        console.print()
        for part in _fit(list(_suite_columns(grid)), console):
            console.print(part)
            console.print()
        if grid.note:
            console.print(Padding(Text(grid.note, style="dim"), (0, 0, 0, 1)))
    if pages.idle:
        console.print(Text(f"Not run: {'; '.join(pages.idle)}.", style="yellow"))
    console.print(Text(pages.line, style="dim"))


def _plans(summary: Summary) -> list[Row]:
    return [row for row in summary.rows if row.plan_hash != OWN]


def _columns(grid: Grid, summary: Summary, joint: str, *, numbered: bool) -> list[Column]:
    """The columns of a table of plans.

    Args:
        grid: the table.
        summary: whose plans it has.
        joint: stands between a number and its interval.
        numbered: plans are named by their numbers.
    """
    rows = _plans(summary)
    names = [str(number) if numbered else row.label for number, row in enumerate(rows, 1)]
    plans = [Text(name, style="bold" if row.is_full else "") for name, row in zip(names, rows, strict=True)]
    columns: list[Column] = [("plan", "left", plans)]
    for index, head in enumerate(grid.heads[1:], 1):
        cells = [_text(row[index], joint) for row in grid.rows]
        if head == _LOSS:
            for text, row in zip(cells, rows, strict=True):
                text.stylize_before(_colour(row, summary.margins))
        columns.append((head, "right", cells))
    return columns


def _suite_columns(grid: Grid) -> Iterator[Column]:
    for index, head in enumerate(grid.heads):
        cells = [Text(_two_lines(row[index])) for row in grid.rows]
        yield ("plan" if index == 0 else head.replace(" (", "\n("), "left" if index == 0 else "right", cells)


def _two_lines(cell: Cell) -> str:
    """A cell with what stands in brackets below it."""
    whole = f"{cell.text} ({cell.interval})" if cell.interval else cell.text or "–"
    return whole.replace(" (", "\n(")


def _text(cell: Cell, joint: str) -> Text:
    if cell.text is None:
        return Text(MISSING, style="dim")
    text = Text(cell.text)
    return text.append(joint + cell.interval.replace(" to ", " … "), style="dim") if cell.interval else text


def _says_more(summary: Summary) -> bool:
    """Whether there is a text or a task that the main table does not show by itself."""
    tasks = [measure.task for measure in summary.measures]
    return tasks.count("perplexity") > 1 or tasks.count("needle") > 1 or not {"perplexity", "needle"}.issuperset(tasks)


def _fit(columns: list[Column], console: Console) -> Iterator[Table]:
    """Tables that the terminal is wide enough for, with the first column in each; columns of dashes are left out."""
    plan, *others = [column for column in columns if any(str(cell) != MISSING for cell in column[2])]
    group = [plan]
    for column in others:
        if len(group) > 1 and sum(map(_width, [*group, column])) > console.width:
            yield _table_of(group)
            group = [plan]
        group.append(column)
    yield _table_of(group)


def _width(column: Column) -> int:
    name, _, cells = column
    if name == "plan":
        return 2 + min(_PLAN_WIDTH, max(len(name), *(cell.cell_len for cell in cells)))
    return 2 + max(*map(len, name.split("\n")), *(len(line) for cell in cells for line in cell.plain.split("\n")))


def _table_of(columns: list[Column]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False, collapse_padding=False)
    table.pad_edge = True
    for name, side, _ in columns:
        least = len(name) if name == "plan" else None
        table.add_column(name, justify=side, no_wrap=name != "plan", overflow="fold", vertical="top", min_width=least)
    for cells in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _colour(row: Row, margins: Margins) -> str:
    """Green: the whole interval is below the margin. Yellow: all of it is above 0. No colour: neither."""
    if row.is_full or row.loss is None or row.loss.low is None or row.loss.high is None:
        return ""
    if row.loss.high < margins.nats:
        return "green"
    return "yellow" if row.loss.low > 0 else ""
