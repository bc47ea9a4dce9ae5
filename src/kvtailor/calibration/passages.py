"""From texts to the passages that are measured: pieces of equal length, spread evenly over each text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.bench.subject import Subject, Tokens
from kvtailor.errors import KvtailorError

__all__ = ["Passage", "cut"]

# Characters that a token has at most, on average over a passage, with any tokenizer.
_WIDEST = 12


@dataclass(frozen=True)
class Passage:
    """One piece of a text.

    Attributes:
        ids: (n,) int64, the tokenizer's beginning tokens included.
        text: the passage as text.
        source: the name of its text.
    """

    ids: Tensor
    text: str
    source: str


def cut(subject: Subject, texts: Mapping[str, str], *, tokens: int, context: int) -> tuple[Passage, ...]:
    """Passages of `context` tokens, as many as `tokens` allow, the same number from each text.

    Args:
        subject: whose tokenizer counts.
        texts: by name.
        tokens: of all passages together, beginning tokens included.
        context: of each.

    Raises:
        KvtailorError: the tokens are too few for one passage of each text, or a text has no room for its passages.
    """
    each = tokens // context // max(1, len(texts))
    if texts and each < 1:
        raise KvtailorError(
            f"asked for {tokens} tokens of {len(texts)} texts in passages of {context}: give at least "
            f"{len(texts) * context} tokens, or shorter passages"
        )
    return tuple(passage for name, text in texts.items() for passage in _of_text(subject, name, text, each, context))


def _of_text(subject: Subject, name: str, text: str, count: int, context: int) -> list[Passage]:
    start = subject.start()
    wanted = context - start.numel()
    if wanted < 1:
        raise KvtailorError(f"asked for passages of {context} tokens, which the beginning token fills: ask for more")
    stride = len(text) // count
    found = []
    for index in range(count):
        begin = index * stride
        if begin and (space := text.find(" ", begin, begin + stride // 2)) >= 0:
            begin = space
        coded = subject.tokens(text[begin : min(begin + _WIDEST * wanted, (index + 1) * stride)])
        if coded.ids.numel() < wanted:
            raise KvtailorError(
                f"asked for {count} passages of {context} tokens of {name}, but its {len(text)} characters are "
                "too few for them: ask for fewer tokens, or give more text"
            )
        found.append(Passage(torch.cat([start, coded.ids[:wanted]]), _prefix(coded, wanted), name))
    return found


def _prefix(coded: Tokens, count: int) -> str:
    if coded.ends is None:
        return coded.text
    return coded.text.encode()[: coded.ends[count - 1]].decode(errors="ignore")
