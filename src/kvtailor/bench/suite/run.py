"""Runs a suite: every task once, for the plans of the cells that show it, in one run of the bench."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtailor.bench.build import SettingsError, make_task
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.kinds import KINDS, setting_faults
from kvtailor.bench.loop import sides_of
from kvtailor.bench.resources import CellResources
from kvtailor.bench.runner import TaskJob, plan_run, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.cells import TaskSettings
from kvtailor.bench.suite.suite import Suite, SuiteError
from kvtailor.bench.tasks.contract import Task
from kvtailor.errors import KvtailorError, suggest
from kvtailor.hf.model.config import config_of
from kvtailor.presets import FULL

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A suite that can start.

    Attributes:
        suite: the suite.
        subject: the model.
        jobs: its tasks, each for the plans of the cells that show it.
        contestants: all plans that this kvtailor has.
        unavailable: tasks and plans that cannot be done here, each a sentence; their records have the reason, and the
            others go on.
    """

    suite: Suite
    subject: Subject
    jobs: tuple[TaskJob, ...]
    contestants: tuple[Contestant, ...]
    unavailable: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """The plans that this kvtailor does not have, as the suite writes them."""
        return tuple(dict.fromkeys(each.label for job in self.jobs for each in job.absent if each.missing))

    @property
    def size(self) -> tuple[int, int]:
        """How many records come, and how often `advance` is going to be called at most."""
        return plan_run(self.jobs)

    def failed(self, records: Sequence[Record]) -> list[Record]:
        """Return those that have an error, though their task and their plan were to be had.

        The model's own cache is among them where a task measures it too.
        """
        there = {
            (job.asked, each.hash)
            for job in self.jobs
            if job.task is not None
            for each in sides_of(job.task, job.there)
        }
        return [each for each in records if each.error is not None and (each.asked, each.plan_hash) in there]

    def run(self, **options: Any) -> list[Record]:
        """The records; `options` are those of `runner.run`, which raises the same errors.

        What `resources` says goes before the suite's own.
        """
        resources = (options.pop("resources", None) or CellResources()).over(self.suite.resources)
        return run(self.subject, self.contestants, self.jobs, resources=resources, **options)


def prepare(suite: Suite, subject: Subject, *, data: Path | None = None, only: Sequence[str] = ()) -> Prepared:
    """Makes the tasks of a suite's tables, each once, and checks that the model can take them.

    Args:
        suite: from `read_suite`.
        subject: the model.
        data: see `make_task`.
        only: names of the tables wanted; none: all.

    Raises:
        SuiteError: a table is not there (before any text has been read), a setting makes no sense, or not one task has
            room in the model's positions; with all faults at once.
    """
    faults: list[str] = []
    wanted = _plans_of(suite, subject.name, only, faults)
    too_long: dict[TaskSettings, str] = {}
    for asked in wanted:
        if asked.kind in KINDS:
            faults += (wrong := setting_faults(asked.kind, dict(asked.settings)))
            within = setting_faults(asked.kind, dict(asked.settings), subject.name, subject.positions)
            if len(within) > len(wrong):
                too_long[asked] = f"{within[-1]}, by --set NAME=VALUE"
    if wanted and len(too_long) == len(wanted):
        faults += too_long.values()
    if faults:
        raise SuiteError(suite.name, list(dict.fromkeys(faults)))
    contestants = {
        plan: _fitting(suite.contestant(plan), subject)
        for plan in dict.fromkeys([FULL, *itertools.chain(*wanted.values())])
    }
    jobs = []
    unavailable = [f"{each.label}: {each.unfit}" for each in contestants.values() if each.unfit is not None]
    for asked, plans in wanted.items():
        found = _each_once(contestants[plan] for plan in [FULL, *plans])
        try:
            task, why = (None, too_long[asked]) if asked in too_long else _made(asked, subject, data)
        except SettingsError as error:
            faults += [f"{asked}: {fault}" for fault in error.faults]
            continue
        if why is not None:
            unavailable.append(f"{asked}: {why}")
        jobs.append(TaskJob(kind=asked.kind, task=task, contestants=found, why=why, asked=str(asked)))
    if faults:
        raise SuiteError(suite.name, list(dict.fromkeys(faults)))
    return Prepared(
        suite=suite,
        subject=subject,
        jobs=tuple(jobs),
        contestants=_each_once(each for job in jobs for each in job.there),
        unavailable=tuple(unavailable),
    )


def _plans_of(suite: Suite, model: str, only: Sequence[str], faults: list[str]) -> dict[TaskSettings, list[str]]:
    """The tasks of the wanted tables with the plans of the cells that show them, each once."""
    tables = suite.tables_for(model)
    names = [table.name for table in tables]
    faults += [f"there is no table {name!r}{suggest(name, names)}" for name in only if name not in names]
    found: dict[TaskSettings, list[str]] = {}
    for cell in (c for t in tables if not only or t.name in only for row in t.rows for c in row.cells):
        for asked in cell.tasks:
            plans = found.setdefault(asked, [])
            plans += [plan for plan in (cell.plan, cell.against) if plan is not None and plan not in plans]
    return found


def _fitting(contestant: Contestant, subject: Subject) -> Contestant:
    """The contestant, `unfit` where an empty cache of it says that this model cannot have it."""
    if not _is_loaded(subject) or contestant.missing or contestant.plan is None or subject.make_cache is not None:
        return contestant
    try:
        subject.new_cache(contestant)
    except KvtailorError as error:
        return replace(contestant, unfit=str(error))
    return contestant


def _is_loaded(subject: Subject) -> bool:
    """Whether there is a model with its weights, and not only the shapes of one."""
    model = subject.model
    return hasattr(model, "parameters") and all(each.device.type != "meta" for each in model.parameters())


def _each_once(contestants: Iterable[Contestant]) -> tuple[Contestant, ...]:
    """Those that are the same plan once, as it is written first."""
    found: dict[str, Contestant] = {}
    for each in contestants:
        found.setdefault(each.hash, each)
    return tuple(found.values())


def _made(asked: TaskSettings, subject: Subject, data: Path | None) -> tuple[Task | None, str | None]:
    """The task, or why there is none."""
    if asked.kind not in KINDS:
        return None, f"This kvtailor does not have the task {asked.kind!r}."
    try:
        task = make_task(asked.kind, dict(asked.settings), subject, data=data)
        task.units(1)  # a task that reads its data late fails here where there is none
    except SettingsError:
        raise
    except KvtailorError as error:
        return None, str(error)
    why = _draft_misfit(getattr(task, "draft", None), subject)
    return (task, None) if why is None else (None, why)


def _draft_misfit(draft: object, subject: Subject) -> str | None:
    """Return why a draft model cannot draft for this one, as its configuration tells; None where it can."""
    if not isinstance(draft, str) or not _is_loaded(subject):
        return None
    try:
        theirs = config_of(draft).get_text_config(decoder=True).vocab_size
    except KvtailorError as error:
        return f"{error}. --set draft=NAME names another draft model"
    config: Any = getattr(subject.model, "config", None)
    ours = config.get_text_config(decoder=True).vocab_size if hasattr(config, "get_text_config") else theirs
    if ours == theirs:
        return None
    return (
        f"the draft model {draft} has {theirs} tokens in its vocabulary and {subject.name} has {ours}: --set "
        "draft=NAME names one with the same tokenizer"
    )
