"""All pages of a run as texts by file name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtailor.bench.report import Summary, summarise
from kvtailor.bench.report.costs import grids
from kvtailor.bench.report.grid import Grid, as_csv, as_latex, as_markdown
from kvtailor.bench.report.page import page
from kvtailor.bench.report.points import of_one_model
from kvtailor.bench.report.tables import csv_text, latex, main_grid, quality_grid
from kvtailor.bench.schema import Record

__all__ = ["markdown_page", "texts"]


def texts(records: Sequence[Record]) -> dict[str, str]:
    """`report.html` and `report.md` have everything; `rows.csv` and `table.tex` the main table, one line for a plan.

    The tables over all points are `NAME.csv` and `NAME.tex`: quality, and of speed, memory, capacity and fidelity those
    that were measured.

    Raises:
        ValueError: no records.
    """
    summary = summarise(records)
    found = {
        "report.html": page(records),
        "report.md": markdown_page(records, summary),
        "rows.csv": csv_text(summary.rows),
        "table.tex": latex(summary.rows) + "\n",
    }
    for grid in _further(records, summary):
        found |= {f"{grid.name}.csv": as_csv(grid), f"{grid.name}.tex": as_latex(grid) + "\n"}
    return found


def markdown_page(records: Sequence[Record], summary: Summary) -> str:
    """The headline, all tables, and what the numbers rest on."""
    parts = [f"**{summary.headline}**"]
    if summary.missing:
        absent = "\n".join(f"- `{plan}`: {what}" for plan, what in summary.missing)
        parts.append(f"Not in this kvtailor yet, so not measured:\n\n{absent}")
    parts.append(as_markdown(main_grid(summary.rows)))
    for grid in _further(records, summary):
        parts.append(f"## {grid.title}\n\n{grid.note}\n\n{as_markdown(grid)}")
    parts.append("## What the numbers rest on\n\n" + "\n".join(f"- {note}" for note in summary.footnotes))
    return "\n\n".join(parts) + "\n"


def _further(records: Sequence[Record], summary: Summary) -> Iterator[Grid]:
    ours, _ = of_one_model(records)
    if summary.measures:
        yield quality_grid(summary.measures, summary.rows)
    yield from grids([record for record in ours if record.error is None], summary.rows)
