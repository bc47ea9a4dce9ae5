"""The page of a run, or of a folder of runs, with the tables of suites: from records alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvtailor.bench.report import Summary
from kvtailor.bench.report.charts import (
    Chart,
    Drawn,
    along,
    budgets,
    by_layer,
    every_task,
    needles,
    questions,
    times,
)
from kvtailor.bench.report.front import pareto
from kvtailor.bench.report.machines import hardware_text, versions_text
from kvtailor.bench.report.page import (
    Block,
    Charts,
    Facts,
    Front,
    Page,
    Part,
    Plan,
    Records,
    Table,
    behind,
    colour,
    numbered,
    render,
)
from kvtailor.bench.report.suite.tables import SuitePages
from kvtailor.bench.report.table import OWN, Row
from kvtailor.bench.report.tables.grid import Grid

__all__ = ["about", "run_page"]

_MANY_ROWS = 40
_NOTE = (
    "Each point is a plan: the share of the uncompressed bytes that it holds, and what it lost to 'full' there, with "
    "the 95 % interval. The line joins the front: no other plan has fewer bytes and loses less by its mean. A plan "
    "that leads by its mean alone may have had luck; the verdict above is the test."
)
_SIZE = (
    "Of the whole cache, as long as it was here: such as 300KiB, 2GiB or 25%. Longer contexts take more; kvtailor "
    "fit answers for yours."
)
_BARS = (
    "A bar for each plan, by its number. Whiskers: the 95 % interval of the paired difference to 'full', drawn around "
    "the bar. The dashed line is 'full'."
)
_HELD = (
    "Bytes without another word are bytes held, in tables, charts, the verdict and the memory above: every storage of "
    "a plan's whole cache, each counted once, read when the cache was weighed. Codes, scales, indices and the tail in "
    "full precision are all in it. In percent it is over the keys and values of the same tokens without compression, "
    "where charts draw 'full'; the row of 'full' is some percent above 100 where its cache has free slots."
)
_SIZES = (
    (
        "plans",
        "tokens held",
        "How many tokens still have keys and values: a plan with fewer tokens, or with fewer bits for each, has fewer "
        "bytes, and the two shares are not the same.",
    ),
    (
        "memory",
        "resident",
        "How much memory a fresh process grew for each cache that it holds, by the operating system and not by our "
        "count. It checks bytes held.",
    ),
    (
        "memory",
        "peak, prefill",
        "The highest memory of that process in one prefill, above what it held before: the cache and all that the "
        "prefill works with. A small cache may have a high peak.",
    ),
    ("memory", "peak, decode", "The same while it decodes after that prefill."),
    ("capacity", "memory", "The memory that a batch or a context was fitted into."),
    ("capacity", "one more token", "How many bytes the cache grows for one more token."),
    ("speculation", "on the device", "All caches that are at work at once, those of the drafts included."),
    ("speculation", "plain, on the device", "The same without a draft."),
)
"""Sizes that are not bytes held: the table that has them, their head there, and what they are."""


def run_page(summary: Summary, suites: Sequence[SuitePages] = ()) -> str:
    """Return the page as text.

    Args:
        summary: of the run.
        suites: whose tables come first, from `suite_pages` of the same records.
    """
    records, rows = summary.records, [row for row in summary.rows if row.plan_hash != OWN]
    lines = numbered(records)
    drawn = Drawn(
        rows=rows,
        front=pareto(rows),
        records=[record for record in records if record.error is None],
        by_key={record.key: record for record in records},
        plans=_plans(rows),
        behind=lambda keys: behind(keys, lines),
    )
    asked = questions(drawn, summary.measures)
    rests = Part(
        "rests",
        "What the numbers rest on",
        [*summary.footnotes, Records()],
    )
    return render(
        Page(
            title=f"kvtailor bench: {records[0].model}",
            about=about(summary, len(rows)),
            advice=summary.advice.sentence,
            next=summary.advice.next,
            verdict=summary.headline,
            judged="rests",
            missing=summary.missing,
            parts=[*map(_suite, suites), *_parts(summary, drawn, asked), rests],
            plans=drawn.plans,
            questions=asked,
            records=records,
        )
    )


def _plans(rows: Sequence[Row]) -> dict[str, Plan]:
    found, others = {}, 0
    for number, row in enumerate(rows, 1):
        kind = "pf" if row.is_full else colour(others)
        found[row.plan_hash] = Plan(number=str(number), label=row.label, kind=kind, whole=row.is_full)
        others += not row.is_full
    return found


def about(summary: Summary, plans: int) -> str:
    """What was run, where and with what."""
    records, first, versions = summary.records, summary.records[0], versions_text(summary.machines)
    size = f", {first.parameters / 1e6:.1f} million parameters" if first.parameters else ""
    days = sorted({record.started[:10] for record in records})
    runs = sorted({record.run for record in records})
    run = f"Run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs, {runs[0]} to {runs[-1]}"
    return (
        f"{first.model}{size}, {first.dtypes} on {first.device}; {hardware_text(summary.machines)}"
        f"{', ' + versions if versions else ''}; {' to '.join(dict.fromkeys([days[0], days[-1]]))}. "
        f"{run}: {plans} {'plan' if plans == 1 else 'plans'}, {len(records)} records."
    )


def _suite(suite: SuitePages) -> Part:
    blocks: list[Block | str] = []
    for grid in suite.grids:
        blocks += [Table(grid=grid, heading=grid.title, numbered=False), grid.note]
    if suite.idle:
        blocks.append(f"Not run: {'; '.join(suite.idle)}.")
    return Part(f"suite-{suite.name}", suite.title, blocks, note=suite.line)


def _parts(summary: Summary, drawn: Drawn, asked: Sequence[Chart]) -> Iterator[Part]:
    """Everything that was measured, each part where there is something in it."""
    best = {row.plan_hash: "on the front" for row in drawn.front}
    full = {row.plan_hash: "full" for row in drawn.rows if row.is_full}
    if asked:
        yield Part("front", "Bytes against loss", [Front(note=_NOTE, size=_SIZE)])
    tools = [] if asked or len(drawn.rows) < 2 else [Front(chart=False)]
    yield Part("plans", "Plans", [*tools, Table(grid=summary.plans, tags=best, classes=full)])
    yield Part("bytes", "What bytes mean here", list(_sizes([summary.plans, *summary.tasks])))
    if len(summary.measures) > 1:
        grid = summary.quality
        yield Part("quality", grid.title, [Table(grid=grid, classes=full)], note=grid.note)
    few = _of_many(drawn)
    layers = "Each layer for itself, against what 'full' holds there."
    small: tuple[tuple[str, str, Iterable[Chart], str], ...] = (
        ("quality-charts", "Every text and task as bars", every_task(drawn, summary.measures), _BARS),
        ("time-charts", "Time and throughput", times(drawn), ""),
        ("along", "Along context, batch and length", along(drawn), "Measured points only, joined by lines."),
        ("layers", "Fidelity by layer", by_layer(drawn), layers),
    )
    for name, title, charts, note in small:
        if found := list(charts):
            yield Part(name, title, [Charts(charts=found)], note=f"{note} {few}".strip())
    for name, title, maps in (
        ("budgets", "Budget by layer and head", list(budgets(drawn))),
        ("needles", "Needles", list(needles(drawn))),
    ):
        if maps:
            yield Part(name, title, maps, note=few)
    for grid in summary.tasks:
        table = Table(grid=grid, folded=len(grid.rows) > _MANY_ROWS)
        yield Part(f"of-{grid.name}", grid.title, [table], note=grid.note)


def _of_many(drawn: Drawn) -> str:
    """Which plans a small chart has, where it has not all of them."""
    if len(drawn.few) == len(drawn.rows):
        return ""
    return (
        f"Drawn are {len(drawn.few)} of {len(drawn.rows)} plans: 'full', the front of bytes against loss, and of the "
        "others those that lose least. The large chart and the tables have every plan, and results.csv every number."
    )


def _sizes(grids: Sequence[Grid]) -> Iterator[Block | str]:
    """What bytes are, and how the other sizes of these tables differ from them."""
    of = {grid.name: grid for grid in grids}
    others = [
        (f"{head}, in {of[name].title}", what) for name, head, what in _SIZES if name in of and head in of[name].heads
    ]
    yield _HELD
    if others:
        yield "These are something else:"
        yield Facts(facts=others, definitions=True)
