"""The tidy table of a run: a row for each number. Every page, file and terminal view is a rendering of it.

A number is of one plan and one metric, over one point of a task (`over` is "point"), over several points that a page
shows together ("points"), or of the plan as the main table has it ("plan").
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, NamedTuple

from kvtailor.bench.kinds import KINDS, metric_of
from kvtailor.bench.measure.paired_hits import share
from kvtailor.bench.measure.statistics import Estimate, geometric_mean, mean
from kvtailor.bench.report.points import series_of
from kvtailor.bench.report.tables.grid import csv_cell
from kvtailor.bench.report.tables.quality import NATS, Measure, difference, documents_of
from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    import pandas

__all__ = ["PLAN", "POINT", "POINTS_TOGETHER", "Number", "as_long_csv", "frame_of", "number_over", "numbers_of", "tidy"]

POINT, POINTS_TOGETHER, PLAN = "point", "points", "plan"
_CSV = ("model", "text", "point", "plan", "metric", "unit", "value", "low", "high", "n")
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
"""Fields of records that are numbers of every task, with their units."""


class Number(NamedTuple):
    """A row of the table.

    Attributes:
        plan: as the user wrote it.
        model: its name or folder.
        text: what the tokens came from; None where the task has no text.
        task: name of the task.
        point: the task's coordinates as JSON; of several points what they share.
        metric: what was measured; one that ends in `_over_full` is a paired difference to 'full', or a ratio of times.
        unit: of `value`, `low` and `high`.
        value: the number.
        low, high: its 95 % interval; None without one.
        n: windows, documents, examples or rounds behind it; None where it is of none of these.
        over: `POINT`, `POINTS_TOGETHER` or `PLAN`.
        plan_hash: content hash of the plan; "own" for the model's own cache.
        keys: of the records that it was computed from, see `Record.key`.
    """

    plan: str
    model: str
    text: str | None
    task: str
    point: str
    metric: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    over: str = POINT
    plan_hash: str = ""
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Task and metric, as `results.csv` and `Row.numbers` have it."""
        return f"{self.task}.{self.metric}"

    @property
    def estimate(self) -> Estimate:
        """The value with its interval."""
        return Estimate(self.value, self.low, self.high, self.n or 0)


def number_over(metric: str, unit: str, found: float | Estimate, records: Sequence[Record], task: str = "") -> Number:
    """Return a number of a plan over some records, of which it has the texts, the keys, and the point if it is one.

    Args:
        metric, unit: see `Number`.
        found: the value, with its interval where it has one.
        records: behind it, one of the plan first.
        task: its name; empty: that of the first record.
    """
    first = records[0]
    value, low, high, count = astuple(found) if isinstance(found, Estimate) else (found, None, None, None)
    return Number(
        plan=first.label,
        model=first.model,
        text=", ".join(dict.fromkeys(r.text for r in records if r.text is not None)) or None,
        task=task or first.task,
        point=json.dumps(dict(first.point) if len({str(r.point) for r in records}) == 1 else {}, sort_keys=True),
        metric=metric,
        unit=unit,
        value=value,
        low=low,
        high=high,
        n=count,
        over=PLAN,
        plan_hash=first.plan_hash,
        keys=tuple(dict.fromkeys(record.key for record in records)),
    )


def numbers_of(record: Record) -> Iterator[Number]:
    """Return what one record holds: its fields, metrics and timings. What was not measured has no row."""
    of = number_over("", "", 0.0, [record])._replace(over=POINT)
    for name, unit in _FIELDS.items():
        value = getattr(record, name)
        if value is not None:
            yield of._replace(metric=name, unit=unit, value=value)
    for name, number in record.metrics.items():
        if number is not None and math.isfinite(number):
            found = _interval(record, name)
            low, high = (None, None) if found is None else (found.low, found.high)
            unit = _unit(record.task, name)
            yield of._replace(metric=name, unit=unit, value=number, low=low, high=high, n=record.samples)
    rate = record.metrics.get("tokens_per_second")
    if record.task == "speed" and rate is not None and record.bytes_held:
        per_gib = rate / (record.bytes_held / 2**30)
        yield of._replace(metric="tokens_per_second_per_gib", unit="tokens per second per GiB", value=per_gib)
    for name, timing in record.timings.items():
        count = timing.get("count")
        for which in ("median", "q1", "q3", "p10"):
            at = timing.get(which)
            if at is not None:
                n = None if count is None else int(count)
                yield of._replace(metric=f"{name}_{which}", unit="seconds", value=at, n=n)


def tidy(records: Sequence[Record], measures: Sequence[Measure], rows: Iterable[Iterable[Number]]) -> list[Number]:
    """Return the whole table.

    Args:
        records: of one model, dtype and device.
        measures: from `measures_of` the same records, for what is over several points.
        rows: numbers of each plan, see `Row.numbers`.
    """
    there = [record for record in records if record.error is None and not record.missing]
    by_plan = {record.plan_hash: record for record in there}
    found: list[Number] = []
    for task in dict.fromkeys(record.task for record in there):
        for series in series_of(there, task):
            full = next((record for record in series.records.values() if record.is_full), None)
            for record in series.records.values():
                own = list(numbers_of(record))
                found += own
                if full is not None and record is not full and own:
                    found += _differences(record, full, own[0])
    for measure in measures:
        if measure.task == "needle":
            found += _over_points(measure, by_plan)
    return found + [number for row in rows for number in row]


def frame_of(numbers: Sequence[Number]) -> pandas.DataFrame:
    """Return the table as a pandas frame with the fields of `Number` as columns; what was not measured is NaN or NA.

    Raises:
        KvtailorError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise KvtailorError(
            "asked for a DataFrame, which needs pandas, and it is not installed: pip install 'kvtailor[bench]'. "
            "`results.csv` has the same numbers without it"
        ) from error
    found = pandas.DataFrame.from_records(list(numbers), columns=list(Number._fields))
    return found.astype({"value": "float64", "low": "float64", "high": "float64", "n": "Int64"})


def as_long_csv(numbers: Sequence[Number]) -> str:
    """Return the numbers over points as CSV; what was not measured has no row, and what has no interval no ends.

    `metric` is `TASK.NAME`, and `point` JSON. Numbers of plans are left out, since they are these over again.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for each in numbers:
        if each.over != PLAN:
            place = each.model, each.text, each.point, each.plan
            cells = (*place, each.name, each.unit, each.value, each.low, each.high, each.n)
            writer.writerow(["" if cell is None else csv_cell(cell) for cell in cells])
    return out.getvalue()


_MEANS: dict[str, Callable[[Sequence[float]], Estimate]] = {
    "acceptance": mean,
    "emitted_per_verification": mean,
    "speed_up": geometric_mean,
    "speed_up_own": geometric_mean,
}
"""Metrics of a draft that have an interval over random states, by the names of their samples."""


def _interval(record: Record, name: str) -> Estimate | None:
    """Of shares and of what a draft does; other means have an interval of their difference to 'full'."""
    values = record.values.get({"accuracy": "hit"}.get(name, name), ())
    if record.task == "speculation" and name in _MEANS and values:
        return _MEANS[name](values)
    if name not in ("accuracy", "recall") or not values or not all(0 <= value <= 1 for value in values):
        return None
    return share(values)


def _differences(record: Record, full: Record, of: Number) -> Iterator[Number]:
    for name, unit in (("nll", NATS), ("hit", "share"), ("recall", "share"), ("score", "score")):
        ours, theirs = record.values.get(name, ()), full.values.get(name, ())
        if not ours or len(ours) != len(theirs) or not all(map(math.isfinite, (*ours, *theirs))):
            continue
        top = None if name == "nll" else 100.0 if record.task == "longcontext" else 1.0
        if top is not None and not all(0 <= value <= top for value in (*ours, *theirs)):
            top = None
        found = difference(ours, theirs, documents=documents_of(record) if name == "nll" else (), top=top)
        named = {"nll": "answer_nll", "hit": "accuracy"}.get(name, name) if record.task == "needle" else name
        both = of._replace(n=found.count, keys=(record.key, full.key))
        yield both._replace(metric=f"{named}_over_full", unit=unit, value=found.value, low=found.low, high=found.high)
        if record.task == "perplexity":
            ratio, low, high, _ = astuple(found.map(math.exp))
            yield both._replace(metric="perplexity_over_full", unit="ratio", value=ratio, low=low, high=high)


def _over_points(measure: Measure, by_plan: Mapping[str, Record]) -> Iterator[Number]:
    """Right answers over all lengths and depths, as the pages have them."""
    for plan, score in measure.scores.items():
        name = "recall" if measure.name.split(",")[1].strip() == "recall" else "accuracy"
        own = number_over(name, "share", score.value / 100, [by_plan[plan]], "needle")._replace(
            text="generated documents",
            point=json.dumps({"all points of": measure.name}),
            n=score.samples,
            over=POINTS_TOGETHER,
            keys=score.keys,
        )
        yield own
        found = score.difference
        if found is not None and not by_plan[plan].is_full:
            value, low, high, count = astuple(found.map(lambda each: each / 100))
            yield own._replace(metric=f"{name}_over_full", value=value, low=low, high=high, n=count)


def _unit(task: str, name: str) -> str:
    """The unit that the task declares; of a task whose metrics are known only when it has run, its own score."""
    metric = metric_of(task, name)
    if metric is not None:
        return metric.unit
    return "score" if task in KINDS and KINDS[task].metrics is None else ""
