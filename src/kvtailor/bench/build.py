"""From a task's name and settings, as a suite writes them, to the task that measures."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtailor.bench.kinds import GENERATED, KINDS, is_path, setting_faults
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import Task
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName

__all__ = ["SettingsError", "Text", "make_task"]


class SettingsError(KvtailorError, ValueError):
    """A task that cannot be what its settings ask for. Holds all faults at once, each a whole sentence."""

    def __init__(self, what: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("\n  - ".join([f"{what} cannot be done as asked:", *self.faults]))


class Text(NamedTuple):
    """A text, its name in records, where a corpus was read from, and where its documents begin, in characters."""

    text: str
    source: str
    origin: str | None
    starts: tuple[int, ...]


def make_task(
    name: str, settings: Mapping[str, object], subject: Subject, *, data: Path | None, text: Text | None = None
) -> Task:
    """The task of a kind with these settings; what is not given stays at the task's default.

    Args:
        name: one of `KINDS`.
        settings: as a suite writes them; lists stand for tuples. `text` is a corpus ('wikitext2', 'c4', 'pg19'), the
            path of a text file, or 'generated'.
        subject: the model that will be measured.
        data: folder with data sets in their original layout; None: they come from their usual home.
        text: the text itself, in place of the one that `settings` names.

    Raises:
        SettingsError: unknown settings, values that make no sense, or more tokens than the model has positions. No
            text has been read by then.
        KvtailorError: the text or the task is not to be had here.
    """
    if text is not None:
        settings = {each: value for each, value in settings.items() if each != "text"}
    faults = setting_faults(name, settings, subject.name, subject.positions)
    if faults:
        raise SettingsError(f"the task {name!r}", faults)
    kind = KINDS[name]
    made: Any = kind
    given: dict[str, Any] = {
        each: tuple(value) if isinstance(value, list | tuple) else value
        for each, value in settings.items()
        if each != "text"
    }
    try:
        if kind.reads_text:
            made(**given, text="none", source="none")
            text = text or _text(str(settings.get("text", GENERATED)), given, kind, data)
            has = {field.name for field in dataclasses.fields(made)}
            given["text"], given["source"] = text.text, text.source
            given |= {each: getattr(text, each) for each in ("origin", "starts") if each in has}
        if kind.reads_data:
            given["data"] = data
        return cast(Task, made(**given))
    except (TypeError, ValueError, UnknownName) as error:
        if isinstance(error, KvtailorError) and not isinstance(error, UnknownName | ArgumentError):
            raise
        raise SettingsError(f"the task {name!r}", [str(error)]) from error


def _text(name: str, given: Mapping[str, Any], kind: type[Task], data: Path | None) -> Text:
    """A text as a task takes it."""
    tokens = sum(int(given.get(each, kind.default(each) or 0)) for each in kind.sizes())
    # Tokens of the coarsest tokenizers have about 6 characters.
    characters = 6 * tokens * int(given.get("windows", kind.default("windows") or 1)) + 10_000
    return _read(name, characters if name == GENERATED else None, int(given.get("state", 0)), data)


@lru_cache(maxsize=4)
def _read(name: str, characters: int | None, state: int, data: Path | None) -> Text:
    """Several tasks of a suite read the same text; of a corpus, as much as is usual."""
    from kvtailor.bench.data.texts import BETWEEN, STATES, generated_documents, read_text, starts_of

    if characters is not None:
        documents = generated_documents(characters, state if 0 < state < STATES else 0)
        return Text(BETWEEN.join(documents), "generated text", None, starts_of(documents))
    if is_path(name):
        return Text(read_text(Path(name)), Path(name).name, None, ())
    try:
        corpus = importlib.import_module("kvtailor.bench.data.corpora").corpus
    except ImportError as error:
        raise KvtailorError(f"The corpora cannot be imported: {error}") from error
    found = corpus(name, data=data)
    return Text(str(found.text), str(found.source), str(found.origin), tuple(found.starts))
