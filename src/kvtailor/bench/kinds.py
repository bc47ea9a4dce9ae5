"""The kinds of task that there are, and what is wrong with settings and measures that a suite asks of them."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvtailor.bench import tasks
from kvtailor.bench.tasks.contract import AllAtOnce, PlanByPlan, Task
from kvtailor.bench.tasks.settings import Metric, Option, Shown, value_faults
from kvtailor.errors import KvtailorError, UnknownName, suggest

__all__ = [
    "FIELDS",
    "GENERATED",
    "KINDS",
    "SHARES",
    "TEXTS",
    "found_kinds",
    "is_path",
    "measure_faults",
    "metric_of",
    "setting_faults",
]

_FORMS = (PlanByPlan, AllAtOnce)


def found_kinds() -> dict[str, type[Task]]:
    """Return the tasks whose files lie in the folders of `bench.tasks`, in the order that they declare.

    Raises:
        KvtailorError: a file cannot be imported, or a declaration cannot be what it is.
    """
    files = sorted(path for folder in tasks.__path__ for path in Path(folder).glob("*.py"))
    found = {path.stem: task for path in files if (task := _task_of(path)) is not None}
    options: dict[str, tuple[str, Option]] = {}
    for name, task in found.items():
        for option in (each.option for each in task.declared() if each.option is not None):
            other, same = options.setdefault(option.flag, (name, option))
            if same != option:
                raise KvtailorError(
                    f"the tasks {other!r} and {name!r} declare the option {option.flag} differently: name one "
                    "`Option` in bench/tasks/settings.py, refer to it in both, and annotate both settings alike"
                )
    return dict(sorted(found.items(), key=lambda each: (each[1].order, each[0])))


def _task_of(path: Path) -> type[Task] | None:
    """The task that a file declares; None for a file without one."""
    try:
        module = importlib.import_module(f"{tasks.__name__}.{path.stem}")
    except Exception as error:
        raise KvtailorError(
            f"the task file {path} cannot be imported ({type(error).__name__}: {error}): mend it, or move it out of "
            "the folder"
        ) from error
    made = [
        each
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, _FORMS) and each not in _FORMS
        if each.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not made:
        return None
    if len(made) > 1:
        names = " and ".join(each.__name__ for each in made)
        raise KvtailorError(f"{path} holds the tasks {names}: one task is one file, give each its own")
    [task] = made
    if wrong := _faults_of(task, path.stem):
        raise KvtailorError(f"{path}: {'; '.join(wrong)}")
    return task


def _faults_of(task: type[Task], stem: str) -> list[str]:
    """What is wrong with the class variables of a task: they would be misread without a word."""
    own = vars(task)
    wrong = []
    if own.get("name") != stem:
        wrong.append(f"the task is named {own.get('name')!r}, but its file {stem!r}: give both one name")
    if not dataclasses.is_dataclass(task):
        return [*wrong, f"{task.__name__} is no dataclass: write @dataclass(frozen=True, kw_only=True) above it"]
    fields = {each.name for each in dataclasses.fields(task)}
    wrong += [f"{name} is a field, and must be a ClassVar" for name in sorted(fields & set(Task.__annotations__))]
    wrong += [
        f"{name} is {own[name]!r}, not of the type {type(default).__name__}"
        for name, default in vars(Task).items()
        if name in Task.__annotations__ and name in own and type(own[name]) is not type(default)
        if not (name == "metrics" and own[name] is None) and not isinstance(own[name], Shown)
    ]
    known = {**Task.__annotations__, **AllAtOnce.__annotations__}
    for name in own.get("__annotations__", {}):
        # A class variable of its own is free, but not one that is taken for another.
        if name not in {*known, *fields} and (near := get_close_matches(name, known, 1, 0.85)):
            wrong.append(f"no task declares {name}; did you mean {near[0]!r}?")
    twice = sorted(name for name, count in Counter(each.name for each in task.metrics or ()).items() if count > 1)
    return wrong + [f"the metric {name!r} is declared twice" for name in twice]


GENERATED = "generated"
TEXTS = ("wikitext2", "c4", "pg19", GENERATED)
FIELDS = (
    "tokens_held",
    "tokens_read",
    "tokens_seen",
    "bytes_held",
    "bytes_full",
    "bytes_resident",
    "bytes_peak",
    "bytes_peak_decode",
    "weight_bytes",
    "floor_seconds",
    "samples",
)
"""Fields of a record that a column may show."""
SHARES = ("kept", "reduction", "compression")
"""Computed from `bytes_held` and `bytes_full`: held/full, 1 - held/full, full/held."""
KINDS: dict[str, type[Task]] = found_kinds()
"""Tasks by the name that their records bear."""


def metric_of(task: str, name: str) -> Metric | None:
    """Return what a task declares of a metric; None for a metric or a task that no file declares.

    Args:
        task: of a record.
        name: in `Record.metrics`, with or without the number of a layer.
    """
    stem = name.rstrip("0123456789").removesuffix("_")
    declared = {metric.name: metric for metric in KINDS[task].metrics or ()} if task in KINDS else {}
    return declared.get(name) or declared.get(stem)


def setting_faults(
    name: str, settings: Mapping[str, object], subject: str = "", positions: int | None = None
) -> list[str]:
    """Return what is wrong with the settings of a task, whole sentences.

    Args:
        name: one of `KINDS`.
        settings: as a suite writes them.
        subject: name of the model, for the sentence about its positions.
        positions: most tokens of the model; None: any number.
    """
    if name not in KINDS:
        return [str(UnknownName("task", name, KINDS))]
    task = KINDS[name]
    known = {each.name: each for each in task.declared()}
    names = (*(("text",) if task.reads_text else ()), *known)
    faults = [f"{name} has no setting {each!r}{suggest(each, names)}" for each in settings if each not in names]
    faults += [
        f"{name} needs the setting {each.name!r}: give it"
        for each in known.values()
        if each.default is MISSING and each.name not in settings
    ]
    text = settings.get("text", GENERATED)
    if not isinstance(text, str) or not (text in TEXTS or is_path(text)):
        faults.append(f"text is {text!r}, which is neither a path nor a text that is known{suggest(str(text), TEXTS)}")
    given = {each: value for each, value in settings.items() if each in known}
    if wrong := list(value_faults(task, given)):
        return faults + wrong
    try:
        extra = task.generated(settings)
    except UnknownName as error:
        return [*faults, str(error)]
    sizes = {each: _largest(given.get(each, known[each].default)) for each in task.sizes()}
    sizes = {each: size for each, size in sizes.items() if size}
    total = sum(sizes.values()) + extra
    if sizes and positions is not None and total > positions and settings.get("beyond") is not True:
        asked = " + ".join(f"{each}={size}" for each, size in sizes.items())
        more = f" and {extra} more to generate" if extra else ""
        faults.append(
            f"asked for {name} with {asked}{more}, {total} tokens, but {subject} has {positions} positions: give a "
            f"smaller {' or '.join(sizes)}"
        )
    return faults


def measure_faults(name: str, measure: str) -> list[str]:
    """Return what is wrong with a measure that a column asks of a kind of task, whole sentences."""
    task = KINDS[name]
    head, _, tail = measure.partition(".")
    if not tail:
        known = (*FIELDS, *SHARES)
        return [] if measure in known else [f"there is no measure {measure!r}{suggest(measure, known)}"]
    of_samples = dict.fromkeys(("mean", "geometric", "paired"), task.values)
    metrics = None if task.metrics is None else tuple(metric.name for metric in task.metrics)
    groups = {"metrics": metrics, "timings": task.timings, **of_samples}
    if head not in groups:
        return [f"there is no measure {measure!r}: begin with one of {', '.join(groups)}"]
    found = groups[head]
    if found is None or tail in found:
        return []
    return [f"{name} has no measure {measure!r}{suggest(measure, [f'{head}.{each}' for each in found])}"]


def is_path(text: str) -> bool:
    """Return whether the setting `text` names a file and no corpus."""
    return bool(Path(text).suffix) or len(Path(text).parts) > 1


def _largest(value: Any) -> int:
    """The largest of some counts; 0 where there is none."""
    each = value if isinstance(value, list | tuple) else [value]
    return max((count for count in each if isinstance(count, int)), default=0)
