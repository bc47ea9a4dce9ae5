"""Runs tasks over plans, writes each record as soon as it is there, and looks for frauds at the end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import torch

from kvtailor.bench import checks
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure import machine
from kvtailor.bench.schema import NoRecords, Record, read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks import Given, Task
from kvtailor.errors import KvtailorError

__all__ = ["contestants_of", "finished", "plan_run", "run"]

FULL = "full"
_MUST_BE_EQUAL = (
    "python", "torch", "transformers", "kvtailor", "commit", "processor", "threads", "accelerator",
)  # fmt: skip


def contestants_of(plans: Sequence[str], *, may_be_missing: bool = False) -> list[Contestant]:
    """The plans as contestants, each once, 'full' first and added where it is missing: all is measured against it.

    Args:
        plans: in one line each.
        may_be_missing: see `Contestant.of`; a suite names methods that may come later.

    Raises:
        PlanError: a plan has faults.
    """
    found: dict[str, Contestant] = {}
    for text in [FULL, *plans]:
        contestant = Contestant.of(text, may_be_missing=may_be_missing)
        found.setdefault(contestant.hash, contestant)
    return list(found.values())


def plan_run(tasks: Sequence[Task], contestants: Sequence[Contestant]) -> tuple[int, int]:
    """How many records a run gives, and how often `advance` is going to be called at most."""
    there = sum(not contestant.missing for contestant in contestants)
    absent = len(contestants) - there
    return sum(task.cells(there) + absent for task in tasks), sum(task.units(there) for task in tasks)


def finished(out: Path | None, device: torch.device | None = None) -> dict[str, Record]:
    """The records in a folder that can stand for measuring again, by their keys.

    Those without an error that this very code measured on such a machine: the same versions, a commit without changed
    files, the same processor, threads and accelerator. Of two with the same key, the later one.

    Raises:
        RecordError: a file in the folder holds something else.
    """
    if out is None or not any(out.glob("*.jsonl")):
        return {}
    here = machine.describe(bandwidth=False, device=device)
    if str(here["commit"]).endswith("-dirty"):
        return {}
    try:
        records = sorted(read_records(out), key=lambda record: record.started)
    except NoRecords:
        # A run that was killed before its first record was whole: there is nothing that could stand for anything.
        return {}
    return {
        record.key: record
        for record in records
        if record.error is None and all(record.machine.get(name) == here[name] for name in _MUST_BE_EQUAL)
    }


def run(
    subject: Subject,
    contestants: Sequence[Contestant],
    tasks: Sequence[Task],
    *,
    out: Path | None = None,
    advance: Callable[[str], None] = lambda label: None,
    finish: Callable[[Record], None] = lambda record: None,
    bandwidth: bool = True,
    resume: bool = True,
    allow: Sequence[str] = (),
) -> list[Record]:
    """Every task for every plan. A run that was killed goes on where it was: what it wrote is not measured again.

    Args:
        subject: the model.
        contestants: from `contestants_of`.
        tasks: what to measure.
        out: folder to which `records-RUN.jsonl` is written line by line; None: nothing is written.
        advance: called after each unit of work with the label of what runs.
        finish: called with each record once it is written, or known to be there.
        bandwidth: measure the machine's read bandwidth and its arithmetic first.
        resume: take what `finished` finds in `out` instead of measuring it again.
        allow: sanity checks of `checks.MAY_BE_ALLOWED` that may fail; every record says so in its notes.

    Raises:
        UnknownName: there is no sanity check of a name in `allow`.
        RecordError: `out` holds lines that are no records.
        Fraud: the results cannot be what they say; all records have been written by then.
        KvtailorError: a task cannot be done at all; records of tasks before it have been written. Or the model is not
            trained and a task asks for more than costs; nothing has been measured then.
    """
    for task in tasks:
        if task.name not in KINDS or not KINDS[task.name].of_cost:
            subject.answer_for(task.name)
    permits = checks.allowances(allow)
    contestants = [replace(each, calibration=subject.provenance(each)) for each in contestants]
    verdicts = {each.label: subject.verdicts(each) for each in contestants}
    checks.check_sources({name: text for task in tasks for name, text in task.texts().items()})
    started = datetime.now(UTC)
    name = f"{started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    here = machine.describe(bandwidth=bandwidth, device=subject.device, dtype=subject.dtype)
    weights, model_hash = subject.weights(), subject.fingerprint()
    done = finished(out, subject.device) if resume else {}

    def blank(task: Task) -> Callable[[Contestant], Record]:
        return lambda contestant: Record(
            run=name,
            started=started.isoformat(timespec="milliseconds"),
            model=subject.name,
            model_hash=model_hash,
            parameters=weights[0] if weights else None,
            weight_bytes=weights[1] if weights else None,
            dtype=str(subject.dtype).removeprefix("torch."),
            device=str(subject.device),
            label=contestant.label,
            plan=contestant.plan or contestant.label,
            plan_hash=contestant.hash,
            missing=contestant.missing,
            calibrated_on=tuple(f"{made.text_name} {made.text_hash}" for made in contestant.calibration),
            task=task.name,
            task_version=task.version,
            machine=here,
        )

    path = _file(out, name)
    records: list[Record] = []
    there = [contestant for contestant in contestants if not contestant.missing]
    absent = [contestant for contestant in contestants if contestant.missing]
    for task in tasks:
        steps = _Steps(advance)
        given = Given(
            subject=subject,
            contestants=there,
            blank=blank(task),
            advance=steps,
            known=lambda blank: done.get(blank.key),
        )
        without = (
            replace(given.blank(each), error=f"This kvtailor does not have it: {'; '.join(each.missing)}")
            for each in absent
        )
        for found in chain(task.measure(given), steps.rest(task, len(there)), without):
            own = (note for note in found.notes if not checks.is_allowance(note))
            record = replace(found, notes=tuple(dict.fromkeys((*own, *verdicts.get(found.label, ()), *permits))))
            records.append(record)
            # One that was there is written again only where other sanity checks were allowed for it.
            if path is not None and (record.run == name or record.notes != found.notes):
                with path.open("a", encoding="utf-8") as lines:
                    lines.write(record.to_json() + "\n")
            finish(record)
    checks.check_records(records)
    return records


class _Steps:
    """Tells the steps of a task, and those that it promised and had no use for: a plan failed, or a text was short."""

    def __init__(self, advance: Callable[[str], None]):
        self._advance, self._told = advance, 0

    def __call__(self, label: str) -> None:
        self._told += 1
        self._advance(label)

    def rest(self, task: Task, contestants: int) -> Iterator[Record]:
        """No record; what is left of the steps is told when it is asked for one."""
        for _ in range(task.units(contestants) - self._told):
            self._advance(task.name)
        return
        yield


def _file(out: Path | None, run: str) -> Path | None:
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvtailorError(f"asked to write records to {out}, which cannot be a folder: {error}") from error
    return out / f"records-{run}.jsonl"
