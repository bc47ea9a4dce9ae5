"""Text to measure on: a file, or one that is generated where none is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from kvtailor.bench.data.synthetic.documents import TASKS, make_document
from kvtailor.errors import KvtailorError

__all__ = ["BETWEEN", "STATES", "generated_documents", "generated_text", "read_text", "starts_of"]

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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
