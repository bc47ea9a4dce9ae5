"""The tables of a suite, from records alone, in the report's own columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.kinds import GENERATED, KINDS, TEXTS
from kvtailor.bench.report.machines import hardware_text, machines_of, versions_text
from kvtailor.bench.report.suite.numbers import measured
from kvtailor.bench.report.suite.records import alike, behind, by_task
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.cells import SuiteCell, SuiteTable, TableRow, TaskSettings
from kvtailor.bench.suite.suite import Suite

__all__ = ["FilledCell", "FilledRow", "FilledTable", "provenance", "suite_tables"]

_DASH = "–"


@dataclass(frozen=True, kw_only=True)
class FilledCell:
    """One number of a table, as shown.

    Attributes:
        text: as shown; a dash where it was not measured.
        value: None where it was not measured; scaled as the table has it.
        low, high: its 95 % interval, where there is one.
        plan: the plan it belongs to.
        plan_hash: its content hash, as records have it.
        samples: behind it, over all of its records; None where they have no number of them.
        keys: of the records that it comes from.
    """

    text: str
    value: float | None
    low: float | None
    high: float | None
    plan: str
    plan_hash: str
    samples: int | None
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FilledRow:
    """Labels, cells, and what of the row this kvtailor does not have: names of methods, settings and tasks."""

    labels: tuple[str, ...]
    cells: tuple[FilledCell, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FilledTable:
    """A table with its numbers; `notes` are whole sentences that stand below it."""

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[FilledRow, ...]
    notes: tuple[str, ...]


def suite_tables(suite: Suite, records: Sequence[Record], *, model: str | None = None) -> list[FilledTable]:
    """All tables of a suite with the numbers that are there.

    A table compares what was measured alike: the latest weights, dtype and device of the model; of each task the latest
    version and text; times of one run only. What does not fit is shown as not measured.

    Args:
        suite: from `read_suite`.
        records: of its runs; others are passed over.
        model: name in the records; None: that of the latest record.

    Raises:
        KvtailorError: no record is of this suite's tasks and this model.
    """
    found = alike(suite, records, model)
    filler = _Filler(suite, by_task(found))
    return [filler.table(table) for table in suite.tables_for(found[-1].model)]


def provenance(suite: Suite, records: Sequence[Record], *, model: str | None = None) -> str:
    """One line: which model, when, where and with what the numbers of `suite_tables` were measured, all of them.

    Raises:
        KvtailorError: no record is of this suite's tasks and this model.
    """
    last = alike(suite, records, model)[-1]
    found = behind(suite, records, model)
    if not found:
        return f"Suite {suite.name}, {last.model}: no record is of a plan of these tables."
    days = sorted({record.started[:10] for record in found})
    machines = machines_of(found)
    versions = versions_text(machines)
    weights = f" (weights {last.model_hash[:12]})" if last.model_hash else ""
    runs, span = len({record.run for record in found}), " to ".join(dict.fromkeys([days[0], days[-1]]))
    return (
        f"Suite {suite.name}, {last.model}{weights}, {last.dtypes} on {last.device} ({hardware_text(machines)}), "
        f"{len(found)} records of {runs} run{'s' * (runs > 1)}, {span}"
        f"{'; ' + versions if versions else ''}."
    )


class _Filler:
    """Fills cells from the records of each task."""

    def __init__(self, suite: Suite, records: dict[str, list[Record]]):
        self._suite = suite
        self._records = records
        self._contestants: dict[str, Contestant] = {}

    def table(self, table: SuiteTable) -> FilledTable:
        rows = [self._row(row) for row in table.rows]
        return FilledTable(
            name=table.name,
            title=table.title,
            labels=table.labels,
            columns=table.columns,
            rows=tuple(rows),
            notes=tuple([table.note] if table.note else []) + tuple(self._notes(table)),
        )

    def _row(self, row: TableRow) -> FilledRow:
        missing = [
            name
            for cell in row.cells
            for name in [
                *(n for plan in (cell.plan, cell.against) if plan for n in self._contestant(plan).missing),
                *(f"the task {asked.kind}" for asked in cell.tasks if asked.kind not in KINDS),
            ]
        ]
        return FilledRow(
            labels=row.labels, cells=tuple(map(self._cell, row.cells)), missing=tuple(dict.fromkeys(missing))
        )

    def _cell(self, cell: SuiteCell) -> FilledCell:
        wanted = self._contestant(cell.plan).hash
        ours = [self._good(cell.plan, asked) for asked in cell.tasks]
        theirs = [self._good(cell.against, asked) for asked in cell.tasks] if cell.against is not None else None
        found = measured(cell, ours, theirs) if all(ours) and (theirs is None or all(theirs)) else None
        if found is None:
            return FilledCell(
                text=_DASH, value=None, low=None, high=None, plan=cell.plan, plan_hash=wanted, samples=None, keys=()
            )
        samples = [record.samples for records in ours for record in records]
        low, high = (None if end is None else cell.scale * end for end in (found.low, found.high))
        value = cell.scale * found.value
        sign = "+" if cell.shows == "change" or (cell.measure.startswith("paired.") and cell.shows == "value") else ""
        text = f"{value:{sign}.{cell.digits}f}"
        if low is not None and high is not None:
            text += f" ({low:{sign}.{cell.digits}f} to {high:{sign}.{cell.digits}f})"
        return FilledCell(
            text=text,
            value=value,
            low=low,
            high=high,
            plan=cell.plan,
            plan_hash=wanted,
            samples=sum(each for each in samples if each is not None) if None not in samples else None,
            keys=tuple(record.key for records in [*ours, *(theirs or [])] for record in records),
        )

    def _good(self, plan: str, asked: TaskSettings) -> list[Record]:
        wanted = self._contestant(plan).hash
        return [r for r in self._records.get(str(asked), ()) if r.plan_hash == wanted and r.error is None]

    def _contestant(self, plan: str) -> Contestant:
        if plan not in self._contestants:
            self._contestants[plan] = self._suite.contestant(plan)
        return self._contestants[plan]

    def _notes(self, table: SuiteTable) -> Iterable[str]:
        """Rows that are one plan, the records' notes, and why numbers are not there."""
        names: dict[object, list[str]] = {}
        for row in table.rows:
            same = tuple((self._contestant(c.plan).hash, c.tasks, c.measure, c.against, c.shows) for c in row.cells)
            names.setdefault(same, []).append(" ".join(row.labels))
        yield from (f"{' and '.join(alike)} are the same plan." for alike in names.values() if len(alike) > 1)
        said: dict[str, dict[str, None]] = {}
        gaps = 0
        for cell in (cell for row in table.rows for cell in row.cells):
            contestant = self._contestant(cell.plan)
            for asked in cell.tasks if not contestant.missing and cell.tasks[0].kind in KINDS else ():
                found = [r for r in self._records.get(str(asked), ()) if r.plan_hash == contestant.hash]
                gaps += not found
                for note, plan in (pair for record in found for pair in _said(cell, asked, record)):
                    said.setdefault(note, {})[plan] = None
        yield from (
            f"{', '.join(filter(None, plans))}{': ' if any(plans) else ''}{note}" for note, plans in said.items()
        )
        if gaps:
            yield f"{gaps} of the measurements behind these cells have no record that may stand beside the others."


def _said(cell: SuiteCell, asked: TaskSettings, record: Record) -> Iterable[tuple[str, str]]:
    """Sentences, each with the plan that it is about; none where it is about all."""
    yield from ((note, "") for note in record.notes)
    wanted = dict(asked.settings).get("text")
    if record.error is not None:
        yield f"{asked.kind}: {record.error}", f"`{cell.plan}`"
    elif KINDS[asked.kind].timings and not record.timings:
        yield f"{asked.kind}: no time, since other programs disturbed too many samples.", f"`{cell.plan}`"
    elif record.is_full and KINDS[asked.kind].timings and record.floor_seconds is not None:
        first = record.metrics.get("floor_ttft_seconds")
        least = f"{1e3 * first:.1f} ms to the first token and " if first is not None else ""
        yield (
            f"Floor of 'full' at {_where(record)}: {least}{1e3 * record.floor_seconds:.2f} ms for each further "
            "one: weights and cache read once at this machine's bandwidth, the prompt's products at its peak.",
            "",
        )
    elif wanted in TEXTS and wanted != GENERATED and record.text != wanted:
        yield f"{wanted} is {record.text} here.", ""


def _where(record: Record) -> str:
    return f"{record.point.get('context')} tokens, batch {record.point.get('batch')}"
