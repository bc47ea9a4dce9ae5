"""The natural text of the recipe: Wikipedia and old books, a part of it in the spelling of WikiText."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from kvtailor.errors import FileError

__all__ = ["as_wikitext", "read_corpus"]

PIECE = 60_000  # characters of a book in a row, so that a few long books do not crowd out the rest
SPELLED_AS_WIKITEXT = 8  # every how many-th Wikipedia article


def as_wikitext(title: str, text: str) -> str:
    """``text`` in the spelling of WikiText's raw form: tokens apart, `` @-@ `` in words, headings between `` = ``."""
    lines = [f" = {title} = ", " "]
    for line in text.split("\n"):
        if len(line) < 60 and line.endswith(".") and " " not in line.strip()[-1:] and line.count(" ") < 6:
            lines += [" ", f" = = {line[:-1]} = = ", " "]
            continue
        line = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", line)
        line = re.sub(r"(?<=\d)([.,])(?=\d)", r" @\1@ ", line)
        line = re.sub(r"([(\[])(?=\S)", r"\1 ", line)
        line = re.sub(r"(?<=[^\s@])([,;:!?)\]%])", r" \1", line)
        line = re.sub(r'(?<=\S)"(?=[\s,.;:!?)]|$)', ' "', re.sub(r'"(?=\w)', '" ', line))
        line = re.sub(r"(?<=\w)('s|'|n't)(?=[\s,.;:!?)]|$)", r" \1", line)
        line = re.sub(r"(?<=[^\s.])\.(?=\s+[A-Z\"]|\s*$)", " .", line)
        lines.append(f" {line.strip()} ")
    return "\n".join(lines)


def read_corpus(data: Path, characters: int) -> Iterator[tuple[str, str]]:
    """(source, text) of training documents, the same share of every file, ``characters`` in all.

    Books are cut into pieces of `PIECE` characters; every eighth Wikipedia article is spelled `as_wikitext`.

    Raises:
        FileError: ``data`` has no ``train_corpus/*.jsonl``.
    """
    files = sorted((data / "train_corpus").glob("*.jsonl"))
    if not files:
        raise FileError(
            f"asked for the training corpus, but {data} has no train_corpus/*.jsonl: give --data or set KVTAILOR_DATA"
        )
    for file in files:
        left = characters // len(files)
        for number, line in enumerate(file.open(encoding="utf-8")):
            document = json.loads(line)
            whole = document["text"]
            if document["source"].startswith("wikipedia") and number % SPELLED_AS_WIKITEXT == 0:
                whole = as_wikitext(document["title"], whole)
            for start in range(0, len(whole), PIECE):
                text = whole[start : start + PIECE]
                left -= len(text)
                yield document["source"], text
                if left <= 0:
                    break
            if left <= 0:
                break
