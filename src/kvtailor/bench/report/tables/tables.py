"""The tables of a run: the plans, every text and task, and of each task all points that were measured.

A column is made from the numbers of one line of a table, by task and metric. Which there are, the tasks' classes say
(`Task.shown`); of a task that says nothing each metric is a column, by its own words. What a cache holds is of no task
and stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.report.points import series_of
from kvtailor.bench.report.table import OWN, Number, Row, numbers_of
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid, word
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score
from kvtailor.bench.report.words import flop_text, milliseconds, significant
from kvtailor.bench.schema import Record
from kvtailor.bench.tasks.settings import Column, Metric, Shown
from kvtailor.errors import UnknownName
from kvtailor.ops.sizes import byte_text

__all__ = ["FORMS", "brief_grid", "main_grid", "quality_grid", "task_grids"]

Numbers = Mapping[str, Number]

_COSTS = ("speed", "speculation", "memory", "capacity")
"""Tasks whose own tables stand before the others, and whose columns behind them."""
_CACHE = Shown(
    first=(
        Column("tokens held", "tokens_held", 0),
        Column("bytes held", "bytes_held", form="bytes"),
        Column("bytes, %", "ratio", 1, 100),
    ),
    terminal=(
        Column("held/seen", "tokens_held", 0, form="of seen", beside="tokens_seen"),
        Column("bytes", "bytes_held", form="bytes and share", beside="ratio"),
    ),
)
"""What the cache of a plan holds. Times in seconds, with their floors, are in the table of cost."""


def main_grid(rows: Sequence[Row]) -> Grid:
    """Return one row for each plan, with what was measured."""
    return _of_plans(rows, lambda shown: shown.first)


def brief_grid(rows: Sequence[Row]) -> Grid:
    """Return the same for a terminal, where there is less space."""
    return _of_plans(rows, lambda shown: shown.terminal)


def _of_plans(rows: Sequence[Row], of: Callable[[Shown], Sequence[Column]]) -> Grid:
    plans = [row for row in rows if row.plan_hash != OWN]
    ranked = [*(name for name in KINDS if name not in _COSTS), *(name for name in _COSTS if name in KINDS)]
    declared = [("cache", _CACHE), *((name, shown) for name in ranked if (shown := KINDS[name].shown) is not None)]
    columns = [*((task, column) for task, shown in declared for column in of(shown)), *_by_own_words(plans)]
    return Grid(
        name="plans",
        title="Plans",
        heads=("plan", *(column.head for _, column in columns)),
        rows=tuple((word(row.label), *(_of_plan(task, column, row) for task, column in columns)) for row in plans),
        plans=tuple(row.plan_hash for row in plans),
    ).without_empty_columns()


def _of_plan(task: str, column: Column, row: Row) -> Cell:
    cell = _cell(task, column, row.numbers)
    return replace(cell, text="0", value=0.0) if column.is_difference and row.is_full and cell.text else cell


def _by_own_words(rows: Sequence[Row]) -> Iterator[tuple[str, Column]]:
    """The metrics that some plans have of tasks that declare no columns, as they come."""
    for task in dict.fromkeys(number.task for row in rows for number in row.numbers.values()):
        if task in KINDS and KINDS[task].shown is None:
            for metric in KINDS[task].metrics or ():
                if any(f"{task}.{metric.name}" in row.numbers for row in rows):
                    yield task, Column(_heading(metric, task), metric.name, form="four figures")


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
    for task in dict.fromkeys([*_COSTS, *KINDS]):
        shown = _shown(task) if task in KINDS else None
        if shown is not None and shown.own and (grid := _of_task(records, order, task, shown)) is not None:
            yield grid


def _shown(task: str) -> Shown:
    """What a task declares to show; of one that declares nothing, each metric by its own words."""
    shown, metrics = KINDS[task].shown, KINDS[task].metrics or ()
    if shown is not None:
        return shown
    note = "; ".join(f"{metric.name}: {metric.meaning}" for metric in metrics if metric.meaning)
    own = [Column(_heading(metric), metric.name) for metric in metrics]
    return Shown(title=task.capitalize(), note=f"{note}." if note else "", own=own)


def _of_task(records: Sequence[Record], order: Sequence[str], task: str, shown: Shown) -> Grid | None:
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
            cells = (_cell(task, column, numbers) for column in shown.own)
            body.append((word(each.records[plan].label), *place, *cells))
            plans.append(plan)
    return Grid(
        name=task,
        title=shown.title,
        note=f"{shown.note} All at {throughout}.".lstrip() if throughout else shown.note,
        heads=("plan", *texts, *(name.replace("_", " ") for name in points), *(each.head for each in shown.own)),
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


def _heading(metric: Metric, task: str = "") -> str:
    """A metric's name and unit in words, behind the name of its task where that is given."""
    words = f"{task} {metric.name}".strip().replace("_", " ")
    return f"{words}, {metric.unit}" if metric.unit else words


def _cell(task: str, column: Column, numbers: Numbers) -> Cell:
    """Make the cell of a column from the numbers of a line.

    Raises:
        UnknownName: the column has a form that nothing here writes.
    """
    if column.form not in FORMS:
        raise UnknownName("form of a column", column.form, FORMS)
    return FORMS[column.form](column, f"{task}.{column.number}", numbers)


def _text(column: Column, value: float) -> str:
    """A number as the column's form and digits have it."""
    if column.form == "bytes":
        return byte_text(value)
    if column.form == "flop":
        return flop_text(value)
    if column.form == "operations":
        return flop_text(value).removesuffix("FLOP")
    if column.form in ("about", "run or not"):
        return f"{value:,.0f}"
    if column.digits is None:
        return significant(value, 4 if column.form == "four figures" else 3) + column.unit
    return f"{value:{'+' if column.sign else ''}.{column.digits}f}{column.unit}"


def _plain(column: Column, name: str, numbers: Numbers) -> Cell:
    """A number, with its interval where the column has one."""
    found = numbers.get(name)
    if found is None:
        return EMPTY
    value = found.value if column.scale == 1.0 else column.scale * found.value
    cell = Cell(text=_text(column, value), value=value, keys=found.keys)
    if not column.interval or found.low is None or found.high is None:
        return cell
    ends = (column.scale * found.low, column.scale * found.high)
    shown = " to ".join(_text(column, end) for end in ends)
    return replace(cell, interval=shown, ends=ends if column.ends else None)


def _time(name: str, numbers: Numbers) -> Cell:
    """A median in milliseconds."""
    return _plain(Column("", "", scale=1000), name, numbers)


def _time_with_quartiles(column: Column, name: str, numbers: Numbers) -> Cell:
    cell = _time(f"{name}_median", numbers)
    q1, q3 = (numbers.get(f"{name}_{each}") for each in ("q1", "q3"))
    if cell.text is None or q1 is None or q3 is None:
        return cell
    spread = f"{milliseconds(q1.value)} to {milliseconds(q3.value)}"
    return replace(cell, interval=spread, ends=(1000 * q1.value, 1000 * q3.value))


def _floor(column: Column, name: str, numbers: Numbers) -> Cell:
    cell, found, taken = _time(name, numbers), numbers.get(name), numbers.get(_beside(column, name))
    if found is None or taken is None or not taken.value:
        return cell
    return replace(cell, interval=f"{100 * found.value / taken.value:.0f} % of the time")


def _time_and_floor(column: Column, name: str, numbers: Numbers) -> Cell:
    cell, floor = _time(name, numbers), numbers.get(_beside(column, name))
    if cell.text is None or floor is None:
        return cell
    return replace(cell, interval=f"floor {milliseconds(floor.value)}")


def _size(column: Column, name: str, numbers: Numbers) -> Cell:
    """A size, and whether it was run or follows from the sizes that were."""
    cell, verified = _plain(column, name, numbers), numbers.get(f"{name}_verified")
    if cell.text is None or verified is None or verified.value != 0:
        return cell
    return replace(cell, text=f"~{cell.text}") if column.form == "about" else replace(cell, interval="not run")


def _percent_of(column: Column, name: str, numbers: Numbers) -> Cell:
    found, whole = numbers.get(name), numbers.get(_beside(column, name))
    if found is None or whole is None or not found.value or not whole.value:
        return EMPTY
    share = 100 * found.value / whole.value
    return Cell(text=_text(column, share), value=share, keys=found.keys)


def _hits(column: Column, name: str, numbers: Numbers) -> Cell:
    found = numbers.get(name)
    if found is None or found.n is None or found.low is None or found.high is None:
        return EMPTY
    hits = f"{found.value * found.n:.0f}/{found.n}"
    return Cell(text=hits, value=found.value, interval=f"{100 * found.low:.0f} to {100 * found.high:.0f} %")


def _held_of_seen(column: Column, name: str, numbers: Numbers) -> Cell:
    cell, seen = _plain(column, name, numbers), numbers.get(_beside(column, name))
    return cell if cell.text is None or seen is None else replace(cell, text=f"{cell.text}/{seen.value:.0f}")


def _bytes_and_share(column: Column, name: str, numbers: Numbers) -> Cell:
    cell, ratio = _plain(replace(column, form="bytes"), name, numbers), numbers.get(_beside(column, name))
    return EMPTY if ratio is None else replace(cell, text=f"{cell.text}  {100 * ratio.value:>3.0f} %")


def _beside(column: Column, name: str) -> str:
    return f"{name.partition('.')[0]}.{column.beside}"


FORMS: dict[str, Callable[[Column, str, Numbers], Cell]] = {
    **dict.fromkeys(("number", "four figures", "bytes", "flop", "operations"), _plain),
    "time": _time_with_quartiles,
    "floor": _floor,
    "time and floor": _time_and_floor,
    **dict.fromkeys(("about", "run or not"), _size),
    "percent of": _percent_of,
    "hits": _hits,
    "of seen": _held_of_seen,
    "bytes and share": _bytes_and_share,
}
"""How a number may be written: what makes a cell of a column, the number's name by task, and the numbers of a line.

`number` has the column's digits, `operations` are FLOP without the word. `time` is in milliseconds with quartiles,
`floor` with its share of the time beside it, `time and floor` with the floor beside it. `about` and `run or not` are
sizes that may not have been run, `hits` right answers of all, `of seen` tokens, `percent of` a share of what is beside.
"""
