"""The names of the sanity checks, and the error that a failed one raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError, UnknownName

__all__ = ["CHECKS", "MAY_BE_ALLOWED", "MEANINGS", "OF_ONE_PLAN", "Finding", "Fraud", "allowances", "is_allowance"]

MEANINGS = {
    "shared prefill": "a cache that was filled from a kept prompt is not what it is when it reads the prompt itself",
    "identity": "plan 'full' gives other scores than the model's own cache",
    "whole budget": "a plan that may keep or read everything gives other scores than 'full'",
    "repeated data": "two samples of one task have the same tokens",
    "repeated text": "too few different runs of 8 words: any cache looks good on it",
    "calibration on the evaluated text": "a plan was tuned on the text that scores it",
    "one text under two names": "two data sets of a run are the same text",
    "different data": "a plan was measured on something else than 'full'",
    "same results on other data": "a plan gives the same values on different tokens",
    "untouched cache": "a plan claims to hold less, yet nothing differs from 'full', or what it holds is not read",
    "equal results": "two plans hold different things, yet all of their results are equal",
    "better than full": "a plan that holds less beats 'full' beyond chance",
    "full that holds less": "the reference itself does not hold every token",
    "nothing freed": "a plan claims to hold fewer tokens, yet its storages are those of all",
    "hidden bytes": "tensors, or a fresh process, grew by more than the ledger has",
    "nominal bytes": "bytes that do not follow from the tensors: a constant, or parts that do not add up",
    "impossible bytes": "more than the device has",
    "impossible peak": "a peak below what was held then",
    "peak not reset": "a peak that an earlier measurement left behind",
    "cold side": "one side's times fall while the run goes on: it was not warm",
    "throttled side": "one side's times rise while the run goes on, and those of the others do not",
}
CHECKS: tuple[str, ...] = tuple(MEANINGS)

# The others are touched while a task runs: what comes after them would not mean anything.
MAY_BE_ALLOWED: tuple[str, ...] = CHECKS[CHECKS.index("same results on other data") :]

OF_ONE_PLAN = ("whole budget", "calibration on the evaluated text", "untouched cache")
"""Name those that are one plan's error where they fail while a task runs: its record says so, and the run goes on."""

_ALLOWANCE = "Allowed by the user: "


class Fraud(KvtailorError, RuntimeError):
    """Results that cannot be true.

    Attributes:
        name: the sanity check, one of `CHECKS`; the message begins with it and a colon.
    """

    def __init__(self, name: str, sentence: str):
        if name not in MEANINGS:
            raise UnknownName("sanity check", name, CHECKS)
        self.name, self._sentence = name, sentence
        super().__init__(f"{name}: {sentence}")

    def __reduce__(self) -> tuple[type[Fraud], tuple[str, str]]:
        return Fraud, (self.name, self._sentence)


@dataclass(frozen=True)
class Finding:
    """A sanity check that records of a run fail.

    Attributes:
        name: the sanity check.
        sentence: what was found and what to do.
        records: which show it.
    """

    name: str
    sentence: str
    records: Sequence[Record]

    @property
    def allowed(self) -> bool:
        """Whether the user allowed this for all of the records, which then have it in their notes."""
        return all(_note(self.name) in record.notes for record in self.records)


def allowances(names: Sequence[str]) -> tuple[str, ...]:
    """The notes of records for which the user allowed these sanity checks, each once.

    Raises:
        UnknownName: there is no such sanity check.
        KvtailorError: one may not be allowed.
    """
    for name in names:
        if name not in MEANINGS:
            raise UnknownName("sanity check", name, CHECKS)
        if name not in MAY_BE_ALLOWED:
            raise KvtailorError(
                f"asked to allow the sanity check {name!r}: without it no number of a run means anything; "
                f"those that may be allowed are {', '.join(MAY_BE_ALLOWED)}"
            )
    return tuple(dict.fromkeys(map(_note, names)))


def is_allowance(note: str) -> bool:
    """Whether a note is one of `allowances`."""
    return note.startswith(_ALLOWANCE)


def _note(name: str) -> str:
    return f"{_ALLOWANCE}{name}."
