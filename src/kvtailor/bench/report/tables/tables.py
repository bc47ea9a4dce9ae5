"""The tables of a run: the plans, every text and task, cost, memory, what fits, fidelity; and the first one as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.rows import OWN, Row
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid, as_latex, as_markdown, interval
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score
from kvtailor.bench.report.words import byte_text, significant

__all__ = ["COLUMNS", "Column", "declared_columns", "latex", "main_grid", "markdown", "measured", "quality_grid"]


class Column(NamedTuple):
    """A column of the main table: its heading, how a row's cell is made, and which of `Row.sources` it rests on."""

    name: str
    cell: Callable[[Row], Cell]
    source: str


def _number(of: Callable[[Row], float | None], digits: int, scale: float = 1.0) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        value = of(row)
        return EMPTY if value is None else Cell(text=f"{scale * value:.{digits}f}", value=scale * value)

    return cell


def _signed(of: Callable[[Row], Estimate | None], digits: int) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        found = of(row)
        if found is None:
            return EMPTY
        if row.is_full:
            return Cell(text="0", value=0.0)
        ends = interval((found.low, found.high), digits, signed=True)
        return Cell(text=f"{found.value:+.{digits}f}", value=found.value, interval=ends)

    return cell


def _share(of: Callable[[Row], Estimate | None]) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        found = of(row)
        if found is None:
            return EMPTY
        ends = None if found.low is None or found.high is None else (100 * found.low, 100 * found.high)
        return Cell(
            text=f"{100 * found.value:.0f}",
            value=100 * found.value,
            interval=None if ends is None else interval(ends, 0),
        )

    return cell


def _bytes(row: Row) -> Cell:
    return EMPTY if row.bytes_held is None else Cell(text=byte_text(row.bytes_held), value=row.bytes_held)


COLUMNS: tuple[Column, ...] = (
    Column("tokens held", _number(lambda row: row.tokens_held, 0), "bytes"),
    Column("bytes held", _bytes, "bytes"),
    Column("bytes, %", _number(lambda row: row.ratio, 1, 100), "bytes"),
    Column("nats over full", _signed(lambda row: row.loss, 4), "loss"),
    Column("perplexity", _number(lambda row: row.perplexity, 3), "perplexity"),
    Column("bits per byte", _number(lambda row: row.bits_per_byte, 4), "perplexity"),
    Column("answers right, %", _share(lambda row: row.accuracy), "needle"),
    Column("recall, %", _share(lambda row: row.recall), "needle"),
    Column("nats over full per answer token", _signed(lambda row: row.answer_loss, 3), "answer_loss"),
    Column("KL", _number(lambda row: row.kl, 4), "fidelity"),
    Column("top-1, %", _number(lambda row: row.top1, 1, 100), "fidelity"),
    Column("TTFT over full", _number(lambda row: row.ttft_ratio, 3), "time_ratio"),
    Column("TPOT over full", _number(lambda row: row.tpot_ratio, 3), "time_ratio"),
    Column("tokens/s", _number(lambda row: row.tokens_per_second, 1), "speed"),
    Column("tokens/s per GiB", _number(lambda row: row.tokens_per_second_per_gib, 0), "speed"),
)
"""What the main table shows of a row. Times in seconds, with their floors, are in the table of cost."""


def measured(rows: Sequence[Row]) -> tuple[list[Row], list[Column]]:
    """The plans, and the columns in which at least one of them has a number."""
    plans = [row for row in rows if row.plan_hash != OWN]
    columns = (*COLUMNS, *declared_columns(plans))
    return plans, [column for column in columns if any(column.cell(row).text is not None for row in plans)]


def declared_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of `Row.metrics`, in the order in which they come."""

    def column(head: str, task: str) -> Column:
        def cell(row: Row) -> Cell:
            value = row.metrics.get(head)
            return EMPTY if value is None else Cell(text=significant(value, 4), value=value)

        return Column(head, cell, task)

    tasks = {head: task for row in rows for head, task in row.metric_tasks.items()}
    return [column(head, task) for head, task in tasks.items()]


def main_grid(rows: Sequence[Row]) -> Grid:
    """One row for each plan, with what was measured."""
    plans, columns = measured(rows)
    body = []
    for row in plans:
        cells = [Cell(text=row.label, value=row.label)]
        for column in columns:
            cell = column.cell(row)
            keys = row.sources.get(column.source, ()) if cell.text is not None else ()
            cells.append(Cell(text=cell.text, value=cell.value, interval=cell.interval, keys=keys))
        body.append(tuple(cells))
    return Grid(
        name="plans",
        title="Plans",
        heads=("plan", *(column.name for column in columns)),
        rows=tuple(body),
        plans=tuple(row.plan_hash for row in plans),
    )


def quality_grid(measures: Sequence[Measure], rows: Sequence[Row]) -> Grid:
    """Every text, kind of document and task (across) for every plan (down)."""
    plans = [row for row in rows if row.plan_hash != OWN]
    body = []
    for row in plans:
        cells = [Cell(text=row.label, value=row.label)]
        cells += [_score(m, m.scores.get(row.plan_hash), is_full=row.is_full) for m in measures]
        body.append(tuple(cells))
    return Grid(
        name="quality",
        title="Every text and task",
        note=_how_to_read(measures),
        heads=("plan", *(_head(measure) for measure in measures)),
        rows=tuple(body),
        plans=tuple(row.plan_hash for row in plans),
    )


def _how_to_read(measures: Sequence[Measure]) -> str:
    units = {measure.difference_unit for measure in measures}
    scores = [measure for measure in measures if measure.difference_unit not in (NATS, POINTS)]
    values = ["perplexity"] * (NATS in units) + ["percent of what is right"] * (POINTS in units)
    values += ["scores on their tasks' own scales"] * bool(scores)
    ways = ["nats per token for perplexity (above 0 is worse)"] * (NATS in units)
    ways += ["points of percent for percentages (below 0 is worse)"] * (POINTS in units)
    for side, lower in (("above", True), ("below", False)):
        names = ", ".join(measure.name for measure in scores if measure.lower_is_better is lower)
        ways += [f"the scale of the score for {names} ({side} 0 is worse)"] * bool(names)
    shown = ", or ".join(values)
    return (
        f"{shown[:1].upper()}{shown[1:]}. Below it the 95 % interval of the paired difference to 'full': "
        f"in {', in '.join(ways)}."
    )


def _head(measure: Measure) -> str:
    return f"{measure.name}, {measure.unit}"


def _score(measure: Measure, score: Score | None, *, is_full: bool) -> Cell:
    if score is None:
        return EMPTY
    digits = 1 if measure.unit == "%" else 3
    found = score.difference
    ends = None
    if found is not None and not is_full:
        ends = interval((found.low, found.high), 1 if measure.difference_unit == POINTS else 3, signed=True)
    shown = f"{score.value:.{digits}f}"
    if found is None or found.low is None or found.high is None or is_full:
        return Cell(text=shown, value=score.value, keys=score.keys)
    return Cell(text=shown, value=score.value, interval=ends, ends=(found.low, found.high), keys=score.keys)


def markdown(rows: Sequence[Row]) -> str:
    """The main table; what was not measured is a dash."""
    return as_markdown(main_grid(rows))


def latex(rows: Sequence[Row]) -> str:
    """The main table as a ``tabular`` with booktabs rules."""
    return as_latex(main_grid(rows))
