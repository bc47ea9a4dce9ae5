"""One cell of a run in a worker process: the model and the samples stay from one cell to the next.

A cell is one sample of a task for some plans. A worker makes the samples itself, from the task that the run shares, and
the tokens are compared with those of the run by their hash: what a sample holds need not travel.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch

from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.loop import Calibrations, Given, memory_suffices, records_of_sample
from kvtailor.bench.measure import machine
from kvtailor.bench.measure.kept_prompts import NOT_SHARED, TIMED, KeptPrompts
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Task
from kvtailor.errors import KvtailorError

__all__ = [
    "Refused",
    "Undone",
    "CellRequest",
    "ModelThere",
    "SharedJob",
    "Traits",
    "describe_samples",
    "machine_here",
    "score_cell",
]

_SAMPLES_KEPT = 4
_JOBS_KEPT = 2


class Traits(NamedTuple):
    """What a model must be like wherever it is loaded; of the device the type."""

    fingerprint: str | None
    dtype: str
    cache_dtype: str
    device: str

    @classmethod
    def of(cls, subject: Subject) -> Traits:
        """Return those of a model."""
        own, held = (str(each).removeprefix("torch.") for each in (subject.dtype, subject.cache_dtype))
        return cls(subject.fingerprint(), own, held, subject.device.type)

    def __str__(self) -> str:
        caches = "" if self.cache_dtype == self.dtype else f" with caches in {self.cache_dtype}"
        return f"fingerprint {self.fingerprint}, {self.dtype}{caches} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class ModelThere:
    """The model of a run, for a worker.

    Attributes:
        name: what the run calls it.
        make: loads it.
        traits: what it must be like where it was loaded.
        folder: of the run, in which relative paths of models, data and calibrations are looked for, if it is there.
        versions: of Python, torch, transformers and kvtailor, which must be the run's.
        share: a worker keeps prompts beside the model from one cell to the next, see `bench.measure.kept_prompts`.
    """

    name: str
    make: Callable[[], Subject]
    traits: Traits
    folder: str
    versions: Mapping[str, str | None]
    share: bool

    @classmethod
    def of(cls, subject: Subject) -> ModelThere:
        """Return what a worker needs to have the same model.

        Raises:
            KvtailorError: another process cannot load it.
        """
        if subject.elsewhere is None:
            raise KvtailorError(f"asked to measure {subject.name!r} on a cluster, but no other process can load it")
        return cls(
            name=subject.name,
            make=subject.elsewhere,
            traits=Traits.of(subject),
            folder=os.getcwd(),
            versions=machine.versions(),
            share=not isinstance(subject.kept, KeptPrompts) or subject.kept.off is None,
        )

    def differences(self, here: Mapping[str, object]) -> str:
        """Return which versions of a machine are not the run's, in words; empty where all are."""
        return ", ".join(
            f"{name} {here[name]} and not {each}" for name, each in self.versions.items() if here[name] != each
        )


@dataclass(frozen=True, kw_only=True)
class SharedJob:
    """What all cells of a job have in common; it travels once to each machine. No other job has its `name`."""

    name: str
    task: Task
    contestants: tuple[Contestant, ...]
    model: ModelThere


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """One sample of a job for some plans.

    Attributes:
        index: which sample of the task.
        sample: as the worker made it that described the job's samples, without what scoring needs.
        blanks: by plan hash, the plans that are asked for: records with all that depends on neither sample nor machine.
        recalled: by plan hash, values of plans whose records are known, for `PlanByPlan.recall`.
    """

    index: int
    sample: Sample
    blanks: Mapping[str, Record]
    recalled: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)


class Refused(KvtailorError):
    """The worker's machine cannot take part in this run."""


class Undone(KvtailorError):
    """The task cannot be done at all."""


@dataclass
class _Samples:
    """The samples of one job, made in their order; the latest few are kept."""

    job: SharedJob
    subject: Subject
    made: int = 0
    kept: OrderedDict[int, Sample] = field(default_factory=OrderedDict)
    calibrations: Calibrations = field(default_factory=Calibrations)
    source: Iterator[Sample] | None = None

    def at(self, index: int) -> Sample:
        """Return a sample; one that was given up is made again with all before it."""
        if self.source is None or (index < self.made and index not in self.kept):
            self.source, self.made = iter(self.job.task.samples(self.subject, self.job.contestants)), 0
            self.kept.clear()
        while index not in self.kept:
            sample = next(self.source, None)
            if sample is None:
                raise Refused(f"asked for sample {index} of {self.job.task.name}, which has {self.made} here")
            self.kept[self.made] = sample
            self.made += 1
            if len(self.kept) > _SAMPLES_KEPT:
                self.kept.popitem(last=False)
        return self.kept[index]


_MODELS: dict[tuple[object, ...], Subject] = {}
_JOBS: OrderedDict[str, _Samples] = OrderedDict()


def describe_samples(job: SharedJob) -> tuple[list[Sample], KvtailorError | None]:
    """Return the samples of a job without what scoring needs; runs in a worker: making them, mostly tokens, is dear.

    Returns:
        The samples, and what went wrong with the one behind them: a `Fraud`, `Refused` or `Undone`.
    """
    found: list[Sample] = []
    try:
        subject = _subject(job.model)
        with memory_suffices(job.task.name):
            for sample in job.task.samples(subject, job.contestants):
                found.append(replace(sample, data=None, scored=None, whole=None))
    except (KvtailorError, ImportError) as error:
        return found, _told(error)
    return found, None


def score_cell(job: SharedJob, cell: CellRequest) -> tuple[list[Record], KvtailorError | None]:
    """Return the records of a cell, one with an error for a plan that failed; else what `describe_samples` may.

    Runs in a worker, and may be run again after it was begun.
    """
    try:
        return list(_records(_samples_of(job), cell)), None
    except (KvtailorError, ImportError) as error:
        return [], _told(error)
    except BaseException:
        # Whatever it was, what samples share may be half made: the next attempt makes them anew.
        _JOBS.pop(job.name, None)
        raise


@cache
def machine_here(device: str, dtype: str, bandwidth: bool, threads: int | None) -> dict[str, object]:
    """Return what is known of this machine; once for each number of threads, since a bandwidth takes a second.

    Args:
        device, dtype: of the model.
        bandwidth: see `bench.measure.machine.describe`.
        threads: in which torch computes now; None: no matter.
    """
    return machine.describe(bandwidth=bandwidth, device=torch.device(device), dtype=getattr(torch, dtype))


def _records(samples: _Samples, cell: CellRequest) -> Iterator[Record]:
    job, subject = samples.job, samples.subject
    task, sample, first = job.task, samples.at(cell.index), cell.sample
    # What a task that weighs writes into its point may be this machine's own.
    same_point = task.exclusive or dict(sample.point) == dict(first.point)
    if sample.text_hash != first.text_hash or not same_point:
        raise Refused(
            f"sample {cell.index} of {task.name} is {dict(sample.point)} with tokens {sample.text_hash} here, and "
            f"{dict(first.point)} with tokens {first.text_hash} where it was first made: give all machines the same "
            "data and packages"
        )
    # Floors below times are made of the machine's bandwidth and arithmetic.
    here = machine_here(str(subject.device), job.model.traits.dtype, task.exclusive, torch.get_num_threads())
    if task.exclusive and isinstance(subject.kept, KeptPrompts):
        subject.kept.forget()
        subject = replace(subject, kept=KeptPrompts(off=TIMED))
    given = Given(
        subject=subject,
        contestants=job.contestants,
        blank=lambda contestant: replace(cell.blanks[contestant.hash], machine=here),
        advance=lambda label: None,
        calibrations=samples.calibrations,
    )
    by_hash = {each.hash: each for each in (OWN, *job.contestants)}
    if isinstance(task, PlanByPlan):
        for plan, values in cell.recalled.items():
            task.recall(by_hash[plan], sample, values)
    return records_of_sample(task, sample, given, [by_hash[plan] for plan in cell.blanks], {})


def _told(error: KvtailorError | ImportError) -> KvtailorError:
    """The error as one that can be pickled."""
    return error if isinstance(error, Fraud | Refused) else Undone(str(error))


def _samples_of(job: SharedJob) -> _Samples:
    """Those that this process has, whose task and plans it goes on with, or new ones."""
    if job.name not in _JOBS:
        _JOBS[job.name] = _Samples(job, _subject(job.model))
        if len(_JOBS) > _JOBS_KEPT:
            _JOBS.popitem(last=False)
    _JOBS.move_to_end(job.name)
    return _JOBS[job.name]


def _subject(model: ModelThere) -> Subject:
    """The model, loaded once; another one takes its place.

    Raises:
        Refused: it is another one here, or cannot be loaded.
    """
    key = (model.name, *model.traits, model.share)
    if key not in _MODELS:
        _JOBS.clear()
        _MODELS.clear()
        if different := model.differences(machine.versions()):
            raise Refused(f"this machine has {different}: give all machines the same packages and code")
        with contextlib.suppress(OSError):
            os.chdir(model.folder)
        try:
            subject = model.make()
        except (KvtailorError, OSError) as error:
            raise Refused(f"{model.name} cannot be loaded: {error}") from error
        if (found := Traits.of(subject)) != model.traits:
            raise Refused(
                f"{model.name} is another model here: {found}, and not {model.traits}. Give all machines the same "
                "weights"
            )
        kept = KeptPrompts(lasting=True) if model.share else KeptPrompts(off=NOT_SHARED)
        _MODELS[key] = replace(subject, kept=kept)
    return _MODELS[key]
