"""All pages of a run as texts by file name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import Summary, summarise
from kvtailor.bench.report.leaderboard import board_grid, leaderboard_page
from kvtailor.bench.report.run_page import about, run_page
from kvtailor.bench.report.suite.ranking import rank_each
from kvtailor.bench.report.suite.records import SuiteRun, by_model
from kvtailor.bench.report.suite.tables import SuitePages, provenance, suite_pages
from kvtailor.bench.report.table import as_long_csv
from kvtailor.bench.report.tables.grid import Grid, as_csv, as_latex, as_markdown, safe_markdown, visible
from kvtailor.bench.schema import Record

__all__ = ["markdown_page", "texts"]


def texts(
    records: Sequence[Record],
    runs: Sequence[SuiteRun] = (),
    margins: Margins | None = None,
    left_out: Sequence[str] = (),
) -> dict[str, str]:
    """`report.html`, `report.md`: everything; `results.csv`: every number, a row each; `table.tex`: the main table.

    The tables over all points are `NAME.tex`: quality, and of speed, memory, capacity and fidelity those that were
    measured. Tables of a suite are `suite-SUITE-TABLE.csv` and `.tex`; where it asks for a leaderboard, that is
    `leaderboard-SUITE.html` and `.csv`, of all models that it was run on. Everything else is of the model that was
    measured last.

    Args:
        records: of one run, or of folders of runs.
        runs: of the suites whose tables are wanted, each with records of its folder, which are among the first; one
            that has no record is passed over.
        margins: what counts as no loss in the headline; None: the usual ones.
        left_out: sentences on what could not be read.

    Raises:
        ArgumentError: no records.
        KvtailorError: two folders' runs of a suite cannot stand beside each other.
    """
    summary = summarise(records, margins, left_out)
    suites = {run.suite.name: [each for each in runs if each.suite.name == run.suite.name] for run in runs}
    last = [max(each, key=_last_measured) for each in suites.values()]
    filled = [pages for run in last if (pages := suite_pages(run.suite, run.records)) is not None]
    found = {
        "report.html": run_page(summary, filled),
        "report.md": markdown_page(summary, filled),
        "results.csv": as_long_csv(summary.table()),
        "table.tex": _latex(summary, summary.plans),
    }
    for grid in _further(summary):
        found[f"{grid.name}.tex"] = _latex(summary, grid)
    for grid in (grid for pages in filled for grid in pages.grids):
        found |= {f"suite-{grid.name}.csv": as_csv(grid), f"suite-{grid.name}.tex": as_latex(grid) + "\n"}
    for name, of_suite in suites.items():
        models = by_model(of_suite)
        rankings = rank_each(models)
        if rankings:
            lines = [provenance(run.suite, run.records, model=model) for model, run in models.items()]
            found[f"leaderboard-{name}.html"] = leaderboard_page(rankings, lines, records)
            found[f"leaderboard-{name}.csv"] = as_csv(board_grid(rankings))
    slash = r"\textbackslash{}"
    return {name: visible(text, slash if name.endswith(".tex") else "\\") for name, text in found.items()}


def _last_measured(run: SuiteRun) -> str:
    """When the newest record of any suite was begun."""
    return max((record.started for record in run.records if record.asked is not None), default="")


def markdown_page(summary: Summary, suites: Sequence[SuitePages] = ()) -> str:
    """The headline, all tables, and what the numbers rest on. Text of a record never becomes HTML."""
    safe = safe_markdown
    advice = [f"**{safe(summary.advice.sentence)}**"] if summary.advice.sentence else []
    parts = [*advice, safe(summary.headline) if advice else f"**{safe(summary.headline)}**"]
    parts.append(safe(about(summary, len(summary.rows))))
    for pages in suites:
        parts.append(f"# {safe(pages.title)}\n\n{safe(pages.line)}")
        parts += [f"## {safe(grid.title)}\n\n{as_markdown(grid)}\n\n{safe(grid.note)}".rstrip() for grid in pages.grids]
        if pages.idle:
            parts.append(f"Not run: {safe('; '.join(pages.idle))}.")
    if summary.missing:
        absent = "\n".join(f"- {safe(plan)}: {safe(what)}" for plan, what in summary.missing)
        parts.append(f"Not in this kvtailor yet, so not measured:\n\n{absent}")
    parts.append(as_markdown(summary.plans))
    for grid in _further(summary):
        parts.append(f"## {safe(grid.title)}\n\n{safe(grid.note)}\n\n{as_markdown(grid)}")
    parts.append("## What the numbers rest on\n\n" + "\n".join(f"- {safe(note)}" for note in summary.footnotes))
    return "\n\n".join(parts) + "\n"


def _latex(summary: Summary, grid: Grid) -> str:
    """A table, and in a comment before it of what model it is: a paper says so in its own words."""
    first = summary.records[0]
    return f"% {' '.join(f'{first.model}, {first.dtypes} on {first.device}'.split())}\n{as_latex(grid)}\n"


def _further(summary: Summary) -> Iterator[Grid]:
    if summary.measures:
        yield summary.quality
    yield from summary.tasks
