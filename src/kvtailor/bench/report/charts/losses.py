"""What the large chart can show: for each text and task the share of bytes of each plan, and what it lost there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtailor.bench.report.charts.charts import Drawn
from kvtailor.bench.report.charts.svg import Mark, scatter
from kvtailor.bench.report.front import front_of
from kvtailor.bench.report.pages.browser.pareto import short_name
from kvtailor.bench.report.rows import Row
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure
from kvtailor.bench.report.words import byte_text, significant

__all__ = ["Loss", "Losses", "chart_data", "losses", "picture"]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one plan lost in one question.

    Attributes:
        row: of the plan.
        bytes: held, when the cache was weighed there.
        share: of the uncompressed cache of the same tokens.
        value: the loss; above 0 is worse than 'full'.
        low, high: ends of its 95 % interval; None without one.
        keys: of the records behind it.
    """

    row: Row
    bytes: int
    share: float
    value: float
    low: float | None
    high: float | None
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """One question, with the loss of every plan but 'full', whose loss is 0 at 100 % of the bytes.

    Attributes:
        name: what was asked.
        axis: what a loss is, with its unit.
        unit: of the losses, in a few words.
        full: bytes of the uncompressed cache.
        tokens: that it held; None where no record has them.
        found: of the plans with bytes and a loss.
        front: plan hashes of those that no other beats in bytes and loss, from few bytes to many, 'full' among them.
    """

    name: str
    axis: str
    unit: str
    full: int
    tokens: int | None
    found: tuple[Loss, ...] = field(default_factory=tuple)
    front: tuple[str, ...] = ()


def losses(drawn: Drawn, measures: Sequence[Measure]) -> list[Losses]:
    """Return the questions in which a plan has a loss and bytes: the main table's text first.

    The loss in a text or task is the mean paired difference to 'full', turned so that more is worse; KL has no
    interval.

    Args:
        drawn: the plans, and the records that their bytes are of.
        measures: from `measures_of`.
    """
    full = next((row for row in drawn.plans if row.is_full), None)
    if full is None:
        return []
    ranked = sorted(measures, key=lambda measure: not (measure.is_base and measure.task == "perplexity"))
    found = [*(_of_measure(drawn, measure, full) for measure in ranked), _of_kl(drawn)]
    return [each for each in found if each is not None and each.found]


def _of_measure(drawn: Drawn, measure: Measure, full: Row) -> Losses | None:
    whole = measure.scores.get(full.plan_hash)
    if whole is None:
        return None
    unit = {NATS: NATS, POINTS: "points of right answers"}.get(measure.difference_unit, "of the score")
    found = []
    for row in drawn.plans:
        score = measure.scores.get(row.plan_hash)
        if row.is_full or score is None or score.difference is None or not score.bytes_held or not score.ratio:
            continue
        value, low, high = score.difference.value, score.difference.low, score.difference.high
        if not measure.lower_is_better:
            value, low, high = -value, None if high is None else -high, None if low is None else -low
        found.append(
            Loss(row=row, bytes=score.bytes_held, share=score.ratio, value=value, low=low, high=high, keys=score.keys)
        )
    axis = f"{NATS} over full" if unit == NATS else f"{unit} lost"
    return _losses(drawn, f"{measure.task}: {measure.name}", axis, unit, found)


def _of_kl(drawn: Drawn) -> Losses | None:
    found = []
    for row in drawn.plans:
        record = next((drawn.by_key[key] for key in row.keys("fidelity.kl") if key in drawn.by_key), None)
        if row.is_full or row.kl is None or record is None or not record.bytes_held or not record.bytes_full:
            continue
        share = record.bytes_held / record.bytes_full
        found.append(
            Loss(row=row, bytes=record.bytes_held, share=share, value=row.kl, low=None, high=None, keys=(record.key,))
        )
    return _losses(drawn, "fidelity: KL(full || plan)", f"KL, {NATS}", NATS, found)


def _losses(drawn: Drawn, name: str, axis: str, unit: str, found: Sequence[Loss]) -> Losses | None:
    """The question with the bytes of the uncompressed cache, which all plans were weighed against."""
    finite = tuple(
        each
        for each in found
        if all(math.isfinite(end) for end in (each.value, each.low, each.high) if end is not None)
    )
    if not finite:
        return None
    weighed = [drawn.by_key[key] for each in finite for key in each.keys if key in drawn.by_key]
    heaviest = max(weighed, key=lambda record: record.bytes_full or 0)
    if not heaviest.bytes_full:
        return None
    whole = [row.plan_hash for row in drawn.plans if row.is_full]
    places = [(each.share, each.value, each.row.plan_hash) for each in finite] + [(1.0, 0.0, plan) for plan in whole]
    return Losses(
        name=name,
        axis=axis,
        unit=unit,
        full=heaviest.bytes_full,
        tokens=heaviest.tokens_seen,
        found=finite,
        front=tuple(plan for *_, plan in front_of(places, lambda each: each[:2])),
    )


def picture(drawn: Drawn, asked: Losses) -> str:
    """Return the chart as it stands where no script runs, as SVG."""
    marks = {
        each.row.plan_hash: Mark(
            x=100 * each.share,
            y=each.value,
            low=each.low,
            high=each.high,
            label=each.row.label,
            number=drawn.numbers[each.row.plan_hash],
            kind=drawn.kinds[each.row.plan_hash],
            hover=f"{byte_text(each.bytes)} held\n{_in_words(each)} {asked.unit}",
            behind=drawn.behind(each.keys),
        )
        for each in asked.found
    }
    full = next(row for row in drawn.plans if row.is_full)
    marks[full.plan_hash] = Mark(
        x=100.0,
        y=0.0,
        label=full.label,
        number=drawn.numbers[full.plan_hash],
        hover="loses nothing",
        kind=drawn.kinds[full.plan_hash],
    )
    axis = f"bytes held, % of the uncompressed {byte_text(asked.full)}"
    front = [marks[plan] for plan in asked.front]
    return scatter(list(marks.values()), x=axis, y=asked.axis, title=asked.name, front=front)


def chart_data(drawn: Drawn, asked: Sequence[Losses]) -> dict[str, object]:
    """Return what the script reads: the plans, and for each question the numbers of each plan, unrounded."""
    return {
        "plans": [
            [
                drawn.numbers[row.plan_hash],
                row.label,
                short_name(row.label),
                drawn.kinds[row.plan_hash],
                int(row.is_full),
            ]
            for row in drawn.plans
        ],
        "asked": [
            {
                "name": each.name,
                "axis": each.axis,
                "unit": each.unit,
                "full": each.full,
                "full_text": byte_text(each.full),
                "tokens": each.tokens,
                "front": [drawn.numbers[plan] for plan in each.front],
                "points": list(_points(drawn, each)),
            }
            for each in asked
        ],
    }


def _points(drawn: Drawn, asked: Losses) -> Iterator[list[object]]:
    for each in asked.found:
        yield [
            drawn.numbers[each.row.plan_hash],
            each.bytes,
            byte_text(each.bytes),
            each.share,
            each.value,
            each.low,
            each.high,
        ]


def _in_words(each: Loss) -> str:
    if each.low is None or each.high is None:
        return f"{significant(each.value, 3)}"
    return f"{significant(each.value, 3)} ({significant(each.low, 3)} to {significant(each.high, 3)})"
