"""Holds the words of `kvtailor check --measure` against what the bench measured on the same model, plan by plan.

    kvtailor check --model NAME --measure --out checked
    kvtailor bench --suite field --model NAME --data FOLDER --out results
    python -m benchmarks.check_agrees checked results --text books_eval

A plan is in both where it is the same plan, or the same with a budget within a tenth: `keep=0.25` and `keep=0.2421`.
They contradict each other where one says safe and the other harmful, at the same margin.
The exit code is 1 where any does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtailor.bench.safety.check import MARGIN
from kvtailor.bench.safety.verdict import HARMFUL, NOT_MEASURED, SAFE, Verdict, judged
from kvtailor.bench.schema import Record, latest, read_records
from kvtailor.errors import PlanError
from kvtailor.plan import Plan

_BUDGET = 0.1


def pairs_of(check: Sequence[Record], bench: Sequence[Record], margin: float) -> list[tuple[Verdict, Verdict]]:
    """Return the verdicts of plans that both have, the check's first.

    Args:
        check: records of a check.
        bench: records of a bench of the same model.
        margin: nats a token.
    """
    theirs = [(_plan(key, each), each) for key, each in judged(bench, margin).items() if each.word != NOT_MEASURED]
    found = []
    for key, mine in judged(check, margin).items():
        plan = _plan(key, mine)
        like = next(
            (other for its, other in theirs if plan is not None and its is not None and _alike(plan, its)), None
        )
        if like is not None and mine.word != NOT_MEASURED:
            found.append((mine, like))
    return found


def contradicts(mine: Verdict, theirs: Verdict) -> bool:
    """Return whether one says safe and the other harmful."""
    return {mine.word, theirs.word} == {SAFE, HARMFUL}


def _plan(key: str, verdict: Verdict) -> Plan | None:
    """The plan of a verdict; None where its words mean another plan now than when it was measured."""
    try:
        plan = Plan.parse(verdict.plan)
    except PlanError:
        return None
    return plan if plan.hash == key else None


def _alike(one: Plan, other: Plan) -> bool:
    if one == other:
        return True
    same = str(one).partition(" @ ")[0] == str(other).partition(" @ ")[0]
    return same and bool(one.keep and other.keep and abs(one.keep / other.keep - 1) <= _BUDGET)


def main() -> int:
    """Print a row for each plan; return 1 where two verdicts contradict each other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("check", type=Path)
    parser.add_argument("bench", type=Path)
    parser.add_argument("--text", help="only perplexity on this text of the bench, and no answers")
    parser.add_argument("--margin", type=float, default=MARGIN)
    given = parser.parse_args()
    bench = [
        each
        for each in latest(read_records(given.bench))
        if given.text is None or (each.task == "perplexity" and each.text == given.text)
    ]
    pairs = pairs_of(latest(read_records(given.check)), bench, given.margin)
    for mine, theirs in pairs:
        mark = "  CONTRADICTION" if contradicts(mine, theirs) else ""
        print(f"{mine.plan[:40]:<40} {_told(mine)} | {_told(theirs)}{mark}")
    same = sum(mine.word == theirs.word for mine, theirs in pairs)
    bad = sum(contradicts(*pair) for pair in pairs)
    print(f"{len(pairs)} plans in both: {same} the same word, {bad} contradictions")
    return 1 if bad or not pairs else 0


def _told(verdict: Verdict) -> str:
    loss = verdict.loss
    assert loss is not None
    ends = "" if loss.low is None or loss.high is None else f" ({loss.low:+.3f} to {loss.high:+.3f})"
    return f"{verdict.word:<9} {loss.value:+.4f}{ends}"


if __name__ == "__main__":
    sys.exit(main())
