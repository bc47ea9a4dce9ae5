"""The tables of a suite, from records alone, as grids for every kind of page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtailor.bench.kinds import GENERATED, KINDS, TEXTS
from kvtailor.bench.report.machines import hardware_text, machines_of, versions_text
from kvtailor.bench.report.suite.numbers import measured, point_of
from kvtailor.bench.report.suite.records import alike, behind, by_task, whole
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid, word
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.cells import SuiteCell, SuiteTable, TableRow, TaskSettings
from kvtailor.bench.suite.suite import Suite
from kvtailor.errors import KvtailorError

__all__ = ["SuitePages", "provenance", "suite_grids", "suite_pages"]


@dataclass(frozen=True, kw_only=True)
class SuitePages:
    """What pages show of a suite.

    Attributes:
        name: of the suite.
        title: of the suite.
        line: which model, when, where and with what it was measured.
        grids: its tables of which something was run.
        idle: titles of those of which nothing was.
    """

    name: str
    title: str
    line: str
    grids: tuple[Grid, ...]
    idle: tuple[str, ...]


def suite_pages(suite: Suite, records: Sequence[Record], *, only: Sequence[str] = ()) -> SuitePages | None:
    """The tables of a suite that records fill; None where no record is of it.

    Args:
        suite: from `read_suite`.
        records: of any runs.
        only: names of the tables wanted; none: all.
    """
    try:
        grids = suite_grids(suite, records)
    except KvtailorError:
        return None
    wanted = [grid for grid in grids if not only or grid.name.removeprefix(f"{suite.name}-") in only]
    run = [grid for grid in wanted if any(cell.keys for row in grid.rows for cell in row)]
    return SuitePages(
        name=suite.name,
        title=suite.title,
        line=provenance(suite, records),
        grids=tuple(run),
        idle=tuple(grid.title for grid in wanted if grid not in run),
    )


def suite_grids(suite: Suite, records: Sequence[Record], *, model: str | None = None) -> list[Grid]:
    """All tables of a suite with the numbers that are there, in the suite's order, each named SUITE-TABLE.

    A table compares what was measured alike: the latest weights, dtype and device of the model; of each task the latest
    version and text; times of one run only. What does not fit is shown as not measured, and so is a plan that failed in
    a part of a task, whose error stands in the note. Where this kvtailor lacks methods, settings or tasks of a row, the
    last column has their names.

    Args:
        suite: from `read_suite`.
        records: of its runs; others are passed over.
        model: name in the records; None: that of the latest record.

    Raises:
        KvtailorError: no record is of this suite's tasks and this model.
    """
    found = alike(suite, records, model)
    filler = _Filler(suite, by_task(found))
    return [filler.grid(table) for table in suite.tables_for(found[-1].model)]


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
        # Of each task, the points at which any plan was measured.
        self._points = {asked: len({point_of(r) for r in each if r.error is None}) for asked, each in records.items()}

    def grid(self, table: SuiteTable) -> Grid:
        missing = [self._missing(row) for row in table.rows]
        gaps = any(missing)
        rows = [
            (word(" · ".join(row.labels)), *map(self._cell, row.cells), *([word(lacking or None)] if gaps else []))
            for row, lacking in zip(table.rows, missing, strict=True)
        ]
        hashes = [dict.fromkeys(self._suite.contestant(cell.plan).hash for cell in row.cells) for row in table.rows]
        return Grid(
            name=f"{self._suite.name}-{table.name}",
            title=table.title,
            note=" ".join(filter(None, [table.note, *self._notes(table)])),
            heads=(" · ".join(table.labels), *table.columns, *(["not in this kvtailor yet"] if gaps else [])),
            rows=tuple(rows),
            plans=tuple(" ".join(each) for each in hashes),
        )

    def _missing(self, row: TableRow) -> str:
        """What of a row this kvtailor does not have."""
        plans = [plan for cell in row.cells for plan in (cell.plan, cell.against) if plan]
        names = [name for plan in plans for name in self._suite.contestant(plan).missing]
        names += [f"the task {a.kind}" for cell in row.cells for a in cell.tasks if a.kind not in KINDS]
        return ", ".join(dict.fromkeys(names))

    def _cell(self, cell: SuiteCell) -> Cell:
        ours = [self._whole(cell.plan, asked) for asked in cell.tasks]
        theirs = [self._whole(cell.against, asked) for asked in cell.tasks] if cell.against is not None else None
        found = measured(cell, ours, theirs) if all(ours) and (theirs is None or all(theirs)) else None
        if found is None:
            return EMPTY
        shown = found.map(lambda each: cell.scale * each)
        signed = cell.shows == "change" or (cell.measure.startswith("paired.") and cell.shows == "value")
        return Cell(
            text=f"{shown.value:{'+' if signed else ''}.{cell.digits}f}",
            value=shown.value,
            interval=shown.interval(cell.digits, signed=signed),
            ends=shown.ends,
            keys=tuple(record.key for records in [*ours, *(theirs or [])] for record in records),
        )

    def _whole(self, plan: str, asked: TaskSettings) -> list[Record]:
        return whole(self._records.get(str(asked), ()), self._suite.contestant(plan).hash)

    def _notes(self, table: SuiteTable) -> Iterable[str]:
        """Rows that are one plan, the records' notes, and why numbers are not there."""
        names: dict[object, list[str]] = {}
        for row in table.rows:
            same = tuple(
                (self._suite.contestant(c.plan).hash, c.tasks, c.measure, c.against, c.shows) for c in row.cells
            )
            names.setdefault(same, []).append(" ".join(row.labels))
        yield from (f"{' and '.join(alike)} are the same plan." for alike in names.values() if len(alike) > 1)
        said: dict[str, dict[str, None]] = {}
        gaps = 0
        for cell in (cell for row in table.rows for cell in row.cells):
            contestant = self._suite.contestant(cell.plan)
            for asked in cell.tasks if not contestant.missing and cell.tasks[0].kind in KINDS else ():
                found = [r for r in self._records.get(str(asked), ()) if r.plan_hash == contestant.hash]
                gaps += not found
                points = self._points.get(str(asked), 0)
                if found and len(found) < points and all(r.error is None for r in found):
                    # A run has not come to all of them yet, so that the number is of few.
                    said.setdefault(f"{asked.kind}: {len(found)} of {points} points are measured.", {})[
                        f"`{cell.plan}`"
                    ] = None
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
