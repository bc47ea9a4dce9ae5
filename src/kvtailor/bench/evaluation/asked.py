"""What tasks are asked for by the words of `kvtailor bench`: their names, and the values of the options they declare.

`kvtailor bench` and `kvtailor.evaluate` have one vocabulary. It is what the tasks' files declare (`bench.kinds`), and
nothing heavy is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.tasks.settings import CONTEXT, CONTINUATION, NEW_TOKENS, Option
from kvtailor.errors import ArgumentError
from kvtailor.ops.sizes import bytes_of

if TYPE_CHECKING:
    from kvtailor.bench.subject import Subject
    from kvtailor.bench.tasks.contract import Task

__all__ = [
    "OPTIONS",
    "SERVES",
    "SETS",
    "TASKS",
    "USUAL",
    "TaskRequest",
    "parted_tasks",
    "settings_of",
    "sizes",
    "value_of",
]

TASKS = tuple(name for name, kind in KINDS.items() if not kind.sets)
USUAL = tuple(name for name, kind in KINDS.items() if kind.usual)
SETS = {each: name for name, kind in KINDS.items() for each in kind.sets}
"""Sets of tasks, asked for as SET:NAME, and the kind of task that measures them."""
ANSWER_TOKENS = 32
_NUMBERS = {int: "a whole number", float: "a number", str: "a text"}

TaskRequest = tuple[str, Mapping[str, object]]


def _options() -> dict[str, Option]:
    found = [each.option for kind in KINDS.values() for each in kind.declared() if each.option is not None]
    return {option.name: option for option in found}


def _served() -> dict[str, tuple[str, ...]]:
    """An option whose value stands for another one that is not given is about every task, and has no entry."""
    general = {option.like.name for option in OPTIONS.values() if option.like is not None}
    found: dict[str, list[str]] = {name: [] for name in OPTIONS if name not in general}
    for kind in KINDS.values():
        for each in kind.declared():
            if each.option is not None and each.option.name in found:
                found[each.option.name] += kind.asked_as()
    return {name: tuple(dict.fromkeys(tasks)) for name, tasks in found.items()}


OPTIONS = _options()
"""The options that tasks declare, by the name of their value, in the order of the tasks."""
SERVES = _served()
"""Tasks that an option is about; one that is about none of those asked would pass in silence."""


def parted_tasks(words: Sequence[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Return the tasks that words name, each with what stands behind its ':', and the words that name none."""
    found: list[tuple[str, str | None]] = []
    unknown = []
    for part in filter(None, (each.strip() for each in words)):
        name, colon, which = (each.strip() for each in part.partition(":"))
        known = name in SETS and which if colon else name in TASKS
        if known:
            found.append((name, which or None))
        else:
            unknown.append(part)
    return found, unknown


def value_of(option: Option, given: Any) -> Any:
    """Return the value of an option as `settings_of` takes it: a number, several, or the text that one would type.

    Raises:
        ArgumentError: what must be given.
    """
    if given is None:
        return None
    if option.type is bool:
        if not isinstance(given, bool):
            raise ArgumentError("give True or False")
        return given or None
    if option.unit == "bytes":
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return given
        if not isinstance(given, str):
            raise ArgumentError("give a number of bytes, or text such as 8GiB")
        return bytes_of(given)
    if not option.listed:
        return _single(option, given)
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
    found = tuple(dict.fromkeys(_single(option, part, typed=isinstance(given, str)) for part in parts))
    if not found:
        raise ArgumentError(f"give {_NUMBERS[option.type]}, or several")
    return found


def _single(option: Option, given: Any, *, typed: bool = False) -> Any:
    """One value of an option; `typed`: it is a part of a text, such as the 2 of "1,2"."""
    wanted = f"give {_NUMBERS[option.type]}"
    if typed:
        try:
            given = option.type(given.strip())
        except ValueError:
            raise ArgumentError(wanted) from None
    fits = isinstance(given, int | float) if option.type is float else isinstance(given, option.type)
    if isinstance(given, bool) or not fits:
        raise ArgumentError(wanted)
    if option.least is not None and given < option.least:
        raise ArgumentError(f"give {option.least} or more")
    if option.most is not None and given > option.most:
        raise ArgumentError(f"give {option.most} or less")
    return option.type(given)


def sizes(subject: Subject, context: int | None, continuation: int | None, new_tokens: int) -> tuple[int, int]:
    """Return context and continuation, as asked or as the model's positions allow."""
    positions = subject.positions
    if context is None:
        context = (
            512 if positions is None else max(16, min(512, positions - max(new_tokens, ANSWER_TOKENS, positions // 5)))
        )
    if continuation is None:
        continuation = max(1, context // 4)
        if positions is not None:
            continuation = max(1, min(continuation, positions - context))
    return context, continuation


def settings_of(
    tasks: Sequence[tuple[str, str | None]], values: Mapping[str, Any], texts: Sequence[str], subject: Subject
) -> Iterator[TaskRequest]:
    """Yield kind and settings of every task, in the order asked.

    Args:
        tasks: from `parted_tasks`.
        values: of every option that tasks declare, by name; None where neither it nor a default is given.
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
            yield kind.name, {**fixed, **dict(zip(axes, point, strict=True))}


def _set(kind: type[Task], values: Mapping[str, Any]) -> Iterator[tuple[str, bool, Any]]:
    """The settings of a task for which an option has a value: name, whether each of the values is a task, value."""
    for declared in kind.declared():
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
