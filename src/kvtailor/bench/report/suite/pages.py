"""A suite's filled tables for every kind of page: as grids for HTML, Markdown, CSV and LaTeX, and in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvtailor.bench.report.suite.tables import FilledCell, FilledTable, provenance, suite_tables
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid
from kvtailor.bench.report.terminal import Column, fit
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.suite import Suite
from kvtailor.errors import KvtailorError

__all__ = ["SuitePages", "show_suite", "suite_pages"]


@dataclass(frozen=True, kw_only=True)
class SuitePages:
    """What pages show of a suite.

    Attributes:
        name: of the suite.
        title: of the suite.
        line: which model, when, where and with what it was measured.
        grids: its tables of which something was run.
        idle: titles of those of which nothing was.
    """

    name: str
    title: str
    line: str
    grids: tuple[Grid, ...]
    idle: tuple[str, ...]


def suite_pages(suite: Suite, records: Sequence[Record], *, only: Sequence[str] = ()) -> SuitePages | None:
    """The tables of a suite that records fill; None where no record is of it.

    Args:
        suite: from `read_suite`.
        records: of any runs.
        only: names of the tables wanted; none: all.
    """
    try:
        tables = [table for table in suite_tables(suite, records) if not only or table.name in only]
    except KvtailorError:
        return None
    run = [table for table in tables if any(cell.keys for row in table.rows for cell in row.cells)]
    return SuitePages(
        name=suite.name,
        title=suite.title,
        line=provenance(suite, records),
        grids=tuple(_grid(suite.name, table) for table in run),
        idle=tuple(table.title for table in tables if table not in run),
    )


def show_suite(pages: SuitePages, console: Console) -> None:
    """Prints all tables, each in as many parts as the terminal's width needs."""
    for grid in pages.grids:
        console.print()
        console.print(Text(grid.title, style="bold"))
        console.print()
        for part in fit(list(_columns(grid)), console):
            console.print(part)
            console.print()
        if grid.note:
            console.print(Padding(Text(grid.note, style="dim"), (0, 0, 0, 1)))
    if pages.idle:
        console.print(Text(f"Not run: {'; '.join(pages.idle)}.", style="yellow"))
    console.print(Text(pages.line, style="dim"))


def _grid(suite: str, table: FilledTable) -> Grid:
    gaps = any(row.missing for row in table.rows)
    rows = [
        (
            Cell(text=" · ".join(row.labels), value=" · ".join(row.labels)),
            *map(_cell, row.cells),
            *([_gap(row.missing)] if gaps else []),
        )
        for row in table.rows
    ]
    return Grid(
        name=f"{suite}-{table.name}",
        title=table.title,
        note=" ".join(table.notes),
        heads=(" · ".join(table.labels), *table.columns, *(["not in this kvtailor yet"] if gaps else [])),
        rows=tuple(rows),
        plans=tuple(" ".join(dict.fromkeys(cell.plan_hash for cell in row.cells)) for row in table.rows),
    )


def _cell(cell: FilledCell) -> Cell:
    ends = (cell.low, cell.high) if cell.low is not None and cell.high is not None else None
    if cell.value is None:
        return Cell(keys=cell.keys)
    text, _, interval = cell.text.removesuffix(")").partition(" (")
    return Cell(text=text, value=cell.value, interval=interval or None, ends=ends, keys=cell.keys)


def _gap(missing: Sequence[str]) -> Cell:
    return Cell(text=", ".join(missing), value=", ".join(missing)) if missing else EMPTY


def _columns(grid: Grid) -> Iterator[Column]:
    for index, head in enumerate(grid.heads):
        cells = [Text(_two_lines(row[index])) for row in grid.rows]
        yield ("plan" if index == 0 else head.replace(" (", "\n("), "left" if index == 0 else "right", cells)


def _two_lines(cell: Cell) -> str:
    """A cell with what stands in brackets below it."""
    whole = f"{cell.text} ({cell.interval})" if cell.interval else cell.text or "–"
    return whole.replace(" (", "\n(")
