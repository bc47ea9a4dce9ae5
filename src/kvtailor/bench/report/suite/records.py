"""Which records the tables of a suite are filled from: those that may stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.report.suite.numbers import point_of
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.suite import Suite
from kvtailor.errors import KvtailorError

__all__ = ["alike", "behind", "by_task"]


def alike(suite: Suite, records: Sequence[Record], model: str | None) -> list[Record]:
    """The records of a suite's tasks on one model as it was last measured, oldest first.

    Raises:
        KvtailorError: there is none.
    """
    ordered = sorted((record for record in records if record.asked is not None), key=lambda record: record.started)
    name = model or (ordered[-1].model if ordered else "")
    cells = [cell for table in suite.tables_for(name) for row in table.rows for cell in row.cells]
    asked = {str(each) for cell in cells for each in cell.tasks}
    ordered = [record for record in ordered if record.model == name and record.asked in asked]
    if not ordered:
        raise KvtailorError(
            f"asked for the tables of suite {suite.name!r}{f' for {name}' if name else ''}, but none of "
            f"{len(records)} records is of its tasks: run `kvtailor bench --suite {suite.name}` first"
        )

    def subject(record: Record) -> tuple[str | None, str | None, str | None]:
        return record.model_hash, record.dtypes, record.device

    return [record for record in ordered if subject(record) == subject(ordered[-1])]


def behind(suite: Suite, records: Sequence[Record], model: str | None) -> list[Record]:
    """The records that the cells of a suite's tables are filled from, and those of its plans that have an error."""
    found = alike(suite, records, model)
    cells = [cell for table in suite.tables_for(found[-1].model) for row in table.rows for cell in row.cells]
    plans = {(plan, str(asked)) for c in cells for plan in (c.plan, c.against) if plan for asked in c.tasks}
    wanted = {(suite.contestant(plan).hash, asked) for plan, asked in plans}
    return [r for some in by_task(found).values() for r in some if (r.plan_hash, str(r.asked)) in wanted]


def by_task(ordered: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each task that may stand beside each other."""
    found: dict[str, list[Record]] = {}
    for record in ordered:
        found.setdefault(str(record.asked), []).append(record)
    return {asked: _comparable(each) for asked, each in found.items()}


def _comparable(ordered: Sequence[Record]) -> list[Record]:
    good = [record for record in ordered if record.error is None]
    kind = KINDS.get(ordered[0].task)
    latest = {point_of(record): record for record in good}
    chosen: dict[tuple[str, str], Record] = {}
    for record in good:
        last = latest[point_of(record)]
        same = record.run == good[-1].run if kind is not None and kind.timings else record.text_hash == last.text_hash
        if same and record.task_version == last.task_version:
            chosen[record.plan_hash, point_of(record)] = record
    plans = {plan for plan, _ in chosen}
    return [
        *chosen.values(),
        *(record for record in ordered if record.error is not None and record.plan_hash not in plans),
    ]
