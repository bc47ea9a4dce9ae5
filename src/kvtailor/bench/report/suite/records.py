"""Which records the tables of a suite are filled from: those that may stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.report.suite.numbers import point_of
from kvtailor.bench.schema import Record, latest
from kvtailor.bench.suite.suite import Suite
from kvtailor.errors import KvtailorError

__all__ = ["SuiteRun", "alike", "behind", "by_model", "by_task", "whole"]


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A suite as it was run.

    Attributes:
        suite: of the file beside the records, with the budgets that were found for its models.
        records: of the folder that the file is in.
        folder: its name.
    """

    suite: Suite
    records: Sequence[Record]
    folder: str = ""


def by_model(runs: Sequence[SuiteRun]) -> dict[str, SuiteRun]:
    """The runs of one suite by the name of the model, in the order in which they are given and were measured.

    A model that several folders have is one run of all its records, where the suite is the same for it in each.

    Args:
        runs: of suites of one name, those of other folders as they stand there.

    Raises:
        KvtailorError: two folders ask other plans or tasks of a model, or rank it by other rules.
    """
    found: dict[str, SuiteRun] = {}
    for run in runs:
        for model in _models(run.suite, run.records):
            first = found.setdefault(model, run)
            if first is run:
                continue
            if (first.suite.tables_for(model), first.suite.leaderboard) != (
                run.suite.tables_for(model),
                run.suite.leaderboard,
            ):
                raise KvtailorError(
                    f"asked for the suite {run.suite.name!r} on {model} from {first.folder} and {run.folder}, where it "
                    "has other plans, tasks or rules: give one of these folders"
                )
            found[model] = replace(first, records=latest([*first.records, *run.records]))
    return found


def alike(suite: Suite, records: Sequence[Record], model: str | None) -> list[Record]:
    """The records of a suite's tasks on one model as it was last measured, oldest first.

    Raises:
        KvtailorError: there is none.
    """
    ordered = sorted((record for record in records if record.asked is not None), key=lambda record: record.started)
    name = model or (ordered[-1].model if ordered else "")
    ordered = _asked(suite, ordered, name)
    if not ordered:
        raise KvtailorError(
            f"asked for the tables of suite {suite.name!r}{f' for {name}' if name else ''}, but none of "
            f"{len(records)} records is of its tasks: run `kvtailor bench --suite {suite.name}` first"
        )
    return [record for record in ordered if record.subject == ordered[-1].subject]


def _models(suite: Suite, records: Sequence[Record]) -> list[str]:
    """The models that have records of a suite's tasks, in the order in which they were first measured."""
    ordered = sorted((record for record in records if record.asked is not None), key=lambda record: record.started)
    return [model for model in dict.fromkeys(record.model for record in ordered) if _asked(suite, ordered, model)]


def _asked(suite: Suite, records: Sequence[Record], model: str) -> list[Record]:
    """The records of a model that are of the suite's tasks, as it asks for them there."""
    cells = [cell for table in suite.tables_for(model) for row in table.rows for cell in row.cells]
    asked = {str(each) for cell in cells for each in cell.tasks}
    return [record for record in records if record.model == model and record.asked in asked]


def behind(suite: Suite, records: Sequence[Record], model: str | None) -> list[Record]:
    """The records that the cells of a suite's tables are filled from, and those of its plans that have an error."""
    found = alike(suite, records, model)
    cells = [cell for table in suite.tables_for(found[-1].model) for row in table.rows for cell in row.cells]
    plans = {(plan, str(asked)) for c in cells for plan in (c.plan, c.against) if plan for asked in c.tasks}
    wanted = {(suite.contestant(plan).hash, asked) for plan, asked in plans}
    return [r for some in by_task(found).values() for r in some if (r.plan_hash, str(r.asked)) in wanted]


def by_task(ordered: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each task that may stand beside each other, and the errors of plans that lack some of them."""
    found: dict[str, list[Record]] = {}
    for record in ordered:
        found.setdefault(str(record.asked), []).append(record)
    return {asked: _comparable(each) for asked, each in found.items()}


def whole(of_task: Sequence[Record], plan_hash: str) -> list[Record]:
    """The records of a plan in a task; none where it failed in any part, since its number would be of fewer samples.

    Args:
        of_task: from `by_task`.
        plan_hash: of the plan.
    """
    found = [record for record in of_task if record.plan_hash == plan_hash]
    return [] if any(record.error is not None for record in found) else found


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

    def lacks(record: Record) -> bool:
        """Whether an error is why the plan has no number, or none at this point."""
        if record.error is None or (record.plan_hash, point_of(record)) in chosen:
            return False
        if record.plan_hash not in plans:
            return True
        if record.text_hash is None:
            # What ended the whole task: a later run went on behind it.
            return record.started >= good[-1].started
        last = latest.get(point_of(record))
        return last is None or record.text_hash == last.text_hash

    return [*chosen.values(), *(record for record in ordered if lacks(record))]
