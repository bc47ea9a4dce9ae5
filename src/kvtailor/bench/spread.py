"""The cells of a run on an executor: which are asked for, in which order, and the records as they come back.

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

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.loop import blank_of, known_together, sides_of
from kvtailor.bench.remote_cell import (
    CellAnswer,
    CellRequest,
    ModelThere,
    SamplesAnswer,
    SharedJob,
    describe_samples,
    machine_here,
    score_cell,
)
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import AllAtOnce, PlanByPlan, Sample, Task
from kvtailor.cluster.contract import Call, CallOutcome, Executor, Resources, Shared
from kvtailor.errors import KvtailorError

__all__ = ["SpreadJob", "machines_of", "spread"]

# Plans of a cell at most. Each cell more is a prefill more, and each plan more a worker less that could share the work.
_TOGETHER = 4
# Of an accelerator, for a call that only reads its name.
_GLANCE = 0.01


@dataclass(kw_only=True, eq=False)
class SpreadJob:
    """A task for some plans, and how far it is.

    Attributes:
        task: the task.
        contestants: the plans that are there, the null plan first.
        blank: a record of one plan with all that depends on neither task's sample nor machine.
        known: see `loop.Given`.
        resources: of one cell.
        advance: called for each step, with the label of what ran.
        ends_the_run: a task that cannot be done does; else `why` says so and the other jobs go on.
        why: why the task cannot be done.
        stopped: nothing more of it is asked for, and what comes back is left out.
        told: hashes of the plans of which there was a record.
        shared: what its cells have in common, once one was asked for.
        lines: the records of each plan that wait for their turn, by plan hash.
    """

    task: Task
    contestants: Sequence[Contestant]
    blank: Callable[[Contestant], Record]
    known: Callable[[Record], Record | None]
    resources: Resources
    advance: Callable[[str], None]
    ends_the_run: bool
    why: str | None = None
    stopped: bool = False
    told: set[str] = field(default_factory=set)
    shared: Shared | None = None
    lines: dict[str, _Line] = field(default_factory=dict)


@dataclass
class _Line:
    """The records of one plan of a job, which leave in the order of the samples."""

    waiting: dict[int, tuple[Record, bool, Record]] = field(default_factory=dict)
    next: int = 0
    failed: str | None = None


@dataclass(kw_only=True)
class _Cell:
    """One sample for some plans. `blanks` are whole but for the machine, by plan hash."""

    job: SpreadJob
    index: int
    sample: Sample
    contestants: Sequence[Contestant]
    blanks: dict[str, Record]
    recalled: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)


def spread(jobs: Sequence[SpreadJob], subject: Subject, executor: Executor) -> Iterator[tuple[SpreadJob, int, Record]]:
    """Yield every record with its job and the number of its sample, as it comes.

    The records of one plan of a job come in the order of its samples.

    Args:
        jobs: those that time or weigh are begun last, since they need machines on which nothing else runs.
        subject: the model; workers load their own.
        executor: what cells run on.

    Raises:
        KvtailorError: another process cannot load the model, no machine can run a cell, a machine has another model or
            other packages, or a task outside of a suite cannot be done at all.
        Fraud: a sanity check failed.
    """
    yield from _Spread(jobs, subject, executor).records()


def machines_of(executor: Executor, subject: Subject) -> list[Mapping[str, object]]:
    """Return what is known of each machine that takes calls now, see `bench.measure.machine.describe`.

    Raises:
        KvtailorError: one of them cannot run kvtailor, or has other versions than this process.
    """
    model = ModelThere.of(subject)
    faults, found = [], []
    # Ray hides the accelerators from a call that asks for none.
    gpus = 0.0 if model.device == "cpu" else _GLANCE
    for outcome in executor.on_each_machine(machine_here, model.device, model.dtype, gpus=gpus):
        if outcome.failure is not None:
            faults.append(f"on {outcome.machine}: {outcome.failure}")
        elif different := model.differences(outcome.value):
            faults.append(f"{outcome.machine} has {different}")
        else:
            found.append(outcome.value)
    if faults:
        raise KvtailorError(
            "\n  - ".join(
                [
                    f"{len(faults)} machines of the cluster cannot take part: give all the same packages and "
                    "code, or take them out",
                    *faults,
                ]
            )
        )
    return found


class _Spread:
    def __init__(self, jobs: Sequence[SpreadJob], subject: Subject, executor: Executor):
        self._jobs = sorted(jobs, key=lambda job: job.task.exclusive)
        self._subject, self._executor = subject, executor
        self._model = ModelThere.of(subject)
        self._there: deque[tuple[SpreadJob, int, Record]] = deque()
        self._ready: deque[_Cell] = deque()
        self._open: list[tuple[SpreadJob, Iterator[_Cell]]] = []
        self._undescribed = 0
        self._after: dict[tuple[int, int], list[_Cell]] = {}

    def records(self) -> Iterator[tuple[SpreadJob, int, Record]]:
        for job in self._jobs:
            why = self._executor.why_not(job.resources)
            if why is not None:
                raise KvtailorError(f"{job.task.name}: {why}")
        for job in self._jobs:
            self._describe(job)
        while self._executor.pending or self._there or self._open or self._ready:
            yield from self._take_there()
            while self._executor.has_room and (cell := self._next_cell()) is not None:
                self._submit(cell)
                yield from self._take_there()
            if self._executor.pending:
                self._settle(self._executor.take())

    def _take_there(self) -> Iterator[tuple[SpreadJob, int, Record]]:
        while self._there:
            job, index, record = self._there.popleft()
            job.told.add(record.plan_hash)
            yield job, index, record

    def _describe(self, job: SpreadJob) -> None:
        """Have a worker make the job's samples."""
        shared = SharedJob(task=job.task, contestants=tuple(job.contestants), model=self._model)
        job.shared = self._executor.share(shared)
        self._undescribed += not job.task.exclusive
        # No time is taken and nothing is weighed.
        asked = replace(job.resources, exclusive=False)
        self._executor.submit(Call(function=describe_samples, arguments=(job.shared,), resources=asked, tag=job))

    def _next_cell(self) -> _Cell | None:
        """The next cell that is to be begun; None where an outcome must come first."""
        if self._ready:
            return self._ready.popleft()
        while self._open:
            # Jobs stand in the order of the run, those that time behind all others.
            job, cells = self._open[0]
            if job.task.exclusive and self._undescribed:
                return None
            cell = next(cells, None)
            if cell is not None:
                return cell
            self._open.remove((job, cells))
        return None

    def _described(self, job: SpreadJob, outcome: CallOutcome) -> None:
        """Take the samples of a job."""
        self._undescribed -= not job.task.exclusive
        answer: SamplesAnswer | None = outcome.value
        if answer is None:
            # Its workers died twice: each plan has a record that says so, and the run goes on.
            job.why = outcome.failure
            return
        _raise_of(answer, outcome.machine)
        if answer.undone is not None:
            # What could be made is measured all the same, as a run alone does before it comes to the fault.
            self._undone(job, answer.undone)
        self._open.append((job, self._cells_of(job, answer.samples)))
        self._open.sort(key=lambda each: self._jobs.index(each[0]))

    def _cells_of(self, job: SpreadJob, samples: Sequence[Sample]) -> Iterator[_Cell]:
        """The cells of a job that are to be measured; what is known goes to the records at once."""
        for index, sample in enumerate(samples):
            if job.stopped:
                return
            sides = sides_of(job.task, job.contestants)
            blanks = {each.hash: blank_of(sample, job.blank(each)) for each in sides}
            known = [job.known(blanks[each.hash]) for each in sides]
            if isinstance(job.task, AllAtOnce):
                known = known_together(job.task, known)
            recalled = {}
            for each, record in zip(sides, known, strict=True):
                if record is not None:
                    recalled[each.hash] = record.values
                    cell = _Cell(job=job, index=index, sample=sample, contestants=[each], blanks=blanks)
                    self._tell(cell, each, record, of_plan=False, where=None)
            missing = [each for each, record in zip(sides, known, strict=True) if record is None]
            yield from self._grouped(job, index, sample, missing, blanks, recalled)

    def _grouped(
        self,
        job: SpreadJob,
        index: int,
        sample: Sample,
        missing: Sequence[Contestant],
        blanks: dict[str, Record],
        recalled: Mapping[str, Mapping[str, tuple[float, ...]]],
    ) -> Iterator[_Cell]:
        def cell(contestants: Sequence[Contestant]) -> _Cell:
            return _Cell(
                job=job,
                index=index,
                sample=sample,
                contestants=contestants,
                blanks={each.hash: blanks[each.hash] for each in contestants},
                recalled=recalled if recalls else {},
            )

        def apart(contestants: Sequence[Contestant]) -> list[_Cell]:
            found = [contestants[at : at + _TOGETHER] for at in range(0, len(contestants), _TOGETHER)]
            return [cell(each) for each in found]

        recalls = _recalls(job.task)
        if not missing:
            return
        if isinstance(job.task, AllAtOnce) or job.task.exclusive:
            yield cell(missing)
            return
        full = next((each for each in missing if each.is_full), None)
        if recalls and full is not None and len(missing) > 1:
            self._after[id(job), index] = apart([each for each in missing if each is not full])
            yield cell([full])
            return
        failed = {each.hash: why for each in missing if (why := self._line(job, each).failed) is not None}
        for each in missing:
            if each.hash in failed:
                record = replace(blanks[each.hash], error=failed[each.hash])
                self._tell(cell([each]), each, record, of_plan=True, where=None)
        yield from apart([each for each in missing if each.hash not in failed])

    def _submit(self, cell: _Cell) -> None:
        job = cell.job
        if job.stopped or job.shared is None:
            return
        asked = CellRequest(
            job=job.shared,
            index=cell.index,
            text_hash=cell.sample.text_hash,
            point=cell.sample.point,
            blanks={each.hash: job.blank(each) for each in cell.contestants},
            recalled=cell.recalled,
        )
        self._executor.submit(
            Call(function=score_cell, arguments=(asked, job.task.exclusive), resources=job.resources, tag=cell)
        )

    def _settle(self, outcome: CallOutcome) -> None:
        """Take what became of a call: samples that were made, or a cell."""
        if isinstance(outcome.call.tag, SpreadJob):
            self._described(outcome.call.tag, outcome)
            return
        cell: _Cell = outcome.call.tag
        job = cell.job
        if job.stopped:
            return
        answer: CellAnswer | None = outcome.value
        if answer is not None:
            _raise_of(answer, outcome.machine)
        if answer is None and outcome.attempts and isinstance(job.task, PlanByPlan) and len(cell.contestants) > 1:
            self._ready += [replace(cell, contestants=[each]) for each in cell.contestants]
            return
        if answer is None:
            for each in cell.contestants:
                record = replace(cell.blanks[each.hash], error=outcome.failure)
                self._tell(cell, each, record, of_plan=False, where=outcome.machine)
        elif answer.undone is not None:
            self._undone(job, answer.undone)
            job.stopped = True
            return
        else:
            by_hash = {each.hash: each for each in cell.contestants}
            for record in answer.records:
                record = replace(record, machine={**record.machine, "host": outcome.machine})
                self._tell(cell, by_hash[record.plan_hash], record, of_plan=True, where=outcome.machine)
        values = {} if answer is None else {r.plan_hash: r.values for r in answer.records if r.error is None}
        for other in self._after.pop((id(job), cell.index), []):
            self._ready.append(replace(other, recalled={**other.recalled, **values}))

    def _tell(self, cell: _Cell, contestant: Contestant, record: Record, *, of_plan: bool, where: str | None) -> None:
        """Put a record where it leaves in its turn.

        Args:
            cell: of the record.
            contestant: of the record.
            record: finished.
            of_plan: an error is the plan's own, which is then not measured on the samples that follow.
            where: the machine.
        """
        job = cell.job
        label = f"{cell.sample.label or job.task.name} · {contestant.label}"
        for _ in range(cell.sample.steps):
            job.advance(label if where is None else f"{where}: {label}")
        line = self._line(job, contestant)
        line.waiting[cell.index] = record, of_plan, cell.blanks[contestant.hash]
        while line.next in line.waiting:
            record, of_plan, blank = line.waiting.pop(line.next)
            if isinstance(job.task, PlanByPlan) and of_plan:
                if line.failed is not None:
                    # Whatever was measured meanwhile, a run alone would not have tried.
                    record = replace(blank, error=line.failed)
                line.failed = record.error
            index, line.next = line.next, line.next + 1
            self._there.append((job, index, record))

    def _undone(self, job: SpreadJob, why: str) -> None:
        if job.ends_the_run:
            raise KvtailorError(why)
        job.why = why

    def _line(self, job: SpreadJob, contestant: Contestant) -> _Line:
        return job.lines.setdefault(contestant.hash, _Line())


def _raise_of(answer: CellAnswer | SamplesAnswer, machine: str | None) -> None:
    """Raise what ends the run of what a worker found.

    Raises:
        Fraud: a sanity check failed.
        KvtailorError: the worker's machine cannot take part.
    """
    if answer.fraud is not None:
        raise Fraud(*answer.fraud)
    if answer.refused is not None:
        raise KvtailorError(f"on {machine}: {answer.refused}")


def _recalls(task: Task) -> bool:
    """Whether a task takes note of what others found, which is then to be there first."""
    return isinstance(task, PlanByPlan) and type(task).recall is not PlanByPlan.recall
