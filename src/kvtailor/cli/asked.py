"""From the options of `kvtailor bench` to the tasks that they ask for, as `bench.build` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from kvtailor.bench.subject import Subject

__all__ = ["SERVES", "SETS", "TASKS", "USUAL", "Asked", "numbers", "settings_of", "sizes", "split_tasks"]

TASKS = ("perplexity", "needle", "fidelity", "speed", "memory", "capacity", "speculation")
USUAL = ("perplexity", "needle", "speed", "memory")
SETS = {"longbench": "longcontext", "zeroscrolls": "longcontext", "harness": "harness"}
"""Sets of tasks, asked for as SET:NAME, and the kind of task that measures them."""
ANSWER_ROOM = 32
WINDOWS = 50
FIDELITY_WINDOWS = 20
STATE_APART = 10_000
"""Random states between two numbers of --state: more than a run has documents of one kind, or rounds."""
SERVES = {
    **dict.fromkeys(("chunk", "beyond"), ("perplexity",)),
    "continuation": ("perplexity", "fidelity"),
    "windows": ("perplexity", "fidelity"),
    **dict.fromkeys(("needles", "depths", "documents", "kind", "question_outside"), ("needle",)),
    "contexts": ("speed", "memory", "speculation"),
    "batches": ("speed", "memory"),
    "graphs": ("speed",),
    **dict.fromkeys(("new_tokens", "rounds"), ("speed", "speculation")),
    **dict.fromkeys(("draft", "draft_plan", "middle_plan", "gamma"), ("speculation",)),
    "state": ("perplexity", "fidelity", "needle", "speculation", "longbench", "zeroscrolls"),
    "memory": ("capacity",),
    "examples": tuple(SETS),
}
"""Tasks that an option of the bench is about; one that is about none of those asked would pass in silence."""

N = TypeVar("N", int, float)
Asked = tuple[str, Mapping[str, object]]


def split_tasks(text: str) -> list[tuple[str, str | None]]:
    """The tasks of `--tasks`, each with what stands behind its ':'.

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


def numbers(text: str, kind: Callable[[str], N], option: str) -> tuple[N, ...]:
    """The numbers of an option that takes several.

    Raises:
        click.UsageError: something else stands there.
    """
    try:
        found = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        raise click.UsageError(f"{option} is {text!r}: give numbers with ',' between.")
    return found


def sizes(subject: Subject, context: int | None, continuation: int | None, new_tokens: int) -> tuple[int, int]:
    """Context and continuation, as asked or as the model's positions allow."""
    positions = subject.positions
    if context is None:
        context = (
            512 if positions is None else max(16, min(512, positions - max(new_tokens, ANSWER_ROOM, positions // 5)))
        )
    if continuation is None:
        continuation = max(1, context // 4)
        if positions is not None:
            continuation = max(1, min(continuation, positions - context))
    return context, continuation


def settings_of(
    tasks: Sequence[tuple[str, str | None]],
    *,
    texts: Sequence[str],
    context: int,
    continuation: int,
    chunk: int | None,
    beyond: bool,
    windows: int | None,
    lengths: Sequence[int],
    depths: Sequence[float],
    documents: int,
    kinds: Sequence[str],
    question_outside: bool,
    contexts: Sequence[int],
    batches: Sequence[int],
    new_tokens: Sequence[int],
    rounds: int,
    graphs: bool,
    memory_bytes: int | None,
    examples: int | None,
    draft: str | None,
    draft_plan: str | None,
    middle_plan: str | None,
    gamma: int,
    state: int,
) -> Iterator[Asked]:
    """Kind and settings of every task, in the order asked; see the options of `kvtailor bench`."""
    for name, which in tasks:
        if name == "perplexity":
            for text in texts:
                yield name, {"text": text, "context": context, "continuation": continuation, "chunk": chunk,
                             "beyond": beyond, "windows": windows or WINDOWS, "state": state}  # fmt: skip
        elif name == "needle":
            for kind in kinds:
                yield name, {"lengths": lengths, "depths": depths, "documents": documents, "kind": kind,
                             "question_outside": question_outside, "state": state * STATE_APART}  # fmt: skip
        elif name == "fidelity":
            for text in texts:
                yield name, {"text": text, "context": context, "continuation": continuation,
                             "windows": windows or FIDELITY_WINDOWS, "state": state}  # fmt: skip
        elif name == "speed":
            for size, batch, tokens in product(contexts, batches, new_tokens):
                yield name, {"text": texts[0], "context": size, "batch": batch, "tokens": tokens, "rounds": rounds,
                             "graphs": graphs}  # fmt: skip
        elif name == "memory":
            for size, batch in product(contexts, batches):
                yield name, {"context": size, "batch": batch}
        elif name == "speculation":
            for size, tokens in product(contexts, new_tokens):
                yield name, {"text": texts[0], "context": size, "tokens": tokens, "rounds": rounds, "draft": draft,
                             "draft_plan": draft_plan, "middle_plan": middle_plan, "gamma": gamma,
                             "state": state * STATE_APART}  # fmt: skip
        elif name == "capacity":
            yield name, {"memory_bytes": memory_bytes}
        elif name == "harness":
            yield SETS[name], {"task": which, "limit": examples}
        else:
            yield SETS[name], {"benchmark": name, "subset": which, "examples": examples, "state": state}


def text_name(text: str) -> str:
    """A text as `bench.build` takes it: a file is told from a corpus by its path."""
    return str(Path(text).resolve()) if Path(text).exists() else text
