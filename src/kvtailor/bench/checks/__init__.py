"""What a bench that was fooled looks like: each sanity check raises a sentence that begins with its name.

Some are touched while a task runs, before its numbers are written; the others by the records of a run, when all of
them have been written. `CHECKS` names them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from kvtailor.bench.checks.fraud import (
    CHECKS,
    MAY_BE_ALLOWED,
    MEANINGS,
    Finding,
    Fraud,
    allowances,
    is_allowance,
)
from kvtailor.bench.checks.holdings import of_holdings, same_peaks
from kvtailor.bench.checks.results import is_smaller, of_results, same_doings
from kvtailor.bench.checks.scores import (
    check_identity,
    check_whole_budget,
    tolerances,
    tolerances_of_another_path,
)
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
    "CHECKS",
    "Finding",
    "Fraud",
    "allowances",
    "check_calibration",
    "check_distinct",
    "check_identity",
    "check_records",
    "check_repetition",
    "check_sources",
    "check_whole_budget",
    "distinct_8grams",
    "findings",
    "is_allowance",
    "is_smaller",
    "tolerances",
    "tolerances_of_another_path",
    "warnings_of",
]


def findings(records: Sequence[Record]) -> Iterator[Finding]:
    """Every sanity check that the records of a run fail, allowed or not."""
    return chain(of_holdings(records), of_texts(records), of_results(records), of_times(records))


def check_records(records: Sequence[Record]) -> None:
    """Nothing in the records of a run shows that it was fooled.

    Raises:
        Fraud: the first sanity check that they fail and that was not allowed, see `run(allow=...)`.
    """
    for finding in findings(records):
        if not finding.allowed:
            raise Fraud(finding.name, finding.sentence)


def warnings_of(records: Sequence[Record]) -> list[str]:
    """What is no fraud, but must be read beside the numbers: whole sentences, each once.

    What was allowed and is there, plans that did the same, times that drifted, peaks that are suspiciously equal.
    """
    allowed = (
        f"Allowed, and found: {finding.name}: {finding.sentence}." for finding in findings(records) if finding.allowed
    )
    return list(dict.fromkeys(chain(allowed, same_doings(records), times_notes(records), same_peaks(records))))
