"""From the tables of a suite, as written, to cells: which plan, on which tasks, which number."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.bench.kinds import KINDS, measure_faults, setting_faults
from kvtailor.errors import suggest
from kvtailor.plan.grammar import write_settings, write_value
from kvtailor.presets import FULL

__all__ = ["TaskSettings", "SuiteCell", "SuiteTable", "TableRow", "check_keys", "tables_of"]

_PLACE = re.compile(r"\{(\w+)\}")
_CELL = ("plan", "task", "value", "against", "shows", "scale", "digits")
_TABLE = ("name", "title", "note", "labels", "columns", "rows", "for", "for_rows")
_SHOWS = ("value", "ratio", "change")


@dataclass(frozen=True)
class TaskSettings:
    """One task with its settings.

    Attributes:
        kind: which task.
        settings: by name, sorted; lists as tuples.
    """

    kind: str
    settings: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        """In one line, as it stands in its records."""
        return f"{self.kind}({write_settings(dict(self.settings))})"


@dataclass(frozen=True, kw_only=True)
class SuiteCell:
    """One number of a table.

    Attributes:
        plan: in one line.
        written: the plan as the suite has it, the same for every model: with `share=` where `plan` has the `keep=`
            that was found for the model at hand.
        tasks: the tasks whose records hold it; of several, the mean.
        measure: `metrics.NAME`, `timings.NAME` (median), `mean.NAME`, `geometric.NAME` (for ratios) and `paired.NAME`
            (of the samples, with an interval), a field of a record, or `kept`, `reduction`, `compression` of its bytes.
        against: the plan that `paired` and `shows` compare with.
        shows: 'value'; 'ratio' to `against`; 'change' from it in per cent. Of `paired` they are those of each sample,
            their geometric mean with an interval.
        scale: what a value is multiplied with; ratios and changes have none.
        digits: behind the point.
    """

    plan: str
    written: str
    tasks: tuple[TaskSettings, ...]
    measure: str
    against: str | None = None
    shows: str = "value"
    scale: float = 1.0
    digits: int = 2


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Labels and cells, in the order of the table's headings."""

    labels: tuple[str, ...]
    cells: tuple[SuiteCell, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteTable:
    """One table.

    Attributes:
        name: within its suite.
        title: what stands above it.
        note: what a reader must know to judge it; may be empty.
        labels: headings of the rows' labels.
        columns: headings of the cells.
        rows: at least one.
    """

    name: str
    title: str
    note: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]


def tables_of(
    raw: Sequence[Any], tasks: Mapping[str, Any], scope: Mapping[str, Any], awaits: Sequence[str], faults: list[str]
) -> list[SuiteTable]:
    """The tables with their places filled.

    Args:
        raw: the tables as written.
        tasks: the tasks as written, by name.
        scope: the settings of one model.
        awaits: names of tasks that may be unknown.
        faults: what is wrong is added here, a sentence each; the tables are of no use then.
    """
    reader = _Reader(tasks, awaits, faults)
    return [table for each in raw for table in reader.tables(each, scope)]


def check_keys(found: Mapping[str, Any], known: Sequence[str], where: str, faults: list[str]) -> None:
    """Adds a sentence for each key that is not known."""
    faults += [f"{where} has the unknown key {key!r}{suggest(key, known)}" for key in found if key not in known]


@dataclass(frozen=True)
class _Reader:
    tasks: Mapping[str, Any]
    awaits: Sequence[str]
    faults: list[str]

    def tables(self, raw: Any, scope: Mapping[str, Any]) -> Iterator[SuiteTable]:
        if not isinstance(raw, dict):
            self.faults.append(f"tables holds {raw!r}: write [[tables]] and below it name = value")
            return
        where = f"table {raw.get('name', '?')!r}"
        check_keys(raw, _TABLE, where, self.faults)
        lacking = [key for key in ("name", "title", "labels", "columns", "rows") if not raw.get(key)]
        if lacking:
            self.faults.append(f"{where} has no {', '.join(lacking)}: write them")
            return
        for key in ("columns", "rows"):
            if not isinstance(raw[key], list) or not all(isinstance(each, dict) for each in raw[key]):
                self.faults.append(f"{where}: {key} is {raw[key]!r}: write [{{ name = value, ... }}, ...]")
                return
        for variables in self._each(raw.get("for", {}), scope, where):
            inside = {**scope, **variables}
            texts = {key: self._prose(raw.get(key, ""), inside, where) for key in ("name", "title", "note")}
            rows = [
                row
                for each in raw["rows"]
                for further in self._each(raw.get("for_rows", {}), inside, where)
                for row in self._rows(raw, each, {**inside, **further}, where)
            ]
            yield SuiteTable(
                **texts,
                labels=tuple(map(str, raw["labels"])),
                columns=tuple(self._prose(each.get("label", "?"), inside, where) for each in raw["columns"]),
                rows=tuple(rows),
            )

    def _rows(
        self, table: Mapping[str, Any], raw: Mapping[str, Any], scope: Mapping[str, Any], where: str
    ) -> Iterator[TableRow]:
        own = {key: value for key, value in raw.items() if key == "plan" or key not in (*_CELL, "for")}
        for variables in self._each(raw.get("for", {}), scope, where):
            inside = {**scope, **variables}
            inside |= {key: self._fill(value, inside, where) for key, value in own.items()}
            lacking = [label for label in table["labels"] if label not in inside]
            if lacking:
                self.faults.append(f"{where}: the row {dict(raw)} has no {', '.join(lacking)}: the labels ask for it")
                continue
            labels = tuple(str(inside[label]) for label in table["labels"])
            at = f"{where}, row {' · '.join(labels)!r}"
            here = {key: value for key, value in raw.items() if key in _CELL}
            cells = [self._cell({**column, **here}, inside, at) for column in table["columns"]]
            yield TableRow(labels=labels, cells=tuple(cell for cell in cells if cell is not None))

    def _cell(self, raw: Mapping[str, Any], scope: Mapping[str, Any], where: str) -> SuiteCell | None:
        where = f"{where}, column {raw.get('label', '?')!r}"
        check_keys(raw, (*_CELL, "label"), where, self.faults)
        found = {key: self._fill(raw[key], scope, where) for key in _CELL if key in raw}
        if lacking := [key for key in ("plan", "task", "value") if key not in found]:
            self.faults.append(f"{where}: neither the row nor the column says {' and '.join(lacking)}")
            return None
        shows, against = found.get("shows", "value"), found.get("against")
        if shows not in _SHOWS:
            self.faults.append(f"{where}: shows is {shows!r}{suggest(str(shows), _SHOWS)}")
        compares = shows != "value" or str(found["value"]).startswith("paired.")
        if against is not None and not compares:
            self.faults.append(f"{where}: against is given, but neither shows nor value compares: take it out")
        tasks = tuple(self._asked(str(found["task"]), scope, where))
        for kind in dict.fromkeys(task.kind for task in tasks if task.kind in KINDS):
            self.faults.extend(f"{where}: {fault}" for fault in measure_faults(kind, str(found["value"])))
        plan = " ".join(str(found["plan"]).split())
        return SuiteCell(
            plan=plan,
            written=plan,
            tasks=tasks,
            measure=str(found["value"]),
            against=" ".join(str(against or FULL).split()) if compares else None,
            shows=str(shows),
            scale={"ratio": 1.0, "change": 100.0}.get(str(shows), float(found.get("scale", 1.0))),
            digits=int(found.get("digits", 2)),
        )

    def _asked(self, name: str, scope: Mapping[str, Any], where: str) -> Iterator[TaskSettings]:
        raw = self.tasks.get(name)
        if not isinstance(raw, dict):
            self.faults.append(f"{where}: there is no task {name!r}{suggest(name, self.tasks)}")
            return
        where = f"task {name!r}"
        for variables in self._each(raw.get("for", {}), scope, where):
            found = {
                key: self._fill(value, {**scope, **variables}, where) for key, value in raw.items() if key != "for"
            }
            kind = str(found.pop("run", ""))
            if kind in KINDS:
                self.faults.extend(f"{where}: {fault}" for fault in setting_faults(kind, found))
            elif kind not in self.awaits:
                known = (*KINDS, *self.awaits)
                self.faults.append(f"{where}: there is no kind of task {kind!r}{suggest(kind, known)}")
            yield TaskSettings(kind, tuple(sorted((key, _fixed(value)) for key, value in found.items())))

    def _each(self, raw: Any, scope: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
        """Every combination of the values of some variables; one without any where there are none."""
        lists = {}
        for name, values in (raw if isinstance(raw, dict) else {"for": raw}).items():
            found = self._fill(values, scope, where)
            if not isinstance(found, list) or not found:
                self.faults.append(f"{where}: {name} runs over {found!r}: give a list with something in it")
                return
            lists[name] = found
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))

    def _prose(self, value: Any, scope: Mapping[str, Any], where: str) -> str:
        """A text for readers with every `{name}` replaced; a list reads `one, two`."""
        spoken = {
            name: ", ".join(map(_written, each)) if isinstance(each, list) else each for name, each in scope.items()
        }
        return str(self._fill(value, spoken, where))

    def _fill(self, value: Any, scope: Mapping[str, Any], where: str) -> Any:
        """A value with every `{name}` replaced; a text that is one place takes the type of what stands for it."""
        if isinstance(value, list):
            return [self._fill(each, scope, where) for each in value]
        if not isinstance(value, str):
            return value
        for name in dict.fromkeys(_PLACE.findall(value)):
            if name not in scope:
                self.faults.append(f"{where}: nothing is called {name!r} in {value!r}{suggest(name, scope)}")
                return value
        if hit := _PLACE.fullmatch(value):
            return scope[hit[1]]
        return _PLACE.sub(lambda hit: _written(scope[hit[1]]), value)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else write_value(value)


def _fixed(value: Any) -> Any:
    return tuple(map(_fixed, value)) if isinstance(value, list) else value
