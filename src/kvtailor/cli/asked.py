"""From the options of `kvtailor bench` to the tasks that they ask for, as `bench.build` takes them.

Which options there are, which task each is about and what it sets, the tasks' files declare (`bench.kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvtailor.bench.kinds import KINDS, Kind
from kvtailor.bench.tasks.settings import CONTEXT, CONTINUATION, NEW_TOKENS, Option
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from kvtailor.bench.subject import Subject

__all__ = [
    "OPTIONS",
    "SERVES",
    "SETS",
    "TASKS",
    "USUAL",
    "Asked",
    "check_flags",
    "numbers",
    "settings_of",
    "sizes",
    "split_tasks",
    "task_options",
    "text_name",
    "values_of",
]

TASKS = tuple(name for name, kind in KINDS.items() if not kind.sets)
USUAL = tuple(name for name, kind in KINDS.items() if kind.usual)
SETS = {each: name for name, kind in KINDS.items() for each in kind.sets}
"""Sets of tasks, asked for as SET:NAME, and the kind of task that measures them."""
ANSWER_TOKENS = 32

T = TypeVar("T")
Asked = tuple[str, Mapping[str, object]]


def _options() -> dict[str, Option]:
    found = [each.option for kind in KINDS.values() for each in kind.declared if each.option is not None]
    return {option.name: option for option in found}


def _served() -> dict[str, tuple[str, ...]]:
    """An option whose value stands for another one that is not given is about every task, and has no entry."""
    general = {option.like.name for option in OPTIONS.values() if option.like is not None}
    found: dict[str, list[str]] = {name: [] for name in OPTIONS if name not in general}
    for kind in KINDS.values():
        for each in kind.declared:
            if each.option is not None and each.option.name in found:
                found[each.option.name] += kind.asked_as
    return {name: tuple(dict.fromkeys(tasks)) for name, tasks in found.items()}


OPTIONS = _options()
"""The options that tasks declare, by the name of their value, in the order of the tasks."""
SERVES = _served()
"""Tasks that an option is about; one that is about none of those asked would pass in silence."""


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
    found: list[tuple[str, str | None]] = []
    unknown = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, colon, which = (each.strip() for each in part.partition(":"))
        known = name in SETS and which if colon else name in TASKS
        if known:
            found.append((name, which or None))
        else:
            unknown.append(part)
    if unknown or not found:
        raise click.UsageError(
            f"--tasks has {', '.join(unknown) or 'nothing'}: give some of {', '.join(TASKS)}, "
            f"{', '.join(f'{name}:NAME' for name in SETS)}."
        )
    return found


def numbers(text: str, kind: Callable[[str], T], option: str) -> tuple[T, ...]:
    """Return the values of an option that takes several.

    Raises:
        click.UsageError: something else stands there.
    """
    try:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        raise click.UsageError(f"{option} is {text!r}: give numbers with ',' between.")
    return found


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every option that tasks declare, by name; None where neither it nor a default is given.

    Args:
        given: what was typed, by name.

    Raises:
        click.UsageError: one of them cannot be read.
    """
    return {name: _value(option, given[name]) for name, option in OPTIONS.items()}


def sizes(subject: Subject, context: int | None, continuation: int | None, new_tokens: int) -> tuple[int, int]:
    """Return context and continuation, as asked or as the model's positions allow."""
    positions = subject.positions
    if context is None:
        context = (
            512
            if positions is None
            else max(16, min(512, positions - max(new_tokens, ANSWER_TOKENS, positions // 5)))
        )  # fmt: skip
    if continuation is None:
        continuation = max(1, context // 4)
        if positions is not None:
            continuation = max(1, min(continuation, positions - context))
    return context, continuation


def settings_of(
    tasks: Sequence[tuple[str, str | None]], values: Mapping[str, Any], texts: Sequence[str], subject: Subject
) -> Iterator[Asked]:
    """Yield kind and settings of every task, in the order asked.

    Args:
        tasks: from `split_tasks`.
        values: from `values_of`.
        texts: names of texts, at least one.
        subject: the model, for the sizes that were not given.
    """
    new_tokens = max(values.get(NEW_TOKENS.name) or (1,))
    sized = sizes(subject, values.get(CONTEXT.name), values.get(CONTINUATION.name), new_tokens)
    values = {**values, CONTEXT.name: sized[0], CONTINUATION.name: sized[1]}
    for name, which in tasks:
        kind = KINDS[SETS.get(name, name)]
        fixed: dict[str, object] = {**kind.sets.get(name, {}), **({kind.set_name: which} if which else {})}
        axes: dict[str, Sequence[object]] = {}
        if kind.reads_text:
            axes["text"] = texts if kind.of_each_text else texts[:1]
        for setting, each, value in _set(kind, values):
            if each:
                axes[setting] = value
            else:
                fixed[setting] = value
        for point in product(*axes.values()):
            yield kind.module, {**fixed, **dict(zip(axes, point, strict=True))}


def text_name(text: str) -> str:
    """Return a text as `bench.build` takes it: a file is told from a corpus by its path."""
    return str(Path(text).resolve()) if Path(text).exists() else text


def _set(kind: Kind, values: Mapping[str, Any]) -> Iterator[tuple[str, bool, Any]]:
    """The settings of a task for which an option has a value: name, whether each of the values is a task, value."""
    for declared in kind.declared:
        option, times = declared.option, declared.setting.times
        if option is None:
            continue
        value = values[option.name]
        if value is None and option.like is not None:
            value = values[option.like.name]
        if value is None:
            continue
        if option.listed and not isinstance(value, tuple):
            value = (value,)
        if times != 1:
            value = tuple(times * x for x in value) if option.listed else times * value
        several = declared.setting.each
        yield declared.name, several, value if option.listed or not several else (value,)


def _value(option: Option, given: Any) -> Any:
    if given is None or (option.type is bool and given is False):
        return None
    if option.unit == "bytes":
        from kvtailor.plan.grammar import bytes_of

        try:
            return bytes_of(given)
        except ValueError as error:
            raise click.UsageError(f"{option.flag}: {error}.") from error
    if not option.listed:
        return given
    found = numbers(given, option.type, option.flag)
    return tuple(dict.fromkeys(found)) if option.type is str else found


def _click_option(option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if option.type is bool:
        return click.option(option.flag, is_flag=True, help=option.help)
    kind: Any = str if option.listed or option.unit else option.type
    if kind is int:
        bounded = option.least is not None or option.most is not None
        kind = click.IntRange(option.least, option.most) if bounded else int
    shown = option.default is not None
    return click.option(option.flag, type=kind, default=option.default, show_default=shown, help=option.help)
