"""Times of which one side's were taken under other conditions than the others'.

All sides are timed in every round, so what slows the machine slows all of them: a round's time of a side is compared
with the median of the others' in the same round, and only what is left of it, and shows in the side's own times too,
is the side's own doing. Samples that other programs disturbed are left out first.

A shift is a point of the run with two fifths of its rounds, and at least 5, on both sides, such that the 15th
percentile of the times on one side lies 20 % above the 85th of those on the other. What is cold for fewer rounds does
not move a median, so only a first round that is three times as long as all others is called cold by itself. Of 400
simulated runs of 10 rounds and 6 sides none was accused wrongly under log-normal noise of 3 % or 10 %, 1 % where a
tenth of the undisturbed times were also 1.3 to 3 times as long, 3 % where a fifth were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from kvtailor.bench.checks.fraud import Finding
from kvtailor.bench.measure.statistics import quantile
from kvtailor.bench.schema import Record

__all__ = ["of_times", "shift", "times_notes"]

_FEWEST_ROUNDS = 10
_FEWEST_BESIDE = 5
_FEWEST_FOR_FIRST = 4
_SHARE_BESIDE = 0.4
_TAIL = 0.15
_MARGIN = math.log(1.2)
_FIRST_MARGIN = math.log(3.0)
_NAMES = {"ttft": "time to the first token", "tpot": "time per further token"}


def of_times(records: Sequence[Record]) -> Iterator[Finding]:
    """Sides that were cold or throttled while the others were not."""
    for sides in _runs(records):
        for record in sides:
            others = [side for side in sides if side is not record]
            for name in _NAMES:
                ours, relative = _against(record, others, name)
                if len(ours) < _FEWEST_FOR_FIRST:
                    continue
                by, own = shift(relative), shift(ours, 0.5 * _MARGIN)
                if by * own <= 0:
                    by = _first(relative) if _first(ours, 0.5 * _FIRST_MARGIN) else 0.0
                if by:
                    yield _finding(record, name, by)


def times_notes(records: Sequence[Record]) -> Iterator[str]:
    """Sentences on times that are comparable, but not as good as they look."""
    for sides in _runs(records):
        rounds = min(sum(not bad for bad in side.values["disturbed"]) for side in sides)
        if rounds < _FEWEST_ROUNDS and all(side.timings for side in sides):
            yield (
                f"Times of {rounds} undisturbed rounds: a side that was cold or throttled would not show; ask for "
                f"{_FEWEST_ROUNDS} or more."
            )
        for name, what in _NAMES.items():
            by_round = zip(*(_undisturbed(side, name) for side in sides), strict=True)
            common = [median(known) for row in by_round if len(known := [x for x in row if x is not None]) > 1]
            by = shift(common)
            if by:
                yield (
                    f"The {what} of all sides {'rose' if by > 0 else 'fell'} by a factor of {math.exp(abs(by)):.2f} "
                    "while the run went on: ratios stand, since the sides took turns, but do not quote seconds."
                )


def shift(values: Sequence[float], margin: float = _MARGIN) -> float:
    """How much higher logarithms are behind a point than before it; 0.0 where there is no such point.

    Args:
        values: logarithms of times, in the order of the rounds.
        margin: the least distance of the 15th and the 85th percentile on both sides.
    """
    best = 0.0
    beside = max(_FEWEST_BESIDE, math.ceil(_SHARE_BESIDE * len(values)))
    for at in range(beside, len(values) - beside + 1):
        before, behind = values[:at], values[at:]
        rises = quantile(behind, _TAIL) - quantile(before, 1 - _TAIL) > margin
        falls = quantile(before, _TAIL) - quantile(behind, 1 - _TAIL) > margin
        by = median(behind) - median(before)
        if (rises or falls) and abs(by) > abs(best):
            best = by
    return best


def _first(values: Sequence[float], margin: float = _FIRST_MARGIN) -> float:
    """How much lower the later ones are than the first, where it is the slowest by far; else 0.0."""
    later = values[1:]
    by = median(later) - values[0]
    return by if by < -margin and values[0] - max(later) > margin / 2 else 0.0


def _finding(record: Record, name: str, by: float) -> Finding:
    factor = math.exp(abs(by))
    if by < 0:
        return Finding(
            "cold side",
            f"the {_NAMES[name]} of plan {record.label!r} was {factor:.2f} times as long at the beginning of the run "
            "as later, against the other sides in the same rounds: it was not warm; ask for more warm-up rounds",
            (record,),
        )
    return Finding(
        "throttled side",
        f"the {_NAMES[name]} of plan {record.label!r} rose by a factor of {factor:.2f} while the run went on, and "
        "those of the other sides in the same rounds did not: times of this run cannot be compared; let the machine "
        "rest and measure again",
        (record,),
    )


def _against(record: Record, others: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Logarithms of a side's undisturbed times, and of their ratios to the median of the others in that round."""
    ours, relative = [], []
    rows = zip(*(_undisturbed(side, name) for side in [record, *others]), strict=True)
    for own, *rest in rows:
        known = [x for x in rest if x is not None]
        if own is not None and known:
            ours.append(own)
            relative.append(own - median(known))
    return ours, relative


def _undisturbed(record: Record, name: str) -> list[float | None]:
    pairs = zip(record.values[name], record.values["disturbed"], strict=True)
    return [None if bad or x <= 0 else math.log(x) for x, bad in pairs]


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """The sides of each timed run, those that were timed in all of its rounds."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.task == "speed" and record.error is None and "disturbed" in record.values:
            found.setdefault((record.run, str(record.point)), []).append(record)
    return [sides for sides in found.values() if len({len(side.values["disturbed"]) for side in sides}) == 1]
