"""Every text and task of a run, each with the plans' scores and their paired differences to 'full'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.equivalence import Losses, losses_of
from kvtailor.bench.measure.paired_hits import share_difference
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.report.points import Series, base, named, series_of
from kvtailor.bench.schema import Record

__all__ = [
    "NATS",
    "POINTS",
    "Measure",
    "Score",
    "difference",
    "documents_of",
    "documents_over",
    "measures_of",
    "official_is_mean",
]

NATS = "nats per token"
POINTS = "points"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one plan reached in one question.

    Attributes:
        value: in the measure's unit.
        difference: to 'full' over the same samples, in the measure's unit of differences; None without 'full', or
            where the task gives no number for one sample.
        losses: the same, as a verdict needs it.
        low, high: where the value lies if the ends of the difference's interval are added to that of 'full'; None too
            where the value is not the mean that the difference is of.
        samples: windows, documents or examples behind it.
        points: records that these are spread over, such as one for each length and depth of needles.
        bytes_held: of the cache when it was weighed there, the largest over the records.
        ratio: bytes over the full cache's, of the same record.
        keys: of the records behind it, and behind it those of 'full' that the difference is to.
    """

    value: float
    difference: Estimate | None = None
    losses: Losses | None = None
    low: float | None = None
    high: float | None = None
    samples: int
    points: int = 1
    bytes_held: int | None = None
    ratio: float | None = None
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One question, over the same samples for every plan.

    Attributes:
        name: what distinguishes it from the others, such as a text or the kind of document.
        task: name of the task.
        unit: of the scores: "perplexity", "%", or "score" where they are on a scale of the task's own.
        difference_unit: of the differences: `NATS`, `POINTS` (of percent) or "score".
        lower_is_better: whether a smaller value is the better one.
        is_base: the main table shows this point of its task.
        scores: by plan hash.
    """

    name: str
    task: str
    unit: str
    difference_unit: str
    lower_is_better: bool
    is_base: bool
    scores: Mapping[str, Score] = field(default_factory=dict)


def measures_of(records: Sequence[Record], full: str | None) -> list[Measure]:
    """Perplexity by text and point, needles by kind, long-context and harness tasks by their names, and of other tasks
    that judge answers each declared metric that is a mean over samples.

    Args:
        records: of one model.
        full: plan hash of 'full'; None where it was not measured.
    """
    return [*_perplexities(records, full), *_needles(records, full), *_sets(records, full), *_declared(records, full)]


@lru_cache(maxsize=4096)
def difference(
    ours: tuple[float, ...],
    theirs: tuple[float, ...],
    *,
    documents: tuple[float, ...] = (),
    top: float | None = None,
    scale: float = 1.0,
) -> Estimate:
    """Mean of `ours - theirs` over paired samples with its interval, computed once for the same samples.

    Args:
        ours, theirs: sample i of both is the same.
        documents: see `mean_difference`.
        top: the score of a right answer, for scores between 0 and it; None: they have no such range.
        scale: what the result is multiplied by.
    """
    if top is None and ours == theirs and ours:
        # Samples that are all equal do not show how far the next ones may be apart.
        return Estimate(0.0, None, None, len(ours))
    found = (
        mean_difference(ours, theirs, documents=documents)
        if top is None
        else share_difference(tuple(x / top for x in ours), tuple(x / top for x in theirs))
    )
    return found.map(lambda each: scale * (top or 1.0) * each)


def documents_of(record: Record) -> tuple[float, ...]:
    """Which document each window is from; empty where the record lacks it."""
    return record.values.get("document", ())


def documents_over(records: Sequence[Record]) -> tuple[float, ...]:
    """Which document each sample of some records is from, numbered over all of them; empty where that is not known.

    Each text numbers its own documents from 0. A text that has not told them is a document by itself.
    """
    if len(records) == 1:
        return documents_of(records[0])
    found: dict[tuple[str | None, float], int] = {}
    samples = [
        (record.text_hash, document)
        for record in records
        for document in documents_of(record) or (-1.0,) * len(record.values["nll"])
    ]
    return tuple(float(found.setdefault(each, len(found))) for each in samples)


def official_is_mean(record: Record) -> bool:
    """Whether a long-context record's own score is the mean of its examples' scores; a geometric mean of several
    metrics is not."""
    value, scores = record.metrics.get("score"), record.values.get("score", ())
    return value is None or not scores or math.isclose(value, fmean(scores), rel_tol=1e-6, abs_tol=1e-6)


def _perplexities(records: Sequence[Record], full: str | None) -> Iterator[Measure]:
    series = series_of(records, "perplexity")
    shown = base(series)
    for each, name in zip(series, named(series, text=True), strict=True):
        scores = _joined([each], full, "nll", top=None, lower_is_better=True)
        if scores:
            yield Measure(
                name=name,
                task="perplexity",
                unit="perplexity",
                difference_unit=NATS,
                lower_is_better=True,
                is_base=each is shown,
                scores={plan: _perplexity(score, each.records[plan]) for plan, score in scores.items()},
            )


def _perplexity(score: Score, record: Record) -> Score:
    """A score in nats as one in perplexity; its difference stays in nats."""
    middle = record.metrics.get("nll")
    low, high = (None if end is None else math.exp(end) for end in (score.low, score.high))
    return replace(score, value=math.exp(score.value if middle is None else middle), low=low, high=high)


def _needles(records: Sequence[Record], full: str | None) -> Iterator[Measure]:
    """One for each kind of document and place of the question, over all lengths and depths that 'full' has too."""
    groups: dict[tuple[str, bool], list[Series]] = {}
    for each in series_of(records, "needle"):
        place = str(each.point.get("kind")), bool(each.point.get("question_outside"))
        groups.setdefault(place, []).append(each)
    for (kind, outside), members in groups.items():
        what = "recall" if any("recall" in r.values for each in members for r in each.records.values()) else "hit"
        joined = _joined(members, full, what, top=1.0)
        if joined:
            name = f"{kind}, {'recall' if what == 'recall' else 'right'}" + (", question outside" if outside else "")
            yield Measure(
                name=name,
                task="needle",
                unit="%",
                difference_unit=POINTS,
                lower_is_better=False,
                is_base=True,
                scores=joined,
            )


def _sets(records: Sequence[Record], full: str | None) -> Iterator[Measure]:
    for task, parts in (("longcontext", ("benchmark", "subset")), ("harness", ("task",))):
        top = 100.0 if task == "longcontext" else 1.0
        groups: dict[str, list[Series]] = {}
        for each in series_of(records, task):
            groups.setdefault(" ".join(str(each.point.get(part)) for part in parts), []).append(each)
        for name, members in groups.items():
            for each, called in _called(name, members):
                lower = any(note.endswith("lower is better.") for r in each.records.values() for note in r.notes)
                found = _scored(each, full, "score", called, top=top, lower=lower, is_base=each is base(members))
                scores = found.scores or _unpaired(each)
                if task == "longcontext":
                    scores = {plan: _official(score, each.records[plan]) for plan, score in scores.items()}
                if scores:
                    yield replace(found, scores=scores)


def _declared(records: Sequence[Record], full: str | None) -> Iterator[Measure]:
    for task in dict.fromkeys(record.task for record in records):
        if task not in KINDS or KINDS[task].shown is not None or KINDS[task].of_cost:
            continue
        members = series_of(records, task)
        for metric in KINDS[task].metrics or ():
            if metric.mean_of is None or metric.higher_is_better is None:
                continue
            top, lower = 1.0 if metric.unit == "share" else None, not metric.higher_is_better
            for each, called in _called(f"{task} {metric.name}".replace("_", " "), members):
                is_base = each is base(members)
                found = _scored(each, full, metric.mean_of, called, top=top, lower=lower, is_base=is_base)
                if found.scores:
                    yield found if found.unit == "%" or not metric.unit else replace(found, unit=metric.unit)


def _called(name: str, members: Sequence[Series]) -> Iterator[tuple[Series, str]]:
    """Points with their names, which have what tells them apart where there are several."""
    for each, further in zip(members, named(members), strict=True):
        yield each, name if len(members) == 1 else f"{name}, {further}"


def _scored(
    each: Series, full: str | None, values: str, name: str, *, top: float | None, lower: bool, is_base: bool
) -> Measure:
    """A question at one point: in percent where all its values lie between 0 and a top, else on their own scale."""
    known = [x for record in each.records.values() for x in record.values.get(values, ())]
    share = top is not None and bool(known) and not lower and all(0.0 <= x <= top for x in known)
    return Measure(
        name=name,
        task=each.task,
        unit="%" if share else "score",
        difference_unit=POINTS if share else "score",
        lower_is_better=lower,
        is_base=is_base,
        scores=_joined([each], full, values, top=top if share else None, lower_is_better=lower),
    )


def _unpaired(series: Series) -> dict[str, Score]:
    """The main metric, where a task gives no number for one document."""
    name = str(series.point.get("metric"))
    found = {plan: (record, record.metrics.get(name)) for plan, record in series.records.items()}
    return {
        plan: Score(
            value=value,
            samples=record.samples or 0,
            bytes_held=record.bytes_held,
            ratio=_ratio(record),
            keys=(record.key,),
        )
        for plan, (record, value) in found.items()
        if value is not None
    }


def _official(score: Score, record: Record) -> Score:
    """The set's own score; where it is not the mean of the examples' it has no interval: that one is of the mean."""
    value = record.metrics.get("score")
    if value is None:
        return score
    if official_is_mean(record):
        return replace(score, value=value)
    return replace(score, value=value, low=None, high=None)


def _joined(
    members: Sequence[Series], full: str | None, name: str, *, top: float | None, lower_is_better: bool = False
) -> dict[str, Score]:
    """Scores over all the samples of several points; without those that 'full' does not have, and of plans that lack
    one of them no score.

    With a `top` they are in percent of it.
    """
    scale = 1.0 if top is None else 100.0 / top
    percent = None if top is None else 100.0
    if full is not None and any(full in each.records for each in members):
        members = [each for each in members if full in each.records]
    references = [each.records[full] for each in members if full is not None and full in each.records]
    theirs = tuple(x for record in references for x in record.values.get(name, ()))
    found = {}
    for plan in dict.fromkeys(plan for each in members for plan in each.records):
        mine = [each.records[plan] for each in members if plan in each.records and name in each.records[plan].values]
        values = tuple(x for record in mine for x in record.values[name])
        if len(mine) < len(members) or not values or not all(map(math.isfinite, values)):
            continue
        paired = losses = None
        low = high = None
        if len(theirs) == len(values) and all(map(math.isfinite, theirs)):
            documents = documents_of(mine[0]) if name == "nll" and len(mine) == 1 else ()
            paired = difference(values, theirs, documents=documents, top=top, scale=scale)
            losses = losses_of(
                [scale * x for x in values],
                [scale * x for x in theirs],
                lower_is_better=lower_is_better,
                documents=documents,
                top=percent,
            )
            low, high = _ends(paired, scale * fmean(theirs), top=percent)
        heaviest = max(mine, key=lambda record: record.bytes_held or 0)
        found[plan] = Score(
            value=scale * fmean(values),
            difference=paired,
            losses=losses,
            low=low,
            high=high,
            samples=len(values),
            points=len(mine),
            bytes_held=heaviest.bytes_held,
            ratio=_ratio(heaviest),
            keys=tuple(dict.fromkeys(each.key for each in [*mine, *(references if paired is not None else [])])),
        )
    return found


def _ends(found: Estimate, start: float, top: float | None) -> tuple[float | None, float | None]:
    """The interval moved to where 'full' is; of scores that end at a top, what lies between 0 and it."""
    if found.ends is None:
        return None, None
    low, high = (start + end for end in found.ends)
    return (low, high) if top is None else (max(0.0, low), min(top, high))


def _ratio(record: Record) -> float | None:
    return record.bytes_held / record.bytes_full if record.bytes_held and record.bytes_full else None
