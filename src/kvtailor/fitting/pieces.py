"""Pieces: a context that is prefilled and compressed, and targets that are then scored on what is left of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["CONTINUATION", "TEXT", "Piece", "answered"]

TEXT = "text"
"""The group of pieces that are windows of a text."""
CONTINUATION = 128
"""Tokens of a window of text that are scored."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece.

    Attributes:
        context: (n,) int64 token ids that are prefilled and compressed.
        targets: (t,) int64 token ids, at least 2; the first is told by the prefill, and the others by the cache.
        group: `TEXT`, or the family of a document's task.
        source: where it comes from, in words.
        text: the piece as text.
    """

    context: Tensor
    targets: Tensor
    group: str
    source: str
    text: str


def answered(context: Tensor, answer: Tensor, group: str, source: str, text: str) -> Piece | None:
    """Return the piece of a question; None where its answer is one token, for which no cache is read.

    Args:
        context: (n,) int64 token ids of the prompt.
        answer: (t,) int64 token ids.
        group, source, text: see `Piece`.
    """
    if answer.numel() < 2:
        return None
    return Piece(context=context, targets=answer, group=group, source=source, text=text)
