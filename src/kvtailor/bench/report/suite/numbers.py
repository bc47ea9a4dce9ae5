"""One number of a suite's table, from the records that hold it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.paired_hits import share, share_difference
from kvtailor.bench.measure.statistics import Estimate, geometric_mean, mean, mean_difference
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.cells import SuiteCell

__all__ = ["SHARES", "documents_of", "measured", "paired_samples", "point_of"]

SHARES = ("hit", "recall", "score")
"""Values that are right answers, or parts of them, where all of them are between 0 and a top."""


def point_of(record: Record) -> str:
    """The record's point as text, equal for equal points."""
    return json.dumps(record.point, sort_keys=True, default=str)


def measured(
    cell: SuiteCell, ours: Sequence[Sequence[Record]], theirs: Sequence[Sequence[Record]] | None
) -> Estimate | None:
    """The number of a cell, not scaled; None where it was not measured.

    Args:
        cell: what is shown.
        ours: the records of each of its tasks under its plan, at least one each.
        theirs: the same under the plan that it is compared with; None where it is compared with none.
    """
    if cell.measure.startswith("paired."):
        return _paired(cell.measure.removeprefix("paired."), ours, theirs or (), cell.shows)
    found = _plain(cell.measure, ours)
    if theirs is None or found is None:
        return found
    base = _plain(cell.measure, theirs)
    if base is None or not base.value:
        return None
    return Estimate(found.value / base.value - (cell.shows == "change"), None, None, found.count)


def _plain(measure: str, tasks: Sequence[Sequence[Record]]) -> Estimate | None:
    head, _, name = measure.partition(".")
    if head in ("mean", "geometric"):
        values = [value for records in tasks for record in records for value in record.values.get(name, ())]
        if not values or not all(map(math.isfinite, values)):
            return None
        if head == "geometric":
            return geometric_mean(values) if min(values) > 0 else None
        top = _top(name, tasks, values)
        return mean(values) if top is None else share([value / top for value in values]).map(lambda each: top * each)
    per_task = [_of_task(measure, records) for records in tasks]
    numbers = [number for number in per_task if number is not None]
    return Estimate(fmean(numbers), None, None, len(numbers)) if len(numbers) == len(per_task) else None


def _of_task(measure: str, records: Sequence[Record]) -> float | None:
    head, _, name = measure.partition(".")
    if name:
        read: Callable[[Record], float | None] = (
            (lambda r: r.metrics.get(name)) if head == "metrics" else (lambda r: r.timings.get(name, {}).get("median"))
        )
        numbers = [number for record in records if (number := read(record)) is not None]
        return fmean(numbers) if len(numbers) == len(records) else None
    largest = max(records, key=lambda record: record.tokens_seen or 0)
    held, whole = largest.bytes_held, largest.bytes_full
    if measure not in ("kept", "reduction", "compression"):
        number = getattr(largest, measure)
        return None if number is None else float(number)
    if not held or not whole:
        return None
    return {"kept": held / whole, "reduction": 1 - held / whole, "compression": whole / held}[measure]


def _paired(
    name: str, ours: Sequence[Sequence[Record]], theirs: Sequence[Sequence[Record]], shows: str
) -> Estimate | None:
    """Mean difference over the samples of both; None where one side has others.

    A ratio is the geometric mean of the samples' ratios. Of times, what was disturbed on either side is left out.
    """
    samples = paired_samples(name, ours, theirs)
    if samples is None:
        return None
    pairs = list(zip(*samples, strict=True))
    if shows == "value":
        if [list(each) for each in ours] == [list(each) for each in theirs]:
            # What is compared with itself differs by nothing, and chance has no part in it.
            return Estimate(0.0, None, None, len(pairs))
        top = _top(name, ours, [x for both in pairs for x in both])
        if top is not None:
            shares = zip(*((a / top, b / top) for a, b in pairs), strict=True)
            return share_difference(*shares).map(lambda each: top * each)
        return mean_difference(*zip(*pairs, strict=True), documents=documents_of(ours))
    if not all(x > 0 for both in pairs for x in both):
        return None
    return geometric_mean([mine / other for mine, other in pairs]).map(lambda each: each - (shows == "change"))


def paired_samples(
    name: str, ours: Sequence[Sequence[Record]], theirs: Sequence[Sequence[Record]]
) -> tuple[list[float], list[float]] | None:
    """The samples of two plans in the same order, matched by task, point and text; None where one side has others.

    Args:
        name: of the values.
        ours, theirs: the records of each task under each plan. What was disturbed on either side is left out.
    """
    pairs: list[tuple[float, float]] = []
    for mine, other in zip(ours, theirs, strict=True):
        by_point = {(record.text_hash, point_of(record)): record for record in other}
        for record in mine:
            pair = by_point.get((record.text_hash, point_of(record)))
            values = [each.values.get(name, ()) for each in (record, pair) if each is not None]
            if pair is None or not values[0] or len(values[0]) != len(values[1]):
                return None
            bad = [_disturbed(each, name) for each in (record, pair)]
            pairs += [
                both for both, *left_out in zip(zip(*values, strict=True), *bad, strict=True) if not any(left_out)
            ]
    if not pairs or not all(math.isfinite(x) for both in pairs for x in both):
        return None
    return [mine for mine, _ in pairs], [other for _, other in pairs]


def documents_of(tasks: Sequence[Sequence[Record]]) -> Sequence[float]:
    """The document of each sample, where one record has them all and says so."""
    return tasks[0][0].values.get("document", ()) if len(tasks) == len(tasks[0]) == 1 else ()


def _top(name: str, tasks: Sequence[Sequence[Record]], values: Sequence[float]) -> float | None:
    """The score of a right answer; None for what is none, or lies outside of 0 and it."""
    percent = all(record.task == "longcontext" for records in tasks for record in records)
    top = 100.0 if percent else 1.0
    return top if name in SHARES and all(0 <= value <= top for value in values) else None


def _disturbed(record: Record, name: str) -> Sequence[float]:
    """For each sample whether it does not count; only what is timed by the clock can be disturbed."""
    kind = KINDS.get(record.task)
    told = record.values.get("disturbed") if kind is not None and name in kind.timings else None
    return told or (0.0,) * len(record.values[name])
