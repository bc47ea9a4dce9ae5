"""One cell of a run in a worker process: the model and the samples stay from one cell to the next.

A cell is one sample of a task for some plans. A worker makes the samples itself, from the task that the run shares, and
the tokens are compared with those of the run by their hash: what a sample holds need not travel.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.loop import Calibrations, Given, records_of_sample
from kvtailor.bench.measure import machine
from kvtailor.bench.measure.kept_prompts import NOT_SHARED, TIMED, KeptPrompts
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Task
from kvtailor.cluster.contract import Shared
from kvtailor.errors import KvtailorError

__all__ = [
    "CellRequest",
    "CellAnswer",
    "ModelThere",
    "SamplesAnswer",
    "SharedJob",
    "describe_samples",
    "machine_here",
    "score_cell",
]

_SAMPLES_KEPT = 4
_JOBS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class ModelThere:
    """The model of a run, for a worker.

    Attributes:
        name: what the run calls it.
        make: loads it.
        fingerprint, dtype, cache_dtype, device: what it must be like where it was loaded; of the device the type.
        folder: of the run, in which relative paths of models, data and calibrations are looked for, if it is there.
        versions: of Python, torch, transformers and kvtailor, which must be the run's.
        share: a worker keeps prompts beside the model from one cell to the next, see `bench.measure.kept_prompts`.
    """

    name: str
    make: Callable[[], Subject]
    fingerprint: str | None
    dtype: str
    cache_dtype: str
    device: str
    folder: str
    versions: Mapping[str, str | None]
    share: bool = True

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
            fingerprint=subject.fingerprint(),
            dtype=str(subject.dtype).removeprefix("torch."),
            cache_dtype=str(subject.cache_dtype).removeprefix("torch."),
            device=subject.device.type,
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
    """What all cells of a job have in common; it travels once."""

    task: Task
    contestants: tuple[Contestant, ...]
    model: ModelThere


@dataclass(frozen=True, kw_only=True)
class CellRequest:
    """One cell.

    Attributes:
        job: a `SharedJob`.
        index: which sample of the task.
        text_hash: of the tokens of that sample, as the worker made them that described it.
        point: of that sample, as that worker made it.
        blanks: by plan hash, the plans that are asked for: records with all that depends on neither sample nor machine.
        recalled: by plan hash, values of plans whose records are known, for `PlanByPlan.recall`.
    """

    job: Shared
    index: int
    text_hash: str | None
    point: Mapping[str, object]
    blanks: Mapping[str, Record]
    recalled: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CellAnswer:
    """What a worker found.

    Attributes:
        records: those of the plans that were asked for; one whose plan failed has an error.
        fraud: name and sentence of a sanity check that failed.
        undone: why the task cannot be done at all.
        refused: why this machine cannot take part in this run.
    """

    records: tuple[Record, ...] = ()
    fraud: tuple[str, str] | None = None
    undone: str | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class SamplesAnswer:
    """The samples of a job, without what scoring them needs.

    Attributes:
        samples: all, or those before the one that could not be made.
        fraud, undone, refused: see `CellAnswer`.
    """

    samples: tuple[Sample, ...] = ()
    fraud: tuple[str, str] | None = None
    undone: str | None = None
    refused: str | None = None


class _Refused(KvtailorError):
    """This machine cannot take part in this run."""


@dataclass
class _Samples:
    """The samples of one job, made in their order; the latest few are kept."""

    job: SharedJob
    subject: Subject
    made: int = 0
    kept: OrderedDict[int, Sample] = field(default_factory=OrderedDict)
    source: Iterator[Sample] | None = None

    def at(self, index: int) -> Sample:
        """Return a sample; one that was given up is made again with all before it."""
        if index not in self.kept and index < self.made:
            self.close()
        if self.source is None:
            self.source = iter(self.job.task.samples(self.subject, self.job.contestants))
        while index not in self.kept:
            sample = next(self.source, None)
            if sample is None:
                raise _Refused(f"asked for sample {index} of {self.job.task.name}, which has {self.made} here")
            self.kept[self.made] = sample
            self.made += 1
            if len(self.kept) > _SAMPLES_KEPT:
                self.kept.popitem(last=False)
        return self.kept[index]

    def close(self) -> None:
        """End what makes samples: it may hold files or a state of randomness."""
        close = getattr(self.source, "close", None)
        if close is not None:
            close()
        self.source, self.made = None, 0
        self.kept.clear()


_MODELS: dict[tuple[object, ...], Subject] = {}
_JOBS: OrderedDict[str, _Samples] = OrderedDict()


def describe_samples(shared: Shared) -> SamplesAnswer:
    """Return the samples of a job, so that what they cost, mostly tokens, is not the driver's; runs in a worker.

    Each is compared with what the plans were calibrated on.

    Args:
        shared: a `SharedJob`.
    """
    found: list[Sample] = []
    try:
        job: SharedJob = shared.get()
        calibrations = Calibrations()
        for sample in job.task.samples(_subject(job.model), job.contestants):
            calibrations.check(job.contestants, sample)
            found.append(replace(sample, data=None, scored=None, whole=None))
    except Fraud as error:
        return SamplesAnswer(fraud=_told(error))
    except _Refused as error:
        return SamplesAnswer(refused=str(error))
    except (KvtailorError, ImportError) as error:
        return SamplesAnswer(samples=tuple(found), undone=str(error))
    return SamplesAnswer(samples=tuple(found))


def score_cell(asked: CellRequest, bandwidth: bool) -> CellAnswer:
    """Return the records of a cell; runs in a worker, and may be run again after it was begun.

    Args:
        asked: the cell.
        bandwidth: measure the machine's bandwidth and arithmetic before the first cell, as a cell that times needs.
    """
    try:
        return CellAnswer(records=tuple(_records(asked, bandwidth)))
    except Fraud as error:
        return CellAnswer(fraud=_told(error))
    except _Refused as error:
        return CellAnswer(refused=str(error))
    except (KvtailorError, ImportError) as error:
        return CellAnswer(undone=str(error))
    except BaseException:
        # Whatever it was, what samples share may be half made: the next attempt makes them anew.
        _forget(asked.job.name)
        raise


def machine_here(device: str, dtype: str, bandwidth: bool = False) -> dict[str, object]:
    """Return what is known of this machine, see `bench.measure.machine.describe`."""
    return machine.describe(bandwidth=bandwidth, device=torch.device(device), dtype=getattr(torch, dtype))


def _records(asked: CellRequest, bandwidth: bool) -> Iterator[Record]:
    samples = _samples_of(asked.job)
    job, subject = samples.job, samples.subject
    sample = samples.at(asked.index)
    # What a task that weighs writes into its point may be this machine's own.
    same = sample.text_hash == asked.text_hash and (job.task.exclusive or dict(sample.point) == dict(asked.point))
    if not same:
        raise _Refused(
            f"sample {asked.index} of {job.task.name} is {dict(sample.point)} with tokens {sample.text_hash} here, and "
            f"{dict(asked.point)} with tokens {asked.text_hash} where it was first made: give all machines the same "
            "data and packages"
        )
    here = _machine(str(subject.device), job.model.dtype, bandwidth, torch.get_num_threads())
    if job.task.exclusive and isinstance(subject.kept, KeptPrompts):
        subject.kept.forget()
        subject = replace(subject, kept=KeptPrompts(off=TIMED))
    given = Given(
        subject=subject,
        contestants=job.contestants,
        blank=lambda contestant: replace(asked.blanks[contestant.hash], machine=here),
        advance=lambda label: None,
    )
    by_hash = {each.hash: each for each in (OWN, *job.contestants)}
    if isinstance(job.task, PlanByPlan):
        for plan, values in asked.recalled.items():
            job.task.recall(by_hash[plan], sample, values)
    return records_of_sample(job.task, sample, given, [by_hash[plan] for plan in asked.blanks], {})


@cache
def _machine(device: str, dtype: str, bandwidth: bool, threads: int) -> dict[str, object]:
    """Once for each process and number of threads: what is measured here takes a second."""
    return machine_here(device, dtype, bandwidth)


def _samples_of(shared: Shared) -> _Samples:
    if shared.name not in _JOBS:
        job: SharedJob = shared.get()
        _JOBS[shared.name] = _Samples(job, _subject(job.model))
        while len(_JOBS) > _JOBS_KEPT:
            _forget(next(iter(_JOBS)))
    _JOBS.move_to_end(shared.name)
    return _JOBS[shared.name]


def _told(fraud: Fraud) -> tuple[str, str]:
    """The name and the sentence of a sanity check that failed."""
    return fraud.name, str(fraud).removeprefix(f"{fraud.name}: ")


def _forget(name: str) -> None:
    if name in _JOBS:
        _JOBS.pop(name).close()


@atexit.register
def _forget_all() -> None:
    """What makes samples may hold files, which are to go with the process."""
    for name in list(_JOBS):
        _forget(name)


def _subject(model: ModelThere) -> Subject:
    """The model, loaded once; another one takes its place.

    Raises:
        _Refused: it is another one here, or cannot be loaded.
    """
    key = (model.name, model.fingerprint, model.dtype, model.cache_dtype, model.device, model.share)
    if key not in _MODELS:
        _forget_all()
        _MODELS.clear()
        if different := model.differences(machine.versions()):
            raise _Refused(f"this machine has {different}: give all machines the same packages and code")
        with contextlib.suppress(OSError):
            os.chdir(model.folder)
        try:
            subject = model.make()
        except (KvtailorError, OSError) as error:
            raise _Refused(f"{model.name} cannot be loaded: {error}") from error
        own, held = (str(each).removeprefix("torch.") for each in (subject.dtype, subject.cache_dtype))
        found = (subject.fingerprint(), own, held, subject.device.type)
        wanted = (model.fingerprint, model.dtype, model.cache_dtype, model.device)
        if found != wanted:
            raise _Refused(
                f"{model.name} is another model here: {_said(*found)}, and not {_said(*wanted)}. Give all machines the "
                "same weights"
            )
        kept = KeptPrompts(lasting=True) if model.share else KeptPrompts(off=NOT_SHARED)
        _MODELS[key] = replace(subject, kept=kept)
    return _MODELS[key]


def _said(fingerprint: str | None, dtype: str, cache_dtype: str, device: str) -> str:
    caches = "" if cache_dtype == dtype else f" with caches in {cache_dtype}"
    return f"fingerprint {fingerprint}, {dtype}{caches} on {device}"
