"""How the columns that tasks declare are written: those of the first table, of a terminal's, and of each task's table.

A column is made from the numbers of one line of a table, by task and metric. Which there are, the tasks' classes say
(`Task.shown`); of a task that says nothing each metric is a column, by its own words. What a cache holds is of no task
and stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.report.rows import Row
from kvtailor.bench.report.table import Number
from kvtailor.bench.report.tables.grid import EMPTY, Cell
from kvtailor.bench.report.words import flop_text, milliseconds, significant
from kvtailor.bench.tasks.settings import Column, Metric, Shown
from kvtailor.errors import UnknownName
from kvtailor.ops.sizes import byte_text

__all__ = ["COSTS", "FORMS", "MadeColumn", "columns_of_task", "first_columns", "terminal_columns"]

Numbers = Mapping[str, Number]
Make = Callable[[Numbers], Cell]

COSTS = ("speed", "speculation", "memory", "capacity")
"""Tasks whose own tables stand before the others, and whose columns behind them."""


class MadeColumn(NamedTuple):
    """A column with what makes its cells.

    Attributes:
        head: its heading.
        cell: makes a cell from the numbers of a line.
        is_difference: it is a difference to 'full', which is 0 for 'full' itself.
    """

    head: str
    cell: Make
    is_difference: bool = False


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


def first_columns(rows: Sequence[Row]) -> list[MadeColumn]:
    """Return the columns of the first table of a page."""
    return [*_of_plans(lambda shown: shown.first), *_by_own_words(rows)]


def terminal_columns(rows: Sequence[Row]) -> list[MadeColumn]:
    """Return the same for a terminal, where there is less space."""
    return [*_of_plans(lambda shown: shown.terminal), *_by_own_words(rows)]


def _of_plans(of: Callable[[Shown], Sequence[Column]]) -> Iterator[MadeColumn]:
    ranked = [*(name for name in KINDS if name not in COSTS), *(name for name in COSTS if name in KINDS)]
    for name, shown in [("cache", _CACHE), *((name, KINDS[name].shown) for name in ranked)]:
        yield from (_made(name, column) for column in (() if shown is None else of(shown)))


def _made(task: str, column: Column) -> MadeColumn:
    if column.form not in FORMS:
        raise UnknownName("form of a column", column.form, FORMS)
    make, name = FORMS[column.form], f"{task}.{column.number}"
    return MadeColumn(column.head, lambda numbers: make(column, name, numbers), column.is_difference)


def columns_of_task(task: str) -> tuple[str, str, list[MadeColumn]] | None:
    """Return title, note and columns of a task's own table; None where it has none."""
    if task not in KINDS:
        return None
    shown = KINDS[task].shown
    if shown is None:
        metrics = KINDS[task].metrics or ()
        note = "; ".join(f"{metric.name}: {metric.meaning}" for metric in metrics if metric.meaning)
        own = [Column(_heading(metric), metric.name) for metric in metrics]
        shown = Shown(title=task.capitalize(), note=f"{note}." if note else "", own=own)
    return (shown.title, shown.note, [_made(task, column) for column in shown.own]) if shown.own else None


def _by_own_words(rows: Sequence[Row]) -> Iterator[MadeColumn]:
    """The metrics that some plans have of tasks that declare no columns, as they come."""
    for task in dict.fromkeys(number.task for row in rows for number in row.numbers.values()):
        if task in KINDS and KINDS[task].shown is None:
            for metric in KINDS[task].metrics or ():
                if any(f"{task}.{metric.name}" in row.numbers for row in rows):
                    yield _made(task, Column(_heading(metric, task), metric.name, form="four figures"))


def _heading(metric: Metric, task: str = "") -> str:
    """A metric's name and unit in words, behind the name of its task where that is given."""
    words = f"{task} {metric.name}".strip().replace("_", " ")
    return f"{words}, {metric.unit}" if metric.unit else words
