"""The tables of a run: the plans, every text and task, and of each task all points that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.report.points import series_of
from kvtailor.bench.report.rows import OWN, Row
from kvtailor.bench.report.table import numbers_of
from kvtailor.bench.report.tables.columns import COSTS, MadeColumn, columns_of_task, first_columns, terminal_columns
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid, word
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score
from kvtailor.bench.schema import Record
from kvtailor.ops.sizes import byte_text

__all__ = ["brief_grid", "main_grid", "quality_grid", "task_grids"]


def main_grid(rows: Sequence[Row]) -> Grid:
    """Return one row for each plan, with what was measured."""
    return _of_plans(rows, first_columns)


def brief_grid(rows: Sequence[Row]) -> Grid:
    """Return the same for a terminal."""
    return _of_plans(rows, terminal_columns)


def _of_plans(rows: Sequence[Row], columns_of: Callable[[Sequence[Row]], Sequence[MadeColumn]]) -> Grid:
    plans = [row for row in rows if row.plan_hash != OWN]
    columns = columns_of(plans)
    return Grid(
        name="plans",
        title="Plans",
        heads=("plan", *(column.head for column in columns)),
        rows=tuple((word(row.label), *(_of_plan(column, row) for column in columns)) for row in plans),
        plans=tuple(row.plan_hash for row in plans),
    ).without_empty_columns()


def _of_plan(column: MadeColumn, row: Row) -> Cell:
    cell = column.cell(row.numbers)
    return replace(cell, text="0", value=0.0) if column.is_difference and row.is_full and cell.text else cell


def quality_grid(measures: Sequence[Measure], rows: Sequence[Row]) -> Grid:
    """Every text, kind of document and task (across) for every plan (down)."""
    plans = [row for row in rows if row.plan_hash != OWN]
    body = []
    for row in plans:
        cells = [word(row.label)]
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
    shown = Cell(text=f"{score.value:.{digits}f}", value=score.value, keys=score.keys)
    if found is None or is_full:
        return shown
    ends = found.interval(1 if measure.difference_unit == POINTS else 3, signed=True)
    return replace(shown, interval=ends, ends=found.ends)


def task_grids(records: Sequence[Record], rows: Sequence[Row]) -> Iterator[Grid]:
    """Return the tables of tasks in which anything was measured: a row for each plan at each point.

    Args:
        records: of one model, those without an error.
        rows: from `rows_of`, for the order of the plans.
    """
    order = [row.plan_hash for row in rows]
    for task in dict.fromkeys([*COSTS, *KINDS, *(record.task for record in records)]):
        found = columns_of_task(task)
        grid = None if found is None else _of_task(records, order, task, *found)
        if grid is not None:
            yield grid


def _of_task(
    records: Sequence[Record], order: Sequence[str], task: str, title: str, note: str, columns: Sequence[MadeColumn]
) -> Grid | None:
    series = series_of(records, task)
    if not series:
        return None
    points = list(dict.fromkeys(name for each in series for name in each.point))
    fixed = [name for name in points if len({str(each.point.get(name)) for each in series}) == 1]
    points = [name for name in points if name not in fixed]
    same = tuple((name.replace("_", " "), _point(name, series[0].point.get(name))) for name in fixed)
    throughout = ", ".join(f"{name} {cell.text}" for name, cell in same if cell.text is not None)
    texts = ["text"] if len({each.text for each in series}) > 1 else []
    body, plans = [], []
    for each in series:
        place = [word(each.text) for _ in texts] + [_point(name, each.point.get(name)) for name in points]
        for plan in (plan for plan in order if plan in each.records):
            numbers = {number.name: number for number in numbers_of(each.records[plan])}
            cells = (column.cell(numbers) for column in columns)
            body.append((word(each.records[plan].label), *place, *cells))
            plans.append(plan)
    return Grid(
        name=task,
        title=title,
        note=f"{note} All at {throughout}.".lstrip() if throughout else note,
        heads=("plan", *texts, *(name.replace("_", " ") for name in points), *(each.head for each in columns)),
        rows=tuple(body),
        plans=tuple(plans),
        same=same,
    ).without_empty_columns()


def _point(name: str, value: object) -> Cell:
    if value is None:
        return EMPTY
    if name.endswith("_bytes") and isinstance(value, int):
        return Cell(text=byte_text(value), value=value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Cell(text=str(value), value=str(value))
    return Cell(text=f"{value:,}" if isinstance(value, int) else f"{value:g}", value=value)
