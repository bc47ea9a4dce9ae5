"""From the options of `kvtailor bench` to the tasks that they ask for, as `bench.build` takes them.

Which options there are, which task each is about and what it sets, the tasks' files declare (`bench.kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kvtailor.bench.evaluation.asked import (
    OPTIONS,
    SERVES,
    SETS,
    TASKS,
    USUAL,
    TaskRequest,
    parted_tasks,
    settings_of,
    sizes,
    value_of,
)
from kvtailor.bench.kinds import KINDS
from kvtailor.bench.tasks.settings import Option
from kvtailor.errors import KvtailorError

__all__ = [
    "GROUPS",
    "OPTIONS",
    "SERVES",
    "SETS",
    "TASKS",
    "USUAL",
    "TaskRequest",
    "check_flags",
    "settings_of",
    "sizes",
    "split_tasks",
    "task_options",
    "text_name",
    "values_of",
]

_FEW = 4


def _groups() -> dict[str, tuple[str, ...]]:
    """The options that few tasks have, under the names of these tasks; those of costs under one heading."""
    found: dict[str, list[str]] = {}
    titles: dict[str, dict[str, None]] = {}
    for name, tasks in SERVES.items():
        if len(tasks) >= _FEW:
            continue
        first = KINDS[SETS.get(tasks[0], tasks[0])]
        family = "costs" if first.of_cost else tasks[0]
        found.setdefault(family, []).append(name)
        titles.setdefault(family, {}).update(dict.fromkeys(tasks))
    return {f"Of {', '.join(titles[family])}": tuple(names) for family, names in found.items()}


GROUPS = _groups()
"""Headings of `kvtailor bench --help` for what tasks declare, each with the names of its options."""


def task_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the options that tasks declare; a decorator for below `click.command`."""
    for option in reversed(OPTIONS.values()):
        command = _click_option(option)(command)
    return command


def check_flags(command: click.Command) -> None:
    """Refuse two options with one flag.

    Raises:
        KvtailorError: a task declares an option that the command has already.
    """
    for words in (
        ["-h", "--help", *(flag for each in command.params for flag in each.opts)],
        [each.name or "" for each in command.params],
    ):
        twice = sorted({word for word in words if words.count(word) > 1})
        if twice:
            raise KvtailorError(
                f"a task declares the option {', '.join(twice)}, which `kvtailor bench` has: give it another flag"
            )


def split_tasks(text: str) -> list[tuple[str, str | None]]:
    """Return the tasks of `--tasks`, each with what stands behind its ':'.

    Raises:
        click.UsageError: none, or one that is not known.
    """
    found, unknown = parted_tasks(text.split(","))
    if unknown or not found:
        raise click.UsageError(
            f"--tasks has {', '.join(unknown) or 'nothing'}: give some of {', '.join(TASKS)}, "
            f"{', '.join(f'{name}:NAME' for name in SETS)}."
        )
    return found


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every option that tasks declare, by name; None where neither it nor a default is given.

    Args:
        given: what was typed, by name.

    Raises:
        click.UsageError: one of them cannot be read.
    """
    found = {}
    for name, option in OPTIONS.items():
        try:
            found[name] = value_of(option, given[name])
        except ValueError as error:
            raise click.UsageError(f"{option.flag} is {given[name]!r}: {error}.") from error
    return found


def text_name(text: str) -> str:
    """Return a text as `bench.build` takes it: a file is told from a corpus by its path."""
    return str(Path(text).resolve()) if Path(text).exists() else text


def _click_option(option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if option.type is bool:
        return click.option(option.flag, is_flag=True, help=option.help)
    kind: Any = str if option.listed or option.unit else option.type
    if kind is int:
        bounded = option.least is not None or option.most is not None
        kind = click.IntRange(option.least, option.most) if bounded else int
    shown = option.default is not None
    return click.option(option.flag, type=kind, default=option.default, show_default=shown, help=option.help)
