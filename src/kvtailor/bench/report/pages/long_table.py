"""All numbers of a run as one long CSV table: a row for each number, with what it is of and the unit it is in."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvtailor.bench.kinds import KINDS, metric_of
from kvtailor.bench.measure.paired_hits import share
from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.points import series_of
from kvtailor.bench.report.tables.grid import csv_cell
from kvtailor.bench.report.tables.quality import NATS, Measure, difference, documents_of
from kvtailor.bench.schema import Record

__all__ = ["COLUMNS", "long_table"]

COLUMNS = ("model", "text", "point", "plan", "metric", "unit", "value", "low", "high", "n")

_FIELDS = {
    "tokens_seen": "tokens",
    "tokens_held": "tokens",
    "tokens_read": "tokens",
    "bytes_held": "bytes",
    "bytes_full": "bytes",
    "bytes_resident": "bytes",
    "bytes_peak": "bytes",
    "bytes_peak_decode": "bytes",
    "floor_seconds": "seconds",
}


class _Line(NamedTuple):
    metric: str
    unit: str
    value: float
    low: float | None
    high: float | None
    n: int | None


def long_table(records: Sequence[Record], measures: Sequence[Measure]) -> str:
    """CSV with the columns of `COLUMNS`; what was not measured has no row, and what has no interval no ends.

    `low` and `high` are the 95 % interval of `value`, in its unit. `metric` is `TASK.NAME`; one that ends in
    `_over_full` is the mean difference to 'full' over the same samples. `point` is JSON: of several points of a task
    that a number is over, what they share. `n` counts windows, documents, examples or rounds.

    Args:
        records: of one model, dtype and device.
        measures: from `measures_of` the same records, for what is over several points.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for place, lines in _all(records, measures):
        for line in lines:
            writer.writerow(["" if cell is None else csv_cell(cell) for cell in (*place, *line)])
    return out.getvalue()


_Place = tuple[str, str | None, str, str]


def _all(records: Sequence[Record], measures: Sequence[Measure]) -> Iterator[tuple[_Place, Iterator[_Line]]]:
    there = [record for record in records if record.error is None and not record.missing]
    by_plan = {record.plan_hash: record for record in there}
    for task in dict.fromkeys(record.task for record in there):
        for series in series_of(there, task):
            full = next((record for record in series.records.values() if record.is_full), None)
            for record in series.records.values():
                place = record.model, record.text, json.dumps(series.point, sort_keys=True), record.label
                yield place, _of_record(record, full)
    if there:
        for measure in (measure for measure in measures if measure.task == "needle"):
            yield from _over_points(there[0].model, measure, by_plan)


def _of_record(record: Record, full: Record | None) -> Iterator[_Line]:
    for name, unit in _FIELDS.items():
        value = getattr(record, name)
        if value is not None:
            yield _Line(f"{record.task}.{name}", unit, value, None, None, None)
    for name, number in record.metrics.items():
        if number is not None and math.isfinite(number):
            found = _interval(record, name, number)
            low, high = (None, None) if found is None else (found.low, found.high)
            yield _Line(f"{record.task}.{name}", _unit(record.task, name), number, low, high, record.samples)
    for name, timing in record.timings.items():
        count = timing.get("count")
        for which in ("median", "q1", "q3", "p10"):
            at = timing.get(which)
            if at is not None:
                n = None if count is None else int(count)
                yield _Line(f"{record.task}.{name}_{which}", "seconds", at, None, None, n)
    if full is not None and record is not full:
        yield from _differences(record, full)


def _interval(record: Record, name: str, number: float) -> Estimate | None:
    """Of shares, which have their own; other means have one of their difference to 'full'."""
    values = record.values.get({"accuracy": "hit"}.get(name, name), ())
    if name not in ("accuracy", "recall") or not values or not all(0 <= value <= 1 for value in values):
        return None
    return share(values)


def _differences(record: Record, full: Record) -> Iterator[_Line]:
    for name, unit in (("nll", NATS), ("hit", "share"), ("recall", "share"), ("score", "score")):
        ours, theirs = record.values.get(name, ()), full.values.get(name, ())
        if not ours or len(ours) != len(theirs) or not all(map(math.isfinite, (*ours, *theirs))):
            continue
        top = None if name == "nll" else 100.0 if record.task == "longcontext" else 1.0
        if top is not None and not all(0 <= value <= top for value in (*ours, *theirs)):
            top = None
        found = difference(ours, theirs, documents=documents_of(record) if name == "nll" else (), top=top)
        named = {"nll": "answer_nll", "hit": "accuracy"}.get(name, name) if record.task == "needle" else name
        yield _Line(f"{record.task}.{named}_over_full", unit, found.value, found.low, found.high, found.count)
        if record.task == "perplexity":
            low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
            yield _Line("perplexity.perplexity_over_full", "ratio", math.exp(found.value), low, high, found.count)


def _over_points(
    model: str, measure: Measure, by_plan: Mapping[str, Record]
) -> Iterator[tuple[_Place, Iterator[_Line]]]:
    """Right answers over all lengths and depths, as the pages have them."""
    for plan, score in measure.scores.items():
        name = "recall" if measure.name.split(",")[1].strip() == "recall" else "accuracy"
        lines = [_Line(f"needle.{name}", "share", score.value / 100, None, None, score.samples)]
        found = score.difference
        if found is not None and not by_plan[plan].is_full:
            low, high = (None if end is None else end / 100 for end in (found.low, found.high))
            lines.append(_Line(f"needle.{name}_over_full", "share", found.value / 100, low, high, found.count))
        point = json.dumps({"all points of": measure.name})
        yield (model, "generated documents", point, by_plan[plan].label), iter(lines)


def _unit(task: str, name: str) -> str:
    """The unit that the task declares; of a task whose metrics are known only when it has run, its own score."""
    metric = metric_of(task, name)
    if metric is not None:
        return metric.unit
    return "score" if task in KINDS and KINDS[task].metrics is None else ""
