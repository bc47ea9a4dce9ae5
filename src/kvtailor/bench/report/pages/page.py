"""One self-contained HTML page of a run: no other file, no network; light and dark; made from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import Summary, summarise
from kvtailor.bench.report.charts.charts import Drawn, against_memory, colour, every_task, legible, times
from kvtailor.bench.report.charts.losses import Losses, chart_data, losses
from kvtailor.bench.report.charts.maps import budgets, needles
from kvtailor.bench.report.charts.sweeps import along, by_layer
from kvtailor.bench.report.front import pareto
from kvtailor.bench.report.machines import hardware_text, versions_text
from kvtailor.bench.report.pages.browser.pareto import embedded
from kvtailor.bench.report.pages.choice import choice, filter_alone
from kvtailor.bench.report.pages.html import numbered, quoted, records_table, table
from kvtailor.bench.report.pages.sizes import sizes
from kvtailor.bench.report.pages.style import browser_text, style
from kvtailor.bench.report.points import of_one_model
from kvtailor.bench.report.rows import OWN, Row
from kvtailor.bench.report.suite.pages import SuitePages
from kvtailor.bench.report.tables.grid import Grid
from kvtailor.bench.report.tables.tables import main_grid, quality_grid, task_grids
from kvtailor.bench.schema import Record

__all__ = ["page"]


class Section(NamedTuple):
    """A part of the page: its id, its heading, and its HTML below the heading."""

    name: str
    title: str
    body: str


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
        title: of the page; the model's name follows it.
        margins: what counts as no loss in the headline; None: the usual ones.
        left_out: sentences on what could not be read.

    Raises:
        ArgumentError: no records.
    """
    summary = summarise(records, margins, left_out)
    records, _ = of_one_model(records)
    plans = [row for row in summary.rows if row.plan_hash != OWN]
    drawn = Drawn(
        plans=plans,
        few=legible(plans, pareto(plans)),
        records=[r for r in records if r.error is None],
        by_key={record.key: record for record in records},
        numbers={row.plan_hash: str(number) for number, row in enumerate(plans, 1)},
        kinds=_kinds(plans),
        lines=numbered(records),
    )
    asked = losses(drawn, summary.measures)
    parts = [
        *(_suite(suite, drawn) for suite in suites),
        *_sections(summary, drawn, asked),
        Section("rests", "What the numbers rest on", _rests(summary, records, drawn)),
    ]
    named = f"{title}: {records[0].model}"
    data = embedded("report-data", chart_data(drawn, asked))
    scripts = "".join(map(browser_text, ("sorting.js", "chart.js", "choice.js", "report.js")))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(named)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style('pareto.css', 'report.css')}</style></head>\n"
        f"<body><main>{_top(named, records, summary)}{_contents(parts)}{''.join(_missing(summary))}"
        f"{''.join(map(_shown, parts))}</main>{data}<script>{scripts}</script></body></html>\n"
    )


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


def _top(title: str, records: Sequence[Record], summary: Summary) -> str:
    """What was run, and the verdict."""
    runs = sorted({record.run for record in records})
    run = f"Run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs, {runs[0]} to {runs[-1]}"
    plans = sum(row.plan_hash != OWN for row in summary.rows)
    counts = f"{plans} {'plan' if plans == 1 else 'plans'}, {len(records)} records"
    return (
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="dim">{escape(_where(records, summary))} {escape(run)}: {counts}.</p>'
        f"{_advice(summary)}"
        f'<p class="verdict"><strong class="what">Verdict, by an equivalence test</strong> {escape(summary.headline)}'
        ' <a href="#rests">How it was judged</a></p></header>'
    )


def _advice(summary: Summary) -> str:
    """What to do, above the verdict that it rests on."""
    advice = summary.advice
    if not advice.sentence:
        return ""
    following = f"Next: <code>{escape(advice.next)}</code>" if advice.next is not None else ""
    return f'<p class="advice"><strong>{escape(advice.sentence)}</strong> {following}</p>'


def _where(records: Sequence[Record], summary: Summary) -> str:
    first, versions = records[0], versions_text(summary.machines)
    size = f", {first.parameters / 1e6:.1f} million parameters" if first.parameters else ""
    days = sorted({record.started[:10] for record in records})
    return (
        f"{first.model}{size}, {first.dtypes} on {first.device}; {hardware_text(summary.machines)}"
        f"{', ' + versions if versions else ''}; {' to '.join(dict.fromkeys([days[0], days[-1]]))}."
    )


def _contents(parts: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{quoted(part.name)}">{escape(part.title)}</a></li>' for part in parts)
    return f'<nav class="contents" aria-label="contents of this page"><ol>{links}</ol></nav>'


def _shown(part: Section) -> str:
    return f'<section id="{quoted(part.name)}"><h2>{escape(part.title)}</h2>{part.body}</section>'


def _missing(summary: Summary) -> Iterator[str]:
    if summary.missing:
        yield '<section class="missing"><strong>Not in this kvtailor yet, so not measured:</strong><ul>'
        yield from (f"<li><code>{escape(plan)}</code>: {escape(what)}</li>" for plan, what in summary.missing)
        yield "</ul></section>"


def _sections(summary: Summary, drawn: Drawn, asked: Sequence[Losses]) -> Iterator[Section]:
    """Everything that was measured, each part where there is something in it."""
    further = list(task_grids(drawn.records, summary.rows))
    main = main_grid(summary.rows)
    best = {row.plan_hash: "on the front" for row in pareto(drawn.plans)}
    full = {row.plan_hash: "full" for row in drawn.plans if row.is_full}
    if asked:
        yield Section("front", "Bytes against loss", choice(drawn, asked))
    tools = "" if asked or len(drawn.plans) < 2 else filter_alone(drawn)
    yield Section(
        "plans", "Plans", tools + table(main, drawn.lines, drawn.numbers, drawn.kinds, tags=best, classes=full)
    )
    yield Section("bytes", "What bytes mean here", sizes([main, *further]))
    if len(summary.measures) > 1:
        grid = quality_grid(summary.measures, summary.rows)
        shown = table(grid, drawn.lines, drawn.numbers, drawn.kinds, classes=full)
        yield Section("quality", grid.title, _note(grid.note) + shown)
    charts = (
        ("memory-charts", "Quality against memory", against_memory(drawn, summary.measures), _FRONT),
        ("quality-charts", "Every text and task as bars", every_task(drawn, summary.measures), _BARS),
        ("time-charts", "Time and throughput", times(drawn), ""),
        ("along", "Along context, batch and length", along(drawn), "Measured points only, joined by lines."),
    )
    for name, title, figures, note in charts:
        yield from _figures(name, title, figures, f"{note} {_of_many(drawn)}".strip())
    if held := "".join(budgets(drawn)):
        yield Section("budgets", "Budget by layer and head", _note(_of_many(drawn)) + held)
    layers = f"Each layer for itself, against what 'full' holds there. {_of_many(drawn)}".strip()
    yield from _figures("layers", "Fidelity by layer", by_layer(drawn), layers)
    if found := "".join(needles(drawn)):
        yield Section("needles", "Needles", _note(_of_many(drawn)) + found)
    yield from (_of_grid(grid, drawn) for grid in further)


def _of_many(drawn: Drawn) -> str:
    """Which plans a small chart has, where it has not all of them."""
    if len(drawn.few) == len(drawn.plans):
        return ""
    return (
        f"Drawn are {len(drawn.few)} of {len(drawn.plans)} plans: 'full', the front of bytes against loss, and of the "
        "others those that lose least. The large chart and the tables have every plan, and results.csv every number."
    )


def _figures(name: str, title: str, figures: Iterable[str], note: str) -> Iterator[Section]:
    if found := "".join(figures):
        yield Section(name, title, f'{_note(note)}<div class="charts">{found}</div>')


def _of_grid(grid: Grid, drawn: Drawn) -> Section:
    shown = table(grid, drawn.lines, drawn.numbers, drawn.kinds)
    if len(grid.rows) > _MANY_ROWS:
        shown = f"<details><summary>{len(grid.rows)} rows</summary>{shown}</details>"
    return Section(f"of-{grid.name}", grid.title, _note(grid.note) + shown)


def _suite(suite: SuitePages, drawn: Drawn) -> Section:
    body = _note(suite.line)
    for grid in suite.grids:
        body += f"<h3>{escape(grid.title)}</h3>{table(grid, drawn.lines, {}, {})}{_note(grid.note)}"
    if suite.idle:
        body += _note(f"Not run: {'; '.join(suite.idle)}.")
    return Section(f"suite-{suite.name}", suite.title, body)


def _note(text: str) -> str:
    return f'<p class="dim">{escape(text)}</p>' if text else ""


def _rests(summary: Summary, records: Sequence[Record], drawn: Drawn) -> str:
    return "".join(f"<p>{escape(note)}</p>" for note in summary.footnotes) + records_table(records, drawn.numbers)
