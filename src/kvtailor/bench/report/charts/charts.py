"""Quality and time against memory, and bars over every text and task: from rows and measures to pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.charts.bars import Bar, bars
from kvtailor.bench.report.charts.svg import Line, Mark, lines, scatter
from kvtailor.bench.report.front import front_of
from kvtailor.bench.report.pages.html import behind
from kvtailor.bench.report.pages.style import COLOURS
from kvtailor.bench.report.points import Series, base, series_of
from kvtailor.bench.report.rows import Row
from kvtailor.bench.report.tables.quality import NATS, Measure, Score
from kvtailor.bench.report.words import byte_text, byte_unit, milliseconds, significant
from kvtailor.bench.schema import Record

__all__ = ["Drawn", "MOST_DRAWN", "against_memory", "colour", "every_task", "figure", "legible", "times"]

MOST_DRAWN = 16
"""Plans in a small chart; of more lines than that no eye can follow one."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What all charts of a page share.

    Attributes:
        plans: the plans, in the order of their numbers.
        few: those of them that the small charts draw, see `legible`.
        records: of these plans and the model's own cache, without those that failed.
        by_key: all records.
        numbers: of the plans, by plan hash.
        kinds: class of each plan's colour.
        lines: of the records on the page, see `pages.html.numbered`.
    """

    plans: Sequence[Row]
    few: Sequence[Row]
    records: Sequence[Record]
    by_key: Mapping[str, Record]
    numbers: Mapping[str, str]
    kinds: Mapping[str, str]
    lines: Mapping[str, int]

    def behind(self, keys: Sequence[str]) -> str:
        """The attribute that leads to records."""
        return behind(keys, self.lines)


def legible(plans: Sequence[Row], front: Sequence[Row]) -> list[Row]:
    """Return the plans that the small charts draw: all, or of many 'full', the front, and those that lose least.

    Args:
        plans: in the order of their numbers.
        front: from `front.pareto`.
    """
    if len(plans) <= MOST_DRAWN:
        return list(plans)
    first = {row.plan_hash for row in front}

    def rank(row: Row) -> tuple[float, ...]:
        loss = math.inf if row.loss is None else row.loss.value
        wrong = math.inf if row.accuracy is None else -row.accuracy.value
        kl = math.inf if row.kl is None else row.kl
        return not row.is_full, row.plan_hash not in first, loss, wrong, kl, row.ratio or math.inf

    chosen = {row.plan_hash for row in sorted(plans, key=rank)[:MOST_DRAWN]}
    return [row for row in plans if row.plan_hash in chosen]


def colour(index: int) -> str:
    """Class of the index-th plan's colour, 'full' not counted."""
    return f"p{index % COLOURS}" + (" again" if index >= COLOURS else "")


def figure(title: str, picture: str, note: str = "") -> str:
    """A picture with its title above it."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{picture}</figure>"


def against_memory(drawn: Drawn, measures: Sequence[Measure]) -> Iterator[str]:
    """Perplexity for each text, and right answers, recall and KL of the main table, against bytes."""
    for measure in measures:
        if measure.task != "perplexity":
            continue
        found = [(row, measure.scores[row.plan_hash]) for row in drawn.plans if row.plan_hash in measure.scores]
        marks = [
            (score.bytes_held, score.value, score.low, score.high, row, _score_words(score, row), score.keys)
            for row, score in found
            if score.bytes_held
        ]
        yield from _scatter(drawn, marks, "Perplexity against memory", "perplexity", zero=False, note=measure.name)
    asked: tuple[tuple[str, str, Callable[[Row], Estimate | float | None], float, str, bool], ...] = (
        ("Accuracy against memory", "answers right, %", lambda r: r.accuracy, 100, "needle.accuracy", False),
        (
            "Recall of answers with several parts against memory",
            "recall, %",
            lambda r: r.recall,
            100,
            "needle.recall",
            False,
        ),
        ("KL(full || plan) against memory", "nats per token", lambda r: r.kl, 1, "fidelity.kl", True),
    )
    for title, axis, of, scale, source, lower in asked:
        marks = []
        for row in drawn.plans:
            value = of(row)
            if value is None or not row.bytes_held:
                continue
            low = high = None
            if isinstance(value, Estimate):
                low = None if value.low is None else scale * value.low
                high = None if value.high is None else scale * value.high
                value = value.value
            words = significant(scale * value, 4) + ("" if low is None else f" ({low:.4g} to {high:.4g})")
            keys = tuple(dict.fromkeys([*row.keys(source), *row.keys("cache.bytes_held")]))
            marks.append((row.bytes_held, scale * value, low, high, row, words, keys))
        yield from _scatter(drawn, marks, title, axis, lower=lower)


_Found = tuple[int, float, float | None, float | None, Row, str, tuple[str, ...]]


def _scatter(
    drawn: Drawn,
    found: Sequence[_Found],
    title: str,
    axis: str,
    *,
    lower: bool = True,
    zero: bool = True,
    note: str = "",
) -> Iterator[str]:
    if len(found) < 2:
        return
    unit, size = byte_unit(max(each[0] for each in found))
    marks = [_mark(drawn, each, axis, size) for each in found]
    # The front is that of all plans, and all of it is drawn.
    front = front_of(marks, lambda mark: (mark.x, mark.y if lower else -mark.y))
    shown = {drawn.numbers[row.plan_hash] for row in drawn.few} | {mark.number for mark in front}
    marks = [mark for mark in marks if mark.number in shown]
    yield figure(title, scatter(marks, x=f"bytes held, {unit}", y=axis, title=title, front=front, zero=zero), note)


def _score_words(score: Score, row: Row) -> str:
    found = score.difference
    if found is None or found.low is None or found.high is None:
        return f"{score.value:.4g}"
    return f"{score.value:.4g}; {found.value:+.4f} ({found.low:+.4f} to {found.high:+.4f}) nats over full"


def times(drawn: Drawn) -> Iterator[str]:
    """Tokens a second against memory, along the batches, and times with their floors at the main table's point."""
    series = series_of(drawn.records, "speed")
    contexts: dict[str, list[Series]] = {}
    for each in series:
        contexts.setdefault(f"context {each.point.get('context')}, {each.point.get('tokens')} decoded", []).append(each)
    for name, members in contexts.items():
        yield from _throughput(drawn, members, name if len(contexts) > 1 else "")
    shown = base(series)
    if shown is not None:
        yield from _time_bars(drawn, shown, "ttft", "Time to the first token (TTFT)")
        yield from _time_bars(drawn, shown, "tpot", "Time for each further token (TPOT)")


def _throughput(drawn: Drawn, series: Sequence[Series], note: str) -> Iterator[str]:
    """Points at one batch; at several, a line for each plan from the smallest batch to the largest."""
    title, axis = "Throughput against memory", "tokens per second"
    found: list[list[_Found]] = []
    for row in drawn.plans:
        mine: list[_Found] = []
        for each in sorted(series, key=lambda each: int(str(each.point.get("batch", 1)))):
            record = each.records.get(row.plan_hash)
            speed = None if record is None else record.metrics.get("tokens_per_second")
            if record is not None and speed is not None and record.bytes_held:
                words = f"{speed:,.1f} at batch {each.point.get('batch', 1)}"
                mine.append((record.bytes_held, speed, None, None, row, words, (record.key,)))
        found += [mine] if mine else []
    if max(map(len, found), default=0) < 2:
        yield from _scatter(drawn, [each for mine in found for each in mine], title, axis, lower=False, note=note)
        return
    unit, size = byte_unit(max(each[0] for mine in found for each in mine))
    batches = ", ".join(str(batch) for batch in sorted({int(str(each.point.get("batch", 1))) for each in series}))
    picture = lines(
        [
            Line(
                marks=tuple(_mark(drawn, each, axis, size) for each in mine),
                behind=drawn.behind([key for each in mine for key in each[-1]]),
            )
            for mine in found
            if mine[0][4] in drawn.few
        ],
        x=f"bytes held, {unit}",
        y=axis,
        title=title,
    )
    yield figure(title, picture, ", ".join(filter(None, [note, f"batches of {batches}, joined by lines"])))


def _mark(drawn: Drawn, found: _Found, axis: str, size: int) -> Mark:
    held, value, low, high, row, words, keys = found
    return Mark(
        x=held / size,
        y=value,
        low=low,
        high=high,
        label=row.label,
        number=drawn.numbers[row.plan_hash],
        hover=f"{byte_text(held)} held\n{axis}: {words}",
        kind=drawn.kinds[row.plan_hash],
        behind=drawn.behind(keys),
    )


def _time_bars(drawn: Drawn, shown: Series, name: str, title: str) -> Iterator[str]:
    found = []
    for row in drawn.few:
        record = shown.records.get(row.plan_hash)
        timing = record.timings.get(name) if record is not None else None
        if record is None or timing is None or timing["median"] is None:
            continue
        middle, q1, q3 = (timing[each] for each in ("median", "q1", "q3"))
        assert middle is not None
        floor = record.floor_seconds if name == "tpot" else record.metrics.get("floor_ttft_seconds")
        hover = f"{milliseconds(middle)} ms"
        if q1 is not None and q3 is not None:
            hover += f", quartiles {milliseconds(q1)} to {milliseconds(q3)}"
        hover += "" if floor is None else f"\nfloor {milliseconds(floor)} ms"
        found.append(
            Bar(
                value=1000 * middle,
                low=None if q1 is None else 1000 * q1,
                high=None if q3 is None else 1000 * q3,
                goal=None if floor is None else 1000 * floor,
                text=milliseconds(middle),
                label=row.label,
                number=drawn.numbers[row.plan_hash],
                hover=hover,
                kind=drawn.kinds[row.plan_hash],
                behind=drawn.behind([record.key]),
            )
        )
    if found:
        with_floor = any(bar.goal is not None for bar in found)
        note = "Medians, quartiles as whiskers" + ("; the thick tick is the physical floor." if with_floor else ".")
        yield figure(title, bars(found, x="milliseconds", title=title), note)


def every_task(drawn: Drawn, measures: Sequence[Measure]) -> Iterator[str]:
    """Bars for each text and task, a bar for each plan; dashed where 'full' is."""
    full = next((row.plan_hash for row in drawn.plans if drawn.kinds[row.plan_hash] == "pf"), None)
    for measure in measures:
        rows = [row for row in drawn.few if row.plan_hash in measure.scores]
        if not rows:
            continue
        share = measure.unit == "%"
        found = []
        for row in rows:
            score = measure.scores[row.plan_hash]
            # A mean of shares cannot leave 0 to 100, but an interval of the bootstrap that is added to it can.
            low = max(0.0, score.low) if share and score.low is not None else score.low
            high = min(100.0, score.high) if share and score.high is not None else score.high
            is_full = row.plan_hash == full
            unit = f"{NATS if measure.difference_unit == NATS else measure.difference_unit} over full"
            difference = score.difference
            hover = f"{score.value:.4g} {measure.unit} over {score.samples} samples"
            if difference is not None and not is_full:
                hover += f"\n{difference.value:+.3g} {unit}"
                if difference.low is not None:
                    hover += f" ({difference.low:+.3g} to {difference.high:+.3g})"
            found.append(
                Bar(
                    value=score.value,
                    low=None if is_full else low,
                    high=None if is_full else high,
                    text=f"{score.value:.1f}" if share else f"{score.value:.2f}",
                    label=row.label,
                    number=drawn.numbers[row.plan_hash],
                    hover=hover,
                    kind=drawn.kinds[row.plan_hash],
                    behind=drawn.behind(score.keys),
                )
            )
        mark = measure.scores[full].value if full is not None and full in measure.scores else None
        title = f"{measure.task}: {measure.name}"
        better = "lower is better" if measure.lower_is_better else "higher is better"
        yield figure(title, bars(found, x=f"{measure.unit} ({better})", title=title, mark=mark))
