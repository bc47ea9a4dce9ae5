"""What a caller of `kvtailor.evaluate` gave, in the bench's own terms; faults are collected and told together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtailor.bench.build import SettingsError, Text
from kvtailor.bench.data.texts import named_texts
from kvtailor.bench.evaluation.asked import OPTIONS, SERVES, SETS, TASKS, parted_tasks, value_of
from kvtailor.bench.kinds import GENERATED, KINDS, TEXTS
from kvtailor.errors import suggest
from kvtailor.plan import Plan

__all__ = ["ASKED", "lines_of", "options_of", "tasks_of", "texts_of"]

ASKED = "kvtailor.evaluate"


def lines_of(plans: str | Plan | Sequence[str | Plan]) -> list[str]:
    """Return plans in one line each; a string may hold several with ';' between, as `--plans` does.

    Raises:
        SettingsError: no plan, or something that is none.
    """
    each = [plans] if isinstance(plans, str) or not isinstance(plans, Sequence) else list(plans)
    odd = [plan for plan in each if not isinstance(plan, str | Plan)]
    found = [part.strip() for plan in each for part in str(plan).split(";") if part.strip()]
    if odd or not found:
        what = f"{odd[0]!r}, of type {type(odd[0]).__name__}" if odd else "none"
        raise SettingsError(ASKED, [f'plans has {what}: give plans such as "snapkv @ keep=0.25", or `Plan` objects'])
    return found


def tasks_of(tasks: str | Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the tasks that are asked for, each with what stands behind its ':'.

    Raises:
        SettingsError: none, or one that is not known.
    """
    words = tasks.split(",") if isinstance(tasks, str) else [str(each) for each in tasks]
    found, unknown = parted_tasks(words)
    known = (*TASKS, *(f"{name}:NAME" for name in SETS))
    faults = [f"there is no task {name!r}{suggest(name, known)}" for name in unknown]
    if not found and not faults:
        faults = [f"tasks is {tasks!r}, which names none: give some of {', '.join(known)}"]
    if faults:
        raise SettingsError(ASKED, faults)
    return found


def texts_of(texts: object, tasks: Sequence[tuple[str, str | None]]) -> tuple[list[str], dict[str, Text]]:
    """Return the names of the texts, and the texts themselves of those that are no corpora.

    Args:
        texts: a text, a path, the name of a corpus, several of these, or texts by name; None: generated documents.
        tasks: from `tasks_of`.

    Raises:
        SettingsError: no task in `tasks` reads a text.
        KvtailorError: a text is empty, or a file cannot be read.
    """
    if texts is None:
        return [GENERATED], {}
    if not any(KINDS[SETS.get(name, name)].reads_text for name, _ in tasks):
        readers = ", ".join(name for name in TASKS if KINDS[name].reads_text)
        raise SettingsError(ASKED, [f"texts is for {readers}, which tasks does not ask for: leave one of them out"])
    if isinstance(texts, Mapping):
        own = named_texts(texts)
        return list(own), {name: Text(text, name, None, ()) for name, text in own.items()}
    each = [texts] if isinstance(texts, str | Path) else list(texts) if isinstance(texts, Sequence) else [texts]
    corpora = [str(text) for text in each if isinstance(text, str) and text in TEXTS]
    others = [text for text in each if not (isinstance(text, str) and text in TEXTS)]
    own = named_texts(others) if others or not corpora else {}
    return [*corpora, *own], {name: Text(text, name, None, ()) for name, text in own.items()}


def options_of(given: Mapping[str, Any], tasks: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """Return the value of every option that tasks declare, by name; None where there is none, not even a default.

    Args:
        given: by the names of the options of `kvtailor bench`, '-' as '_': numbers, lists of them, or the texts that
            one would type.
        tasks: from `tasks_of`.

    Raises:
        SettingsError: with all faults at once.
    """
    faults = [f"there is no setting {name!r}{suggest(name, OPTIONS)}" for name in given if name not in OPTIONS]
    wanted = {task for task, _ in tasks}
    faults += [
        f"{name} is about {' and '.join(SERVES[name])}, which tasks does not ask for"
        for name, value in given.items()
        if name in SERVES and value is not None and not wanted & set(SERVES[name])
    ]
    found: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = given.get(name)
        try:
            found[name] = value_of(option, option.default if value is None else value)
        except ValueError as error:
            faults.append(f"{name} is {value!r}: {error}")
    if faults:
        raise SettingsError(ASKED, faults)
    return found
