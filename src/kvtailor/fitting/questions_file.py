"""The user's own questions: a file of JSON lines with `prompt` and `answer`, of which one half searches and one proves.

Questions about one document stay on one side: prompts that share a fifth of their runs of 13 words are of one document.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from kvtailor.bench.data.overlap import Sketch
from kvtailor.bench.data.texts import read_text
from kvtailor.bench.subject import Subject
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.fitting.pieces import Piece, answered

__all__ = ["halves", "read_questions"]

_LEAST_ANSWERS = 10
_ONE_DOCUMENT = 0.2
_RUNS = 4096


def read_questions(subject: Subject, path: Path, context: int, notes: list[str]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces that search and those that prove.

    Args:
        subject: the model, with its tokenizer.
        path: of the file.
        context: tokens; longer prompts are left out.
        notes: sentences about what is left out are added.

    Raises:
        KvtailorError: a line that is no question, or too few of them.
    """
    pieces: list[Piece] = []
    left, twice, met = 0, 0, set[str]()
    for number, line in enumerate(read_text(path).split("\n")):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            prompt, answer = found["prompt"], found["answer"]
            if not isinstance(prompt, str) or not isinstance(answer, str):
                raise ArgumentError("prompt and answer must be text")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise KvtailorError(
                f'line {number + 1} of {path} is {line[:60]!r}: write {{"prompt": "...", "answer": "..."}} ({error})'
            ) from error
        if prompt in met:
            twice += 1
            continue
        met.add(prompt)
        ids, whole = subject.prompt(prompt), subject.prompt(prompt + answer)
        behind = whole[ids.numel() :]
        if not torch.equal(whole[: ids.numel()], ids):
            behind = subject.prompt(answer)[subject.start().numel() :]
        piece = answered(ids, behind, path.name, path.name, prompt)
        if ids.numel() > context or piece is None:
            left += 1
        else:
            pieces.append(piece)
    if left:
        notes.append(
            f"{left} questions of {path.name} are left out: longer than the context of {context} tokens, or with an "
            "answer of one token, which no cache is read for."
        )
    if twice:
        notes.append(f"{twice} questions of {path.name} stand there more than once and count once.")
    short = sum(piece.context.numel() < context // 2 for piece in pieces)
    if short:
        notes.append(
            f"{short} prompts of {path.name} have less than half of the context of {context} tokens: what drops tokens "
            "drops fewer of theirs, or none."
        )
    if len(pieces) < _LEAST_ANSWERS:
        raise KvtailorError(
            f"{path} has {len(pieces)} questions that fit a context of {context} tokens: give {_LEAST_ANSWERS} at least"
        )
    return halves(pieces, path.name, notes)


def halves(pieces: Sequence[Piece], name: str, notes: list[str]) -> tuple[list[Piece], list[Piece]]:
    """Deal questions into two halves, those about one document to one of them; within each the order stays.

    Args:
        pieces: with their prompts as `text`.
        name: of the file.
        notes: where most questions are about one document, no such halves are there, and a sentence says so.
    """
    groups = _by_document([piece.text for piece in pieces])
    if max(map(len, groups)) > 2 * len(pieces) / 3:
        notes.append(
            f"Most questions of {name} are about one document, so those that judge are about what the search has read."
        )
        return list(pieces[::2]), list(pieces[1::2])
    sides: tuple[list[int], list[int]] = ([], [])
    for group in groups:
        # Of equal sides the first gets it; so single questions go to both in turns.
        min(sides, key=len).extend(group)
    return [pieces[n] for n in sorted(sides[0])], [pieces[n] for n in sorted(sides[1])]


def _by_document(prompts: Sequence[str]) -> list[list[int]]:
    """Numbers of prompts in groups that share text, each group by its first number."""
    owners: dict[int, int] = {}
    group_of: list[int] = []
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        runs = Sketch.of([prompt], _RUNS).hashes
        met = Counter(owners[run] for run in runs if run in owners)
        # Runs belong to the first prompt that had them; its group is what this one joins.
        shared = Counter[int]()
        for owner, count in met.items():
            shared[group_of[owner]] += count
        most = shared.most_common(1)
        group = most[0][0] if most and most[0][1] >= _ONE_DOCUMENT * len(runs) else number
        group_of.append(group)
        groups.setdefault(group, []).append(number)
        for run in runs:
            owners.setdefault(run, number)
    return list(groups.values())
