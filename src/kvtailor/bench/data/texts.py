"""Text to measure on: a file, or one that is generated where none is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from kvtailor.bench.data.synthetic.documents import TASKS, make_document
from kvtailor.errors import KvtailorError
from kvtailor.ops import files

__all__ = ["BETWEEN", "STATES", "generated_documents", "generated_text", "named_texts", "read_text", "starts_of"]

BETWEEN = "\n\n"
_PIECE = 1500
# Of the evaluation split's states; those of the retrieval task stay below.
_FIRST, _EACH, STATES = 500_000, 4_000, 50
"""How many texts there are to generate, by their state from 0."""


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        KvtailorError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = files.read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise KvtailorError(f"asked for the text in {path}, which cannot be read: {error}") from error
    if not text.strip():
        raise KvtailorError(f"asked for the text in {path}, which is empty: give a file with some text")
    return text


def generated_text(characters: int, state: int = 0) -> str:
    """The documents of `generated_documents`, joined with a blank line."""
    return BETWEEN.join(generated_documents(characters, state))


def starts_of(documents: Sequence[str]) -> tuple[int, ...]:
    """Where each document begins in all of them joined with a blank line, in characters."""
    return tuple(accumulate((len(document) + len(BETWEEN) for document in documents[:-1]), initial=0))


def generated_documents(characters: int, state: int = 0, kinds: Sequence[str] = tuple(TASKS)) -> list[str]:
    """At least so many characters of generated documents of these kinds, each with its question and answer.

    Evaluation split, the same on every machine; another `state` has other documents. It is plain prose with facts that
    come back later: what a cache forgets shows, but no model was made for it, so its perplexity means nothing about
    English.
    """
    if not 0 <= state < STATES:
        raise KvtailorError(f"asked for the generated text of state {state}: give 0 to {STATES - 1}")
    pieces: list[str] = []
    size = 0
    while size < characters:
        own = _FIRST + state * _EACH + len(pieces)
        kind = kinds[len(pieces) % len(kinds)]
        document = make_document(kind, state=own, length=_PIECE, depth=(own % 10) / 9)
        pieces.append(document.prompt + document.answer)
        size += len(pieces[-1]) + 2
    return pieces


def named_texts(texts: object) -> dict[str, str]:
    """Return texts by their names.

    Args:
        texts: one or several; a `Path`, or a string that is the path of a file, is read; any other string is a text.

    Raises:
        KvtailorError: no text, or a file that cannot be read.
    """
    each = [texts] if isinstance(texts, str | Path) else list(texts) if isinstance(texts, Sequence) else None
    if isinstance(texts, Mapping):
        found = {str(name): text for name, text in texts.items()}
        if all(isinstance(text, str) for text in found.values()) and found:
            return found
    if not each or not all(isinstance(text, str | Path) for text in each):
        raise KvtailorError(
            f"asked for a measurement without a text, found {texts!r}: give a text, a file, or a list of them"
        )
    named: dict[str, str] = {}
    for number, text in enumerate(each):
        if isinstance(text, Path) or _is_file(text):
            named[free_name(Path(text).name, named)] = read_text(Path(text).expanduser())
        elif isinstance(text, str):
            if _is_like_a_path(text):
                raise KvtailorError(f"there is no text file {text}: give the path of one, or the text itself")
            if not text.strip():
                raise KvtailorError(f"text {number + 1} of {len(each)} is empty: give a text, or the path of a file")
            named[free_name(f"text {number + 1}", named)] = text
    return named


def _is_file(text: object) -> bool:
    if not isinstance(text, str) or len(text) > 1000 or "\n" in text:
        return False
    try:
        return Path(text).expanduser().is_file()
    except OSError:
        return False


def _is_like_a_path(text: str) -> bool:
    return len(text.split()) == 1 and bool(Path(text).suffix or "/" in text)


def free_name(name: str, taken: Mapping[str, str]) -> str:
    """Return a name, with a number behind it where it is taken."""
    number = 2
    free = name
    while free in taken:
        free = f"{name} ({number})"
        number += 1
    return free
