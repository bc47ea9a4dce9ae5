"""All pages of a run as texts by file name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import Summary, summarise
from kvtailor.bench.report.leaderboard import board_grid, leaderboard_page
from kvtailor.bench.report.run_page import run_page
from kvtailor.bench.report.suite.pages import SuitePages, suite_pages
from kvtailor.bench.report.suite.ranking import rank
from kvtailor.bench.report.suite.tables import provenance
from kvtailor.bench.report.table import as_long_csv
from kvtailor.bench.report.tables.grid import Grid, as_csv, as_latex, as_markdown, safe_markdown, visible
from kvtailor.bench.report.tables.tables import main_grid, quality_grid, task_grids
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.suite import Suite

__all__ = ["markdown_page", "texts"]


def texts(
    records: Sequence[Record],
    suites: Sequence[Suite] = (),
    margins: Margins | None = None,
    left_out: Sequence[str] = (),
) -> dict[str, str]:
    """`report.html`, `report.md`: everything; `results.csv`: every number, a row each; `table.tex`: the main table.

    The tables over all points are `NAME.tex`: quality, and of speed, memory, capacity and fidelity those that were
    measured. Tables of a suite are `suite-SUITE-TABLE.csv` and `.tex`; where it asks for a leaderboard, that is
    `leaderboard-SUITE.html` and `.csv`.

    Args:
        records: of one run, or of a folder of runs.
        suites: those whose tables are wanted; one that has no record is passed over.
        margins: what counts as no loss in the headline; None: the usual ones.
        left_out: sentences on what could not be read.

    Raises:
        ArgumentError: no records.
    """
    summary = summarise(records, margins, left_out)
    made = [(suite, pages) for suite in suites if (pages := suite_pages(suite, records)) is not None]
    filled = [pages for _, pages in made]
    found = {
        "report.html": run_page(summary, filled),
        "report.md": markdown_page(summary, filled),
        "results.csv": as_long_csv(summary.table()),
        "table.tex": as_latex(main_grid(summary.rows)) + "\n",
    }
    for grid in _further(summary):
        found[f"{grid.name}.tex"] = as_latex(grid) + "\n"
    for grid in (grid for pages in filled for grid in pages.grids):
        found |= {f"suite-{grid.name}.csv": as_csv(grid), f"suite-{grid.name}.tex": as_latex(grid) + "\n"}
    for suite, _ in made:
        ranking = rank(suite, records)
        if ranking is not None:
            found[f"leaderboard-{suite.name}.html"] = leaderboard_page(ranking, provenance(suite, records), records)
            found[f"leaderboard-{suite.name}.csv"] = as_csv(board_grid(ranking))
    slash = r"\textbackslash{}"
    return {name: visible(text, slash if name.endswith(".tex") else "\\") for name, text in found.items()}


def markdown_page(summary: Summary, suites: Sequence[SuitePages] = ()) -> str:
    """The headline, all tables, and what the numbers rest on. Text of a record never becomes HTML."""
    safe = safe_markdown
    advice = [f"**{safe(summary.advice.sentence)}**"] if summary.advice.sentence else []
    parts = [*advice, safe(summary.headline) if advice else f"**{safe(summary.headline)}**"]
    for pages in suites:
        parts.append(f"# {safe(pages.title)}\n\n{safe(pages.line)}")
        parts += [f"## {safe(grid.title)}\n\n{as_markdown(grid)}\n\n{safe(grid.note)}".rstrip() for grid in pages.grids]
        if pages.idle:
            parts.append(f"Not run: {safe('; '.join(pages.idle))}.")
    if summary.missing:
        absent = "\n".join(f"- {safe(plan)}: {safe(what)}" for plan, what in summary.missing)
        parts.append(f"Not in this kvtailor yet, so not measured:\n\n{absent}")
    parts.append(as_markdown(main_grid(summary.rows)))
    for grid in _further(summary):
        parts.append(f"## {safe(grid.title)}\n\n{safe(grid.note)}\n\n{as_markdown(grid)}")
    parts.append("## What the numbers rest on\n\n" + "\n".join(f"- {safe(note)}" for note in summary.footnotes))
    return "\n\n".join(parts) + "\n"


def _further(summary: Summary) -> Iterator[Grid]:
    if summary.measures:
        yield quality_grid(summary.measures, summary.rows)
    yield from task_grids([record for record in summary.records if record.error is None], summary.rows)
