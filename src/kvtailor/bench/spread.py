"""The cells of a run on a cluster: which are asked for, in which order, and the records as they come back.

A cell is one sample of a task for a few plans, whose worker prefills it once. Where plans take turns, or are timed or
weighed against each other, it is the sample for all plans, so that one machine has measured whatever is compared. The
records are those of a run in one process (`bench.loop`) but for times and machines:

- a plan that failed on a sample is not measured on those that follow. Here those may be done already: they are given
  the same error, and the records of one plan come in the order of the samples;
- a task that must know the null plan's values (`PlanByPlan.recall`) has the other plans wait for that record.

What differs: a cell whose worker died twice is asked for again plan by plan, so that no plan is blamed for another one.
A plan alone whose worker died twice has a record whose `error` says why, and the run goes on.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.loop import Given, blank_of, known_together, sides_of
from kvtailor.bench.remote_cell import (
    CellRequest,
    ModelThere,
    Refused,
    SharedJob,
    Undone,
    describe_samples,
    machine_here,
    score_cell,
)
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import AllAtOnce, PlanByPlan, Sample, Task
from kvtailor.cluster import CallOutcome, Executor, Resources
from kvtailor.errors import KvtailorError

__all__ = ["SpreadJob", "machines_of", "spread"]

# Plans of a cell at most. Each cell more is a prefill more, and each plan more a worker less that could share the work.
_TOGETHER = 4
# How often a call is tried: the second time its failure may be its own fault.
_ATTEMPTS = 2
# Of an accelerator, for a call that only reads its name.
_GLANCE = 0.01


@dataclass(kw_only=True, eq=False)
class SpreadJob:
    """A task for some plans, and how far it is.

    Attributes:
        number: its place in the run.
        task: the task.
        given: what it is measured with; workers load a subject of their own.
        resources: of one cell.
        ends_the_run: a task that cannot be done does; else `why` says so and the other jobs go on.
        why: why the task cannot be done.
        stopped: nothing more of it is asked for, and what comes back is left out.
        shared: what its cells have in common.
        samples: without what scoring needs.
        lines: the records of each plan, by its hash.
    """

    number: int
    task: Task
    given: Given
    resources: Resources
    ends_the_run: bool
    why: str | None = None
    stopped: bool = False
    shared: Any = None
    samples: Sequence[Sample] = ()
    lines: dict[str, _Line] = field(default_factory=dict)


@dataclass
class _Line:
    """The records of one plan of a job, which leave in the order of the samples."""

    waiting: dict[int, tuple[Record, bool]] = field(default_factory=dict)
    next: int = 0
    failed: str | None = None


def machines_of(executor: Executor, subject: Subject) -> list[Mapping[str, object]]:
    """Return what is known of each machine that takes calls now, see `bench.measure.machine.describe`.

    Raises:
        KvtailorError: one of them cannot run kvtailor, or has other versions than this process.
    """
    model = ModelThere.of(subject)
    device, faults, found = model.traits.device, [], []
    # Ray hides the accelerators from a call that asks for none.
    gpus = 0.0 if device == "cpu" else _GLANCE
    for outcome in executor.on_each_machine(machine_here, device, model.traits.dtype, False, None, gpus=gpus):
        if outcome.failure is not None:
            faults.append(f"on {outcome.machine}: {outcome.failure}")
        elif different := model.differences(outcome.value):
            faults.append(f"{outcome.machine} has {different}")
        else:
            found.append(outcome.value)
    if faults:
        head = f"{len(faults)} machines of the cluster cannot take part: give all the same packages and code, or take "
        raise KvtailorError("\n  - ".join([f"{head}them out", *faults]))
    return found


def spread(jobs: Sequence[SpreadJob], subject: Subject, executor: Executor) -> Iterator[tuple[SpreadJob, int, Record]]:
    """Yield every record with its job and the number of its sample, as it comes.

    The records of one plan of a job come in the order of its samples.

    Args:
        jobs: those that time or weigh are begun last, since they need machines on which nothing else runs.
        subject: the model; workers load their own.
        executor: what cells run on. Where this ends early, calls that have not ended are cancelled.

    Raises:
        KvtailorError: another process cannot load the model, no machine can run a cell, a machine has another model or
            other packages, or a task outside of a suite cannot be done at all.
        Fraud: a sanity check failed.
    """
    model = ModelThere.of(subject)
    for job in jobs:
        if (why := executor.why_not(job.resources)) is not None:
            raise KvtailorError(f"{job.task.name}: {why}")
    try:
        yield from _Spread(jobs, model, executor).records()
    finally:
        executor.cancel()


class _Spread:
    def __init__(self, jobs: Sequence[SpreadJob], model: ModelThere, executor: Executor):
        self._jobs = sorted(jobs, key=lambda job: job.task.exclusive)
        self._model, self._executor = model, executor
        self._leaving: deque[tuple[SpreadJob, int, Record]] = deque()
        # Cells to be begun before any other, and those that wait for the null plan's record on a sample of a job.
        self._ready: deque[tuple[SpreadJob, CellRequest]] = deque()
        self._after: dict[tuple[SpreadJob, int], list[CellRequest]] = {}

    def records(self) -> Iterator[tuple[SpreadJob, int, Record]]:
        for job in self._jobs:
            contestants = tuple(job.given.contestants)
            shared = SharedJob(name=secrets.token_hex(8), task=job.task, contestants=contestants, model=self._model)
            job.shared = self._executor.share(shared)
            self._submit(job, None)
        while self._executor.pending:
            self._settle(self._executor.take())
        cells = ((job, cell) for job in self._jobs for cell in self._cells_of(job))
        while True:
            while self._executor.has_room and (found := self._ready.popleft() if self._ready else next(cells, None)):
                self._submit(*found)
                yield from self._left()
            yield from self._left()
            if not self._executor.pending:
                return
            self._settle(self._executor.take())

    def _submit(self, job: SpreadJob, cell: CellRequest | None, reasons: Sequence[str] = ()) -> None:
        """Ask for a cell, or without one for the samples of a job; `reasons` are why it failed before."""
        tag = job, cell, reasons
        if cell is None:
            # No time is taken and nothing is weighed.
            asked = replace(job.resources, exclusive=False)
            self._executor.submit(describe_samples, job.shared, resources=asked, tag=tag)
        elif not job.stopped:
            self._executor.submit(score_cell, job.shared, cell, resources=job.resources, tag=tag)

    def _left(self) -> Iterator[tuple[SpreadJob, int, Record]]:
        while self._leaving:
            yield self._leaving.popleft()

    def _cells_of(self, job: SpreadJob) -> Iterator[CellRequest]:
        """The cells of a job that are to be measured; what is known goes to the records at once."""
        sides = sides_of(job.task, job.given.contestants)
        apart = isinstance(job.task, PlanByPlan) and not job.task.exclusive
        # A task may take note of what others found, which is then to be there first.
        recalls = isinstance(job.task, PlanByPlan) and type(job.task).recall is not PlanByPlan.recall
        for index, sample in enumerate(job.samples):
            if job.stopped:
                return
            blanks = {each.hash: job.given.blank(each) for each in sides}
            known = [job.given.known(blank_of(sample, blanks[each.hash])) for each in sides]
            if isinstance(job.task, AllAtOnce):
                known = known_together(job.task, known)
            recalled: dict[str, Mapping[str, tuple[float, ...]]] = {}
            missing: list[Contestant] = []
            for each, record in zip(sides, known, strict=True):
                failed = job.lines[each.hash].failed if each.hash in job.lines else None
                if record is not None:
                    recalled[each.hash] = record.values
                    self._tell(job, index, blanks[each.hash], record)
                elif failed is not None:
                    blank = blank_of(sample, blanks[each.hash])
                    self._tell(job, index, blanks[each.hash], replace(blank, error=failed))
                else:
                    missing.append(each)
            first = [each for each in missing if each.is_full] if apart and recalls and len(missing) > 1 else []
            rest = [each for each in missing if each not in first]
            size = _TOGETHER if apart else len(sides)
            cells = [
                CellRequest(
                    index=index,
                    sample=sample,
                    blanks={each.hash: blanks[each.hash] for each in group},
                    recalled=recalled if recalls else {},
                )
                for group in [first, *(rest[at : at + size] for at in range(0, len(rest), size))]
                if group
            ]
            if first:
                self._after[job, index] = cells[1:]
            yield from cells[:1] if first else cells

    def _settle(self, outcome: CallOutcome) -> None:
        """Take what became of a cell, or of the samples of a job."""
        job: SpreadJob
        cell: CellRequest | None
        job, cell, reasons = outcome.tag
        if job.stopped:
            return
        if outcome.failure is not None:
            self._failed(job, cell, reasons, outcome)
            return
        found, error = outcome.value
        if error is not None:
            _blame(job, error, outcome.machine)
        if cell is None:
            # What could be made is measured all the same, as a run alone does before it comes to the fault.
            job.samples = found
        elif error is not None:
            job.stopped = True
        else:
            records = [replace(each, machine={**each.machine, "host": outcome.machine}) for each in found]
            self._take(job, cell, records, own=True, where=outcome.machine)

    def _failed(self, job: SpreadJob, cell: CellRequest | None, before: Sequence[str], outcome: CallOutcome) -> None:
        """Ask again, plan by plan, or give up: a worker that was killed by chance is no fault of a plan."""
        where = "" if outcome.machine is None else f" (on {outcome.machine})"
        reasons = [*before, f"{str(outcome.failure).rstrip('.')}{where}"]
        why = f"It failed {len(reasons)} times: {'; then: '.join(dict.fromkeys(reasons))}."
        if outcome.hopeless:
            why = f"{reasons[-1]}."
        elif len(reasons) < _ATTEMPTS:
            self._submit(job, cell, reasons)
            return
        elif cell is not None and isinstance(job.task, PlanByPlan) and len(cell.blanks) > 1:
            self._ready += [(job, replace(cell, blanks={plan: blank})) for plan, blank in cell.blanks.items()]
            return
        if cell is None:
            job.why = why
            return
        blanks = (blank_of(cell.sample, blank) for blank in cell.blanks.values())
        self._take(job, cell, [replace(blank, error=why) for blank in blanks], own=False, where=outcome.machine)

    def _take(
        self, job: SpreadJob, cell: CellRequest, records: Sequence[Record], *, own: bool, where: str | None
    ) -> None:
        """Take the records of a cell, and begin the cells that waited for them; see `_tell`."""
        for record in records:
            self._tell(job, cell.index, cell.blanks[record.plan_hash], record, own=own, where=where)
        values = {record.plan_hash: record.values for record in records if record.error is None}
        for other in self._after.pop((job, cell.index), []):
            self._ready.append((job, replace(other, recalled={**other.recalled, **values})))

    def _tell(
        self, job: SpreadJob, index: int, blank: Record, record: Record, *, own: bool = False, where: str | None = None
    ) -> None:
        """Put a record where it leaves in its turn.

        Args:
            job, index: of its sample.
            blank: of its plan.
            record: finished.
            own: an error is the plan's own, which is then not measured on the samples that follow.
            where: the machine.
        """
        label = f"{job.samples[index].label or job.task.name} · {blank.label}"
        for _ in range(job.samples[index].steps):
            job.given.advance(label if where is None else f"{where}: {label}")
        line = job.lines.setdefault(blank.plan_hash, _Line())
        line.waiting[index] = record, own
        while line.next in line.waiting:
            found, of_plan = line.waiting.pop(line.next)
            if of_plan and line.failed is not None:
                # Whatever was measured meanwhile, a run alone would not have tried.
                found = replace(blank_of(job.samples[line.next], blank), error=line.failed)
            elif of_plan:
                line.failed = found.error
            self._leaving.append((job, line.next, found))
            line.next += 1


def _blame(job: SpreadJob, error: KvtailorError, machine: str | None) -> None:
    """Note why a job cannot be done, or end the run.

    Raises:
        Fraud: a sanity check failed.
        KvtailorError: the worker's machine cannot take part, or the job ends the run.
    """
    if isinstance(error, Refused):
        raise KvtailorError(f"on {machine}: {error}")
    if not isinstance(error, Undone) or job.ends_the_run:
        raise error
    job.why = str(error)
