"""Runs tasks over plans, writes each record as soon as it is there, and looks for frauds at the end."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from kvtailor.bench import checks
from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.forks import check_workers, one_thread
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.loop import Given, records_of
from kvtailor.bench.measure import machine
from kvtailor.bench.measure.kept_prompts import NOT_SHARED, TIMED, KeptPrompts
from kvtailor.bench.resources import CellResources
from kvtailor.bench.schema import NoRecords, Record, RecordError, leave_out, read_records
from kvtailor.bench.spread import SpreadJob, machines_of, spread
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import PlanByPlan, Task
from kvtailor.cluster import Executor
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.hf.model import processes as process_group
from kvtailor.hf.model.cache_dtype import stored_dtype
from kvtailor.ops.files import append_line
from kvtailor.plan.arguments import with_nested
from kvtailor.presets import FULL

__all__ = ["TaskJob", "contestants_of", "finished", "of_other_code", "plan_run", "run"]

_MUST_BE_EQUAL = (
    "python",
    "torch",
    "transformers",
    "kvtailor",
    "commit",
    "processor",
    "threads",
    "processes",
    "accelerator",
    "huge_pages",
)


@dataclass(frozen=True, kw_only=True)
class TaskJob:
    """A task for some plans, with what becomes of it where it cannot be done.

    Attributes:
        kind: name of the task.
        task: None where it cannot be made; then `why` says why, and each plan gets a record with that.
        contestants: the plans, the null plan first; those that this kvtailor does not have get a record that says so.
        why: see `task`.
        asked: the task with its settings as a suite asked for it, for its records; None outside of suites. A task of a
            suite that breaks off gives records that say so, and the next one goes on.
    """

    kind: str
    task: Task | None
    contestants: tuple[Contestant, ...]
    why: str | None = None
    asked: str | None = None

    @property
    def there(self) -> tuple[Contestant, ...]:
        """The plans that this kvtailor has and this model can have."""
        return tuple(each for each in self.contestants if not each.missing and each.unfit is None)

    @property
    def absent(self) -> tuple[Contestant, ...]:
        """The others."""
        return tuple(each for each in self.contestants if each.missing or each.unfit is not None)

    @property
    def hashes(self) -> list[str]:
        """Those of its plans in their order, the model's own cache before them."""
        return [OWN.hash, *(each.hash for each in self.contestants)]

    @property
    def cells(self) -> int:
        """How many records it gives."""
        there = len(self.there)
        return (there if self.task is None else self.task.cells(there)) + len(self.absent)

    @property
    def units(self) -> int:
        """How often `advance` is called."""
        return 0 if self.task is None else self.task.units(len(self.there))


def contestants_of(plans: Sequence[str], *, may_be_missing: bool = False) -> list[Contestant]:
    """The plans as contestants, each once, 'full' first and added where it is missing: all is measured against it.

    Args:
        plans: in one line each, or paths of TOML files.
        may_be_missing: see `Contestant.of`; a suite names methods that may come later.

    Raises:
        PlanError: a plan has faults.
    """
    found: dict[str, Contestant] = {}
    for text in [FULL, *plans]:
        contestant = Contestant.named(text, may_be_missing=may_be_missing)
        found.setdefault(contestant.hash, contestant)
    return list(found.values())


def plan_run(tasks: Sequence[Task | TaskJob], contestants: Sequence[Contestant] = ()) -> tuple[int, int]:
    """Return how many records a run gives, and how often `advance` is going to be called at most."""
    jobs = _jobs(tasks, contestants)
    return sum(job.cells for job in jobs), sum(job.units for job in jobs)


def finished(
    out: Path | None,
    device: torch.device | None = None,
    machines: Sequence[Mapping[str, object]] | None = None,
    without: Sequence[str] = (),
) -> dict[str, Record]:
    """The records in a folder that can stand for measuring again, by their keys.

    Those without an error that this very code measured on such a machine: the same versions, a commit without changed
    files, the same processor, threads and accelerator. Of two with the same key, the later one.

    Args:
        out: the folder.
        device: of the model; None: CPU.
        machines: those that measure now, see `machine.describe`; None: this one. A record of any of them will do.
        without: records that stand for nothing, see `bench.schema.leave_out`.

    Raises:
        RecordError: a file in the folder holds something else.
    """
    if out is None:
        return {}
    now = [machine.describe(bandwidth=False, device=device)] if machines is None else machines
    clean = [each for each in now if not str(each["commit"]).endswith("-dirty")]
    try:
        records = sorted(leave_out(read_records(out), without), key=lambda record: record.started)
    except NoRecords:
        # A new folder, or a run that was killed before its first record was whole.
        return {}
    return {
        record.key: record
        for record in records
        if record.error is None
        and any(all(_said(record.machine, name) == each[name] for name in _MUST_BE_EQUAL) for each in clean)
    }


def of_other_code(out: Path) -> str:
    """Say how many records of a folder other code measured, and which; empty: none, or there are no records.

    They do not stand for measuring again (see `finished`), though a page of the folder shows them.
    """
    now = machine.versions()
    try:
        records = read_records(out)
    except RecordError:
        # A run tells what is wrong with them.
        return ""
    others = [each.machine for each in records if any(each.machine.get(name) != said for name, said in now.items())]
    if not others:
        return ""
    theirs = others[-1]
    differs = " and ".join(
        f"{name} {_short(theirs.get(name))}, here {_short(said)}"
        for name, said in now.items()
        if theirs.get(name) != said
    )
    were = "was" if len(others) == 1 else "were"
    return (
        f"{len(others)} of its {len(records)} records {were} measured by other code ({differs}), and what is asked of "
        "them is measured anew."
    )


def run(
    subject: Subject,
    contestants: Sequence[Contestant],
    tasks: Sequence[Task | TaskJob],
    *,
    out: Path | None = None,
    advance: Callable[[str], None] = lambda label: None,
    finish: Callable[[Record], None] = lambda record: None,
    bandwidth: bool = True,
    resume: bool = True,
    without: Sequence[str] = (),
    allow: Sequence[str] = (),
    executor: Executor | None = None,
    resources: CellResources | None = None,
    share: bool = True,
    workers: int = 1,
    judge: Callable[[Sequence[Record]], None] = checks.check_records,
) -> list[Record]:
    """Every task for every plan. A run that was killed goes on where it was: what it wrote is not measured again.

    Args:
        subject: the model.
        contestants: from `contestants_of`.
        tasks: what to measure: tasks for all `contestants`, or jobs for plans of their own among them.
        out: folder to which `records-RUN.jsonl` is written line by line; None: nothing is written.
        advance: called after each unit of work with the label of what runs.
        finish: called with each record once it is written, or known to be there.
        bandwidth: measure the machine's read bandwidth and its arithmetic first.
        resume: take what `finished` finds in `out` instead of measuring it again.
        without: records in `out` that are measured again all the same, see `bench.schema.leave_out`.
        allow: sanity checks of `checks.MAY_BE_ALLOWED` that may fail; every record says so in its notes.
        executor: what the cells run on, see `bench.spread`; None: the cells run here, one after the other.
        resources: what a cell takes of an executor's machines; None: one processor.
        share: a prompt goes through the model once for all plans, where that gives the same numbers; see
            `bench.measure.kept_prompts`. A subject that keeps prompts already goes on with those.
        workers: so many plans of a sample are scored side by side, each in one thread, where a task neither times nor
            weighs and scores plan by plan; see `bench.forks`. They are written in the order in which they end.
        judge: what becomes of results that cannot be what they say; by default they end the run. A search leaves the
            plan out instead.

    Returns:
        The records, those of each job together, sample by sample.

    Raises:
        ArgumentError: plans cannot be scored side by side here, or on a cluster.
        UnknownName: there is no sanity check of a name in `allow`.
        RecordError: `out` holds lines that are no records.
        Fraud: the results cannot be what they say; all records have been written by then.
        KvtailorError: a task cannot be done at all; records of tasks before it have been written. Or the model is not
            trained and a task asks for more than costs; nothing has been measured then.
    """
    check_workers(workers, subject.device)
    if workers > 1 and executor is not None:
        raise ArgumentError(
            f"asked for {workers} workers and a cluster: the cluster's machines have workers of their own"
        )
    jobs = _jobs(tasks, contestants)
    for job in jobs:
        if job.kind not in KINDS or not KINDS[job.kind].of_cost:
            subject.answer_for(job.kind)
    subject.check_finite()
    processes = process_group.started()
    _check_processes(jobs, processes.size)
    permits = checks.allowances(allow)
    everyone = {each.hash: each for job in jobs for each in job.contestants}
    calibrated = {plan: replace(each, calibration=subject.provenance(each)) for plan, each in everyone.items()}
    verdicts = {each.label: subject.verdicts(each) for each in calibrated.values()}
    texts = {name: text for job in jobs if job.task is not None for name, text in job.task.texts().items()}
    checks.check_sources(texts)
    started = datetime.now(UTC)
    name = f"{started:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    # Of a cluster each machine is described where it measures.
    here = machine.describe(bandwidth=bandwidth and executor is None, device=subject.device, dtype=subject.dtype)
    weights, model_hash = subject.weights(), subject.fingerprint()
    stored = stored_dtype(subject.model)
    kept = subject.kept if isinstance(subject.kept, KeptPrompts) else KeptPrompts(off=None if share else NOT_SHARED)
    kept.begin_run(model_hash)
    subject, timed = replace(subject, kept=kept), replace(subject, kept=KeptPrompts(off=TIMED))

    codes = {
        each.hash: machine.code_of_others(method for part in each.plan.parts.values() for method in with_nested(part))
        for job in jobs
        for each in job.there
        if each.plan is not None
    }

    def blank(job: TaskJob, machine: Mapping[str, object]) -> Callable[[Contestant], Record]:
        return lambda contestant: Record(
            run=name,
            started=started.isoformat(timespec="milliseconds"),
            model=subject.name,
            model_hash=model_hash,
            parameters=weights[0] if weights else None,
            weight_bytes=weights[1] if weights else None,
            dtype=str(subject.dtype).removeprefix("torch."),
            cache_dtype=None if stored is None else str(stored).removeprefix("torch."),
            device=str(subject.device),
            label=contestant.label,
            plan=contestant.text or contestant.label,
            plan_hash=contestant.hash,
            missing=contestant.missing,
            calibrated_on=tuple(f"{made.text_name} {made.text_hash}" for made in contestant.calibration),
            task=job.kind,
            task_version=0 if job.task is None else job.task.version,
            asked=job.asked,
            machine={**machine, "methods": codes[contestant.hash]} if codes.get(contestant.hash) else machine,
        )

    path = _file(out, name)

    def written(found: Record) -> Record:
        own = (note for note in found.notes if not checks.is_allowance(note))
        record = replace(found, notes=tuple(dict.fromkeys((*own, *verdicts.get(found.label, ()), *permits))))
        # One that was there is written again only where other sanity checks were allowed for it.
        if path is not None and (record.run == name or record.notes != found.notes):
            append_line(path, record.to_line())
        finish(record)
        return record

    def given_for(job: TaskJob, steps: _Steps) -> Given:
        there = [calibrated[each.hash] for each in job.there]
        alone = job.task is not None and job.task.exclusive
        at_once = workers if _is_forked(job) else 1
        return Given(
            subject=timed if alone else subject,
            contestants=there,
            blank=blank(job, here if at_once == 1 else {**here, "threads": 1}),
            advance=steps,
            workers=at_once,
        )

    work = [(job, steps, given_for(job, steps)) for job in jobs for steps in [_Steps(advance, job)]]
    if executor is None:
        records = []
        done: dict[int, Mapping[str, Record]] = {}
        for job, steps, given in work:
            if given.subject is timed:
                # What is weighed and timed now stands alone.
                kept.forget()
            with one_thread(given.workers):
                threads = torch.get_num_threads()
                if threads not in done:
                    # Of processes that share a model, one knows what is there.
                    there = finished(out, subject.device, without=without) if resume and processes.first else {}
                    done[threads] = processes.broadcast(there)
                found = _records_of(job, replace(given, known=partial(_known, done[threads])), steps)
                # Whatever happens between two records, forks that score the next ones end with it.
                with closing(found):
                    made = [written(each) for each in found]
                records += _in_order(made, job) if given.workers > 1 else made
    else:
        finished_on = partial(finished, out if resume else None, subject.device, without=without)
        told = [
            (place, written(found))
            for place, found in _records_of_cluster(work, subject, executor, resources or CellResources(), finished_on)
        ]
        records = [record for _, record in sorted(told, key=lambda each: each[0])]
    judge(records)
    return records


def _short(version: object) -> str:
    """A version for people: of a commit the first digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", str(version))


def _said(machine: Mapping[str, object], name: str) -> object:
    """An entry of a record's machine; records of before say nothing of processes, and had one."""
    return machine.get(name, 1 if name == "processes" else None)


def _is_forked(job: TaskJob) -> bool:
    """Whether plans of a task may be scored side by side."""
    return isinstance(job.task, PlanByPlan) and not (job.task.exclusive or job.task.one_process)


def _in_order(records: Sequence[Record], job: TaskJob) -> list[Record]:
    """The records of a job as one process gives them: sample by sample, and of a sample in the order of the plans."""
    samples: dict[tuple[object, ...], int] = {}
    plans = job.hashes

    def place(record: Record) -> tuple[int, int]:
        sample = record.task, str(record.point), record.text, record.text_hash, record.state
        return samples.setdefault(sample, len(samples)), plans.index(record.plan_hash)

    return sorted(records, key=place)


def _check_processes(jobs: Sequence[TaskJob], processes: int) -> None:
    """Raise where several processes share the model and a task times them, weighs one, or starts others.

    Raises:
        KvtailorError: with their names; nothing has been measured then.
    """
    alone = [job.kind for job in jobs if job.task is not None and (job.task.of_cost or job.task.one_process)]
    if processes > 1 and alone:
        raise KvtailorError(
            f"asked for {', '.join(dict.fromkeys(alone))} in {processes} processes that share a model: such tasks time "
            "or weigh a single process, or start others. Run them without torchrun, and here those that judge answers"
        )


def _jobs(tasks: Sequence[Task | TaskJob], contestants: Sequence[Contestant]) -> list[TaskJob]:
    return [
        each if isinstance(each, TaskJob) else TaskJob(kind=each.name, task=each, contestants=tuple(contestants))
        for each in tasks
    ]


def _records_of(job: TaskJob, given: Given, steps: _Steps) -> Generator[Record, None, None]:
    """The records of all plans of a job."""
    why = job.why
    if job.task is not None:
        try:
            yield from records_of(job.task, given)
        except Fraud:
            raise
        except (KvtailorError, ImportError) as error:
            if job.asked is None:
                raise
            why = str(error)
    yield from _records_of_rest(job, given, steps, why)


def _records_of_rest(job: TaskJob, given: Given, steps: _Steps, why: str | None) -> Iterator[Record]:
    """Yield what stands behind the records of a job's samples: why it broke off, and the plans that are not there.

    Why it broke off is the error of each of its plans, since those that have records lack the samples that follow. A
    step that the job promised and had no use for is told as well.
    """
    if why is not None:
        yield from (replace(given.blank(contestant), error=why) for contestant in given.contestants)
    steps.finish()
    for contestant in job.absent:
        lacking = f"This kvtailor does not have it: {'; '.join(contestant.missing)}"
        yield replace(given.blank(contestant), error=contestant.unfit or lacking)


def _known(records: Mapping[str, Record], blank: Record) -> Record | None:
    """The record that stands for measuring this again: its plan's methods of other packages have the same code, too."""
    found, mine = records.get(blank.key), blank.machine.get("methods", {})
    assert isinstance(mine, dict)
    same = found is not None and found.machine.get("methods", {}) == mine and None not in mine.values()
    return found if same else None


def _records_of_cluster(
    work: Sequence[tuple[TaskJob, _Steps, Given]],
    subject: Subject,
    executor: Executor,
    resources: CellResources,
    finished_on: Callable[[Sequence[Mapping[str, object]]], Mapping[str, Record]],
) -> Iterator[tuple[tuple[int, float, int], Record]]:
    """The records of all jobs as they come, each with its place: job, sample and plan, as a run alone has them.

    Args:
        work: the jobs.
        subject: the model.
        executor, resources: see `run`.
        finished_on: `finished`, for the machines that measure now.
    """
    machines = machines_of(executor, subject)
    known: dict[int, Mapping[str, Record]] = {}
    jobs: dict[int, SpreadJob] = {}
    for number, (job, _, given) in enumerate(work):
        if job.task is None:
            continue
        asked = resources.of(job.kind, exclusive=job.task.exclusive, device=subject.device.type)
        if asked.threads not in known:
            # A worker computes in as many threads as its cell has processors, whatever the process began with.
            known[asked.threads] = finished_on([{**each, "threads": asked.threads} for each in machines])
        jobs[number] = SpreadJob(
            number=number,
            task=job.task,
            given=replace(given, known=partial(_known, known[asked.threads])),
            resources=asked,
            ends_the_run=job.asked is None,
        )
    plans = [job.hashes for job, _, _ in work]
    for found, index, record in spread(list(jobs.values()), subject, executor):
        yield (found.number, index, plans[found.number].index(record.plan_hash)), record
    for number, (job, steps, given) in enumerate(work):
        why = jobs[number].why if number in jobs else job.why
        for record in _records_of_rest(job, given, steps, why):
            yield (number, math.inf, plans[number].index(record.plan_hash)), record


class _Steps:
    """Tells the steps of a job, and those that it promised and had no use for: a plan failed, or a text was short."""

    def __init__(self, advance: Callable[[str], None], job: TaskJob):
        self._advance, self._job, self._told = advance, job, 0

    def __call__(self, label: str) -> None:
        self._told += 1
        self._advance(label)

    def finish(self) -> None:
        """Tell what is left of the steps."""
        for _ in range(self._job.units - self._told):
            self._advance(self._job.kind)


def _file(out: Path | None, run: str) -> Path | None:
    if out is None:
        return None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvtailorError(f"asked to write records to {out}, which cannot be a folder: {error}") from error
    return out / f"records-{run}.jsonl"
