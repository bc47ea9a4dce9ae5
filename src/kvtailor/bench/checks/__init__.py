"""What a bench that was fooled looks like: each sanity check raises a sentence that begins with its name.

Some are touched while a task runs, before its numbers are written; the others by the records of a run, when all of
them have been written. `CHECKS` names them all.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain

from kvtailor.bench.checks.fraud import (
    CHECKS,
    MAY_BE_ALLOWED,
    MEANINGS,
    OF_ONE_PLAN,
    Finding,
    Fraud,
    allowances,
    is_allowance,
)
from kvtailor.bench.checks.holdings import of_holdings, same_peaks
from kvtailor.bench.checks.results import is_smaller, of_results, same_doings
from kvtailor.bench.checks.scores import check_finely, check_identity, check_whole_budget
from kvtailor.bench.checks.texts import (
    check_calibration,
    check_distinct,
    check_repetition,
    check_sources,
    distinct_8grams,
    of_texts,
)
from kvtailor.bench.checks.times import of_times, times_notes
from kvtailor.bench.schema import Record

__all__ = [
    "MAY_BE_ALLOWED",
    "MEANINGS",
    "OF_ONE_PLAN",
    "CHECKS",
    "Finding",
    "Fraud",
    "allowances",
    "check_calibration",
    "check_distinct",
    "check_finely",
    "check_identity",
    "check_records",
    "check_repetition",
    "check_sources",
    "check_whole_budget",
    "distinct_8grams",
    "findings",
    "is_allowance",
    "is_smaller",
    "warnings_of",
]


def findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Every sanity check that the records of a run fail, allowed or not."""
    return chain(of_holdings(records), of_texts(records), of_results(records), of_times(records))


def check_records(records: Sequence[Record], *, stored: bool = False) -> None:
    """Nothing in the records of a run shows that it was fooled.

    Args:
        records: of a run, or of a folder.
        stored: they are those of a folder, which cannot be measured otherwise now: the sentence of an error says how
            to leave out those that show it.

    Raises:
        Fraud: the first sanity check that they fail and that was not allowed, see `run(allow=...)`.
    """
    for finding in findings(records):
        if not finding.allowed:
            raise Fraud(finding.name, finding.sentence + (f". {_cure(finding)}" if stored else ""))


def _cure(finding: Finding) -> str:
    """How to leave out the newest records that show it, by the field that tells them from the others."""
    first, last = finding.records[0], max(finding.records, key=lambda record: record.started)
    others = [each for each in finding.records if each is not last] or [first]
    for name in ("text", "run", "label", "task"):
        own = getattr(last, name)
        if own is not None and all(getattr(each, name) != own for each in others):
            break
    else:
        name, own = "key", last.key
    option = shlex.join(["--leave-out", f"{name}={own}"])
    return f"To go on without some of these records, leave them out: {option}, or leave_out=[{f'{name}={own}'!r}]"


def warnings_of(records: Sequence[Record]) -> list[str]:
    """What is no fraud, but must be read beside the numbers: whole sentences, each once.

    What was allowed and is there, plans that did the same, times that drifted, peaks that are suspiciously equal.
    """
    allowed = (
        f"Allowed, and found: {finding.name}: {finding.sentence}." for finding in findings(records) if finding.allowed
    )
    return list(dict.fromkeys(chain(allowed, same_doings(records), times_notes(records), same_peaks(records))))
