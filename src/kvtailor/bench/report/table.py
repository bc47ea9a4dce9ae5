"""The tidy table of a run: a row for each number. Every page, file and terminal view is a rendering of it.

A number is of one plan and one metric, over one point of a task (`over` is "point"), over several points that a page
shows together ("points"), or of the plan as the main table has it ("plan"). These last ones are a `Row`: of each task
those of the point that most plans have; of perplexity over all texts that the same plans have, and of needles over all
lengths, depths and kinds that 'full' was asked too.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtailor.bench.kinds import KINDS, metric_of
from kvtailor.bench.measure.paired_hits import share
from kvtailor.bench.measure.statistics import Estimate, geometric_mean, mean, wilson
from kvtailor.bench.report.points import Series, base, series_of, texts_together
from kvtailor.bench.report.tables.grid import csv_cell
from kvtailor.bench.report.tables.quality import NATS, Measure, difference, documents_of, documents_over
from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError
from kvtailor.presets import FULL

if TYPE_CHECKING:
    import pandas

__all__ = [
    "OWN",
    "PLAN",
    "POINT",
    "POINTS_TOGETHER",
    "Number",
    "Row",
    "as_long_csv",
    "asked_of_both",
    "frame_of",
    "number_over",
    "numbers_of",
    "rows_of",
    "tidy",
]

POINT, POINTS_TOGETHER, PLAN = "point", "points", "plan"
OWN = "own"
"""The plan hash of the model's own cache."""
_CSV = ("model", "text", "point", "plan", "metric", "unit", "value", "low", "high", "n", "dtypes")
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
        dtypes: in which the model computes, and caches hold, in words.
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
    dtypes: str | None = None

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
        dtypes=first.dtypes,
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
            cells = (*place, each.name, each.unit, each.value, each.low, each.high, each.n, each.dtypes)
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a report has about one plan.

    Attributes:
        label: the plan as the user wrote it.
        plan: canonical form.
        plan_hash: content hash; "own" for the model's own cache.
        numbers: by task and metric, such as "fidelity.kl"; what was not measured is not there. Those of "cache" are of
            the perplexity windows, else of the longest needles, else of another task: `tokens_held` (a mean over rows,
            layers and heads), `tokens_seen`, `bytes_held`, `bytes_full` and their `ratio`.
            "perplexity.nll_over_full" and "needle.answer_nll_over_full" are mean paired differences to 'full',
            "speed.ttft_over_full" and "speed.tpot_over_full" ratios of medians to that of 'full' in the same run.
        errors: why numbers are missing.
    """

    label: str
    plan: str
    plan_hash: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    def value(self, name: str) -> float | None:
        """Return a number by task and metric; None: not measured."""
        return self.numbers[name].value if name in self.numbers else None

    def estimate(self, name: str) -> Estimate | None:
        """Return a number by task and metric with its 95 % interval; None: not measured."""
        return self.numbers[name].estimate if name in self.numbers else None

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the keys of the records that a number was computed from."""
        return self.numbers[name].keys if name in self.numbers else ()

    @property
    def is_full(self) -> bool:
        """Whether it is of the null plan, which everything is compared with."""
        return self.plan == FULL

    @property
    def ratio(self) -> float | None:
        """Bytes held over those of the uncompressed cache."""
        return self.value("cache.ratio")

    @property
    def bytes_held(self) -> int | None:
        """Bytes of the whole cache."""
        held = self.value("cache.bytes_held")
        return None if held is None else int(held)

    @property
    def loss(self) -> Estimate | None:
        """Mean paired difference to 'full' in nats per token, over the windows of all texts."""
        return self.estimate("perplexity.nll_over_full")

    @property
    def accuracy(self) -> Estimate | None:
        """Share of right answers; its count is that of all answers."""
        return self.estimate("needle.accuracy")

    @property
    def hits(self) -> int | None:
        """Right answers."""
        found = self.accuracy
        return None if found is None else round(found.value * found.count)

    @property
    def recall(self) -> Estimate | None:
        """Mean share of the parts that came, of the answers with several."""
        return self.estimate("needle.recall")

    @property
    def kl(self) -> float | None:
        """Mean KL(full || plan) in nats per token."""
        return self.value("fidelity.kl")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"label": self.label, "plan": self.plan, "plan_hash": self.plan_hash, "errors": self.errors}
        names = ("unit", "value", "low", "high", "n", "keys")
        return found | {
            "numbers": {name: {each: getattr(number, each) for each in names} for name, number in self.numbers.items()}
        }


_OF_SEVERAL = ("needle", "longcontext", "harness")
"""Tasks whose points are different questions, so that no single point stands for the plan."""


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Return rows in the order in which the plans appear, 'full' first and the model's own cache last.

    A plan that this kvtailor does not have (`Record.missing`) has no row.
    """
    order: dict[str, Record] = {}
    for record in records:
        if not record.missing:
            order.setdefault(record.plan_hash, record)
    full = next((h for h, record in order.items() if record.is_full), None)
    ranked = sorted(order, key=lambda h: (h == OWN, h != full))
    shown = {task: base(series_of(records, task)) for task in dict.fromkeys(record.task for record in records)}
    texts = texts_together(records, "perplexity")
    return [_row(order[h], records, shown, texts, full) for h in ranked]


def _row(
    first: Record,
    records: Sequence[Record],
    shown: Mapping[str, Series | None],
    texts: Sequence[Series],
    full: str | None,
) -> Row:
    mine = first.plan_hash
    ours = [record for record in records if record.plan_hash == mine]
    at = {task: _at(series, mine) for task, series in shown.items()}
    needles = asked_of_both(records, mine, full)
    numbers: dict[str, Number] = {}
    for task, record in at.items():
        if record is not None and task not in _OF_SEVERAL:
            numbers |= {each.name: each._replace(over=PLAN) for each in numbers_of(record)}
    more = [
        *_of_cache(_weighed(at, needles)),
        *_of_texts(texts, mine, full),
        *_of_needles(needles, [r for r in records if r.plan_hash == full and r.task == "needle"]),
        *_of_times(at.get("speed"), _at(shown.get("speed"), full)),
    ]
    if len(texts) > 1:
        for name in ("perplexity.nll", "perplexity.perplexity", "perplexity.bits_per_byte"):
            numbers.pop(name, None)
    return Row(
        label=first.label,
        plan=first.plan,
        plan_hash=first.plan_hash,
        numbers=numbers | {each.name: each for each in more},
        errors=tuple(dict.fromkeys(f"{r.task}: {r.error}" for r in ours if r.error is not None)),
    )


def _at(series: Series | None, plan: str | None) -> Record | None:
    return None if series is None or plan is None else series.records.get(plan)


def asked_of_both(records: Sequence[Record], plan: str, full: str | None) -> list[Record]:
    """Return the needle records of a plan at the points that 'full' has too; all where 'full' was not asked."""
    series = [each for each in series_of(records, "needle") if plan in each.records]
    shared = [each for each in series if full in each.records]
    return [each.records[plan] for each in shared or series]


def _weighed(at: Mapping[str, Record | None], needles: Sequence[Record]) -> Record | None:
    """The record whose cache stands for the plan's."""
    first = ("perplexity", "fidelity", "longcontext", "harness", "speed", "memory", "speculation")
    others = [task for task in at if task not in (*first, "needle", "capacity")]
    longest = sorted(needles, key=lambda r: -(r.tokens_seen or 0))
    ranked = [at.get("perplexity"), *longest, *(at.get(task) for task in (*first[1:], *others))]
    return next((r for r in ranked if r is not None and r.bytes_held is not None), None)


def _of_cache(weighed: Record | None) -> Iterator[Number]:
    if weighed is None:
        return
    for name in ("tokens_held", "tokens_seen", "bytes_held", "bytes_full"):
        value = getattr(weighed, name)
        if value is not None:
            yield number_over(name, name.partition("_")[0], value, [weighed], "cache")
    if weighed.bytes_held and weighed.bytes_full:
        yield number_over("ratio", "share", weighed.bytes_held / weighed.bytes_full, [weighed], "cache")


def _of_texts(texts: Sequence[Series], mine: str, full: str | None) -> Iterator[Number]:
    """The loss over the windows of all texts; of several texts means over their windows and tokens too."""
    ours, theirs = ([each.records[plan] for each in texts if plan in each.records] for plan in (mine, full))
    if not ours:
        return
    pairs = _pairs(ours, theirs)
    loss = _paired(pairs, "nll", documents_over([record for record, _ in pairs]))
    if loss is not None:
        yield number_over("nll_over_full", NATS, loss, [*ours, *theirs])
    if len(texts) > 1:
        yield from _over_texts(ours)


def _over_texts(scored: Sequence[Record]) -> Iterator[Number]:
    windows = [x for record in scored for x in record.values.get("nll", ())]
    if windows and all(record.values.get("nll") for record in scored):
        yield number_over("nll", NATS, fmean(windows), scored)
        yield number_over("perplexity", "perplexity", math.exp(fmean(windows)), scored)
    bits = [(record.metrics.get("bits_per_byte"), record.metrics.get("nll"), record.tokens_scored) for record in scored]
    # Bytes of a text are its nats over those of a byte.
    nats = [each * tokens for _, each, tokens in bits if each is not None and tokens]
    sizes = [each * tokens / (rate * math.log(2)) for rate, each, tokens in bits if rate and each and tokens]
    if len(nats) == len(sizes) == len(scored):
        yield number_over("bits_per_byte", "bits per byte", sum(nats) / math.log(2) / sum(sizes), scored)


def _of_needles(needles: Sequence[Record], full: Sequence[Record]) -> Iterator[Number]:
    if not needles:
        return
    hits, answers = sum(int(sum(r.values["hit"])) for r in needles), sum(len(r.values["hit"]) for r in needles)
    yield number_over("accuracy", "share", wilson(hits, answers), needles)
    parts = [part for record in needles for part in record.values.get("recall", ())]
    if parts:
        yield number_over("recall", "share", share(parts), needles)
    pairs = _pairs(needles, full)
    loss = _paired(pairs, "nll", documents_of(pairs[0][0]) if len(pairs) == 1 else ())
    if loss is not None:
        yield number_over("answer_nll_over_full", NATS, loss, [r for side in zip(*pairs, strict=True) for r in side])


def _of_times(timed: Record | None, full: Record | None) -> Iterator[Number]:
    """Times over those of 'full', and how near a token comes to its floor."""
    if timed is None or not timed.timings:
        return
    # Times of two runs may have been taken on a machine in two states.
    if full is not None and full.timings and full.run == timed.run:
        for name in ("ttft", "tpot"):
            top, bottom = timed.timings[name]["median"], full.timings[name]["median"]
            if top is not None and bottom:
                yield number_over(f"{name}_over_full", "ratio", top / bottom, [timed, full])
    median = timed.timings["tpot"]["median"]
    if timed.floor_seconds is not None and median:
        yield number_over("floor_over_tpot", "ratio", timed.floor_seconds / median, [timed])


def _pairs(ours: Sequence[Record], full: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The records that both sides have, matched by task, text and point."""
    theirs = {(r.task, r.text_hash, str(r.point)): r for r in full if r.error is None}
    return [(r, theirs[k]) for r in ours if (k := (r.task, r.text_hash, str(r.point))) in theirs]


def _paired(pairs: Sequence[tuple[Record, Record]], name: str, documents: tuple[float, ...] = ()) -> Estimate | None:
    """Mean difference over the samples of both sides.

    Args:
        pairs: records of both sides.
        name: of the values.
        documents: see `mean_difference`.
    """
    a = tuple(x for r, _ in pairs for x in r.values[name])
    b = tuple(x for _, r in pairs for x in r.values[name])
    # A plan whose records have another number of samples is not paired: a footnote states it.
    if not a or len(a) != len(b) or not all(map(math.isfinite, a + b)):
        return None
    return difference(a, b, documents=documents)
