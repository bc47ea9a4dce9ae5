"""One self-contained HTML page of a run: no other file, no network; light and dark; made from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import Summary, summarise
from kvtailor.bench.report.charts.charts import Drawn, against_memory, colour, every_task, times
from kvtailor.bench.report.charts.maps import budgets, needles
from kvtailor.bench.report.charts.sweeps import along, by_layer
from kvtailor.bench.report.machines import hardware_text, versions_text
from kvtailor.bench.report.pages.html import quoted, records_table, table
from kvtailor.bench.report.pages.style import SCRIPT, STYLE
from kvtailor.bench.report.points import of_one_model
from kvtailor.bench.report.rows import OWN, Row
from kvtailor.bench.report.suite.pages import SuitePages
from kvtailor.bench.report.tables.costs import grids
from kvtailor.bench.report.tables.tables import main_grid, quality_grid
from kvtailor.bench.schema import Record

__all__ = ["page", "pareto"]


def page(
    records: Sequence[Record],
    suites: Sequence[SuitePages] = (),
    *,
    title: str = "kvtailor bench",
    margins: Margins | None = None,
    left_out: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        records: of one run, or of a folder of runs.
        suites: whose tables come first, from `suite_pages` of the same records.
        title: of the window.
        margins: what counts as no loss in the headline; None: the usual ones.
        left_out: sentences on what could not be read.

    Raises:
        ValueError: no records.
    """
    summary = summarise(records, margins, left_out)
    records, _ = of_one_model(records)
    plans = [row for row in summary.rows if row.plan_hash != OWN]
    there = [r for r in records if r.error is None]
    kinds = _kinds(plans)
    drawn = Drawn(
        plans=plans,
        records=there,
        by_key={record.key: record for record in records},
        numbers={row.plan_hash: str(number) for number, row in enumerate(plans, 1)},
        kinds=kinds,
    )
    parts = [
        f"<h1>{escape(summary.headline)}</h1>",
        f'<p class="dim">{escape(_where(records, summary))}</p>',
        *(part for suite in suites for part in _suite(suite, drawn)),
        *_missing(summary),
        *_tables(summary, drawn),
        *_section(
            "Quality against memory", against_memory(drawn, summary.measures), note=_FRONT, legend=_legend(drawn)
        ),
        *_section("Every text and task", every_task(drawn, summary.measures), note=_BARS),
        *_section("Time and throughput", times(drawn)),
        *_section("Along context, batch and length", along(drawn), note="Measured points only, joined by lines."),
        *budgets(drawn),
        *_section("Fidelity by layer", by_layer(drawn), note="Each layer for itself, against what 'full' holds there."),
        *_maps(needles(drawn)),
        *_further(there, summary, drawn),
        "<h2>What the numbers rest on</h2>",
        *(f"<p>{escape(note)}</p>" for note in summary.footnotes),
        records_table(records),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main>{''.join(parts)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The plans that no other beats in bytes and in loss at once, from few bytes to many."""
    judged = sorted(
        (row for row in rows if row.ratio is not None and row.loss is not None),
        key=lambda row: (row.ratio or 0.0, row.loss.value if row.loss else 0.0),
    )
    found: list[Row] = []
    for row in judged:
        assert row.loss is not None
        if not found or (found[-1].loss is not None and row.loss.value < found[-1].loss.value):
            found.append(row)
    return found


_FRONT = (
    "Bars are 95 % intervals; those of perplexity are the paired difference to 'full', drawn around it. Dashed: the "
    "Pareto front, plans that no other beats in both."
)
_MANY_ROWS = 40
_BARS = (
    "A bar for each plan, by its number. Whiskers: the 95 % interval of the paired difference to 'full', drawn around "
    "the bar. The dashed line is 'full'."
)


def _kinds(plans: Sequence[Row]) -> dict[str, str]:
    others = [row for row in plans if not row.is_full]
    return {row.plan_hash: colour(index) for index, row in enumerate(others)} | {
        row.plan_hash: "pf" for row in plans if row.is_full
    }


def _where(records: Sequence[Record], summary: Summary) -> str:
    first, versions = records[0], versions_text(summary.machines)
    size = f", {first.parameters / 1e6:.1f} million parameters" if first.parameters else ""
    days = sorted({record.started[:10] for record in records})
    return (
        f"{first.model}{size}, {first.dtype} on {first.device}; {hardware_text(summary.machines)}"
        f"{', ' + versions if versions else ''}; {' to '.join(dict.fromkeys([days[0], days[-1]]))}."
    )


def _missing(summary: Summary) -> Iterator[str]:
    if summary.missing:
        yield '<section class="missing"><strong>Not in this kvtailor yet, so not measured:</strong><ul>'
        yield from (f"<li><code>{escape(plan)}</code>: {escape(what)}</li>" for plan, what in summary.missing)
        yield "</ul></section>"


def _tables(summary: Summary, drawn: Drawn) -> Iterator[str]:
    best = {row.plan_hash: "on the front" for row in pareto(drawn.plans)}
    full = {row.plan_hash: "full" for row in drawn.plans if row.is_full}
    grid = main_grid(summary.rows)
    yield "<h2>Plans</h2>"
    yield table(grid, drawn.by_key, drawn.numbers, drawn.kinds, tags=best, classes=full)
    if len(summary.measures) > 1:
        grid = quality_grid(summary.measures, summary.rows)
        yield f'<h2>{escape(grid.title)}</h2><p class="dim">{escape(grid.note)}</p>'
        yield table(grid, drawn.by_key, drawn.numbers, drawn.kinds, classes=full)


def _suite(suite: SuitePages, drawn: Drawn) -> Iterator[str]:
    yield f'<h2>{escape(suite.title)}</h2><p class="dim">{escape(suite.line)}</p>'
    for grid in suite.grids:
        yield f"<h3>{escape(grid.title)}</h3>{table(grid, drawn.by_key, {}, {})}"
        if grid.note:
            yield f'<p class="dim">{escape(grid.note)}</p>'
    if suite.idle:
        yield f'<p class="dim">Not run: {escape("; ".join(suite.idle))}.</p>'


def _further(records: Sequence[Record], summary: Summary, drawn: Drawn) -> Iterator[str]:
    for grid in grids(records, summary.rows):
        shown = table(grid, drawn.by_key, drawn.numbers, drawn.kinds)
        yield f'<h2>{escape(grid.title)}</h2><p class="dim">{escape(grid.note)}</p>'
        if len(grid.rows) > _MANY_ROWS:
            yield f"<details><summary>{len(grid.rows)} rows</summary>{shown}</details>"
        else:
            yield shown


def _section(title: str, figures: Iterable[str], *, note: str = "", legend: str = "") -> Iterator[str]:
    found = list(figures)
    if found:
        yield f"<h2>{escape(title)}</h2>"
        if note:
            yield f'<p class="dim">{escape(note)}</p>'
        yield legend
        yield f'<div class="charts">{"".join(found)}</div>'


def _legend(drawn: Drawn) -> str:
    entries = (
        f'<li><span class="swatch {quoted(drawn.kinds[row.plan_hash])}"></span>'
        f"<span>{escape(drawn.numbers[row.plan_hash])} <code>{escape(row.label)}</code></span></li>"
        for row in drawn.plans
    )
    return f'<ul class="legend" aria-label="the plans by number and colour">{"".join(entries)}</ul>'


def _maps(found: Iterable[str]) -> Iterator[str]:
    parts = list(found)
    if parts:
        yield "<h2>Needles</h2>"
        yield from parts
