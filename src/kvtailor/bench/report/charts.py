"""What the charts of a run's page show, as numbers: `page/chart.js` draws them.

A small chart has a title, a note, the names of its axes, and marks, each with the number of its plan, what is said of
it on hover, and the lines of the records behind it. Of "lines", which join the marks of a plan, a mark is
[number, x, y, words, records]. Of "bars" it is [number, value, low, high, goal, text, words, records]; `mark` is where
'full' is, and a goal is a physical floor. `zero`: 0 is on the axis; `whole`: x counts things.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from kvtailor.bench.report.page import HeatMap, Maps, Plan, Point, question
from kvtailor.bench.report.points import Series, base, series_of
from kvtailor.bench.report.table import Row
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure
from kvtailor.bench.report.words import byte_unit, milliseconds, significant
from kvtailor.bench.schema import Record
from kvtailor.ops.sizes import byte_text

__all__ = [
    "MOST_DRAWN",
    "Chart",
    "Drawn",
    "along",
    "budgets",
    "by_layer",
    "every_task",
    "heaviest",
    "losses_by_bytes",
    "needles",
    "questions",
    "times",
]

MOST_DRAWN = 16
"""Plans in a small chart; of more lines than that no eye can follow one."""
Chart = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What all charts of a page share.

    Attributes:
        rows: the plans, in the order of their numbers.
        front: those of them that no other beats in bytes and loss, from `front.pareto`.
        records: of these plans and the model's own cache, without those that failed.
        by_key: all records.
        plans: the same plans as the page has them, by plan hash.
        behind: the lines of some records on the page, by their keys.
    """

    rows: Sequence[Row]
    front: Sequence[Row]
    records: Sequence[Record]
    by_key: Mapping[str, Record]
    plans: Mapping[str, Plan]
    behind: Callable[[Sequence[str]], str]

    def number(self, row: Row) -> str:
        """Return the number of a plan on the page."""
        return self.plans[row.plan_hash].number

    @cached_property
    def few(self) -> list[Row]:
        """The plans that the small charts draw: all, or of many 'full', the front, and those that lose least."""
        if len(self.rows) <= MOST_DRAWN:
            return list(self.rows)
        first = {row.plan_hash for row in self.front}

        def rank(row: Row) -> tuple[float, ...]:
            loss = math.inf if row.loss is None else row.loss.value
            wrong = math.inf if row.accuracy is None else -row.accuracy.value
            kl = math.inf if row.kl is None else row.kl
            return not row.is_full, row.plan_hash not in first, loss, wrong, kl, row.ratio or math.inf

        chosen = {row.plan_hash for row in sorted(self.rows, key=rank)[:MOST_DRAWN]}
        return [row for row in self.rows if row.plan_hash in chosen]


def questions(drawn: Drawn, measures: Sequence[Measure]) -> list[Chart]:
    """Return the questions of the large chart, the main table's text first: those in which a plan has bytes and a loss.

    The loss in a text or task is the mean paired difference to 'full', turned so that more is worse; KL has no
    interval.

    Args:
        drawn: the plans, and the records that their bytes are of.
        measures: from `measures_of`.
    """
    full = next((row for row in drawn.rows if row.is_full), None)
    if full is None:
        return []
    found = []
    for measure in sorted(measures, key=lambda measure: not (measure.is_base and measure.task == "perplexity")):
        if full.plan_hash in measure.scores:
            unit = {NATS: NATS, POINTS: "points of right answers"}.get(measure.difference_unit, "of the score")
            axis = f"{NATS} over full" if unit == NATS else f"{unit} lost"
            found.append((f"{measure.task}: {measure.name}", axis, unit, _losses(drawn, measure)))
    found.append(("fidelity: KL(full || plan)", f"KL, {NATS}", NATS, _divergences(drawn)))
    whole = drawn.number(full)
    asked = [losses_by_bytes(*each, drawn.by_key, whole=whole) for each in found]
    return [each for each in asked if each is not None]


def _losses(drawn: Drawn, measure: Measure) -> Iterator[tuple[Point, Sequence[str]]]:
    for row in drawn.rows:
        score = measure.scores.get(row.plan_hash)
        if row.is_full or score is None or score.difference is None or not score.bytes_held or not score.ratio:
            continue
        lost = score.difference if measure.lower_is_better else score.difference.map(lambda each: -each)
        yield Point(drawn.number(row), score.bytes_held, score.ratio, lost.value, lost.low, lost.high), score.keys


def _divergences(drawn: Drawn) -> Iterator[tuple[Point, Sequence[str]]]:
    for row in drawn.rows:
        record = next((drawn.by_key[key] for key in row.keys("fidelity.kl") if key in drawn.by_key), None)
        if not row.is_full and row.kl is not None and record is not None and record.bytes_held and record.bytes_full:
            share = record.bytes_held / record.bytes_full
            yield Point(drawn.number(row), record.bytes_held, share, row.kl, None, None), [record.key]


def losses_by_bytes(
    name: str,
    axis: str,
    unit: str,
    found: Iterable[tuple[Point, Sequence[str]]],
    records: Mapping[str, Record],
    **more: Any,
) -> Chart | None:
    """Return a question of the large chart, with the uncompressed cache that all plans were weighed against.

    Args:
        name, axis, unit: see `page.question`.
        found: what each plan held and lost, and the keys of the records behind it.
        records: by key.
        more: see `page.question`.

    Returns:
        None where no plan has bytes and a loss.
    """
    finite = [(point, keys) for point, keys in found if all(e is None or math.isfinite(e) for e in point[3:])]
    weighed = heaviest([key for _, keys in finite for key in keys], records)
    if weighed is None or not weighed.bytes_full:
        return None
    points = [point for point, _ in finite]
    return question(name, axis, unit, weighed.bytes_full, points, tokens=weighed.tokens_seen, **more)


def heaviest(keys: Sequence[str], records: Mapping[str, Record]) -> Record | None:
    """Return of some records, by their keys, the one with the most uncompressed bytes; None without any."""
    there = [records[key] for key in keys if key in records]
    return max(there, key=lambda record: record.bytes_full or 0, default=None)


def _chart(kind: str, title: str, x: str, y: str, marks: Sequence[object], note: str = "", **more: object) -> Chart:
    return {"kind": kind, "title": title, "note": note, "x": x, "y": y, "marks": marks, "zero": True, **more}


def _brief(value: float | None) -> float | None:
    """Six figures are more than a picture shows, and a page of many plans has thousands of numbers."""
    return None if value is None else float(f"{value:.6g}")


_Found = tuple[float, float, Row, str, Sequence[str]]
"""A point of a line: x, y, the plan, words, and the keys of the records behind it."""


def _lines(
    drawn: Drawn,
    title: str,
    x: str,
    y: str,
    lines: Sequence[Sequence[_Found]],
    note: str = "",
    size: float = 1.0,
    **more: object,
) -> Chart:
    """A chart of lines; the first mark of each leads to the records behind all of it, and `size` is the unit of x."""
    marks = []
    for line in lines:
        behind = drawn.behind([key for *_, keys in line for key in keys])
        for index, (at, value, row, words, _) in enumerate(line):
            marks.append([drawn.number(row), _brief(at / size), _brief(value), words, "" if index else behind])
    return _chart("lines", title, x, y, marks, note, **more)


def times(drawn: Drawn) -> Iterator[Chart]:
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


def _throughput(drawn: Drawn, series: Sequence[Series], note: str) -> Iterator[Chart]:
    """A line for each plan from the smallest batch to the largest; of one batch a point."""
    axis, ranked = "tokens per second", sorted(series, key=lambda each: int(str(each.point.get("batch", 1))))
    found: list[list[_Found]] = []
    for row in drawn.few:
        mine: list[_Found] = []
        for each in ranked:
            record, batch = each.records.get(row.plan_hash), each.point.get("batch", 1)
            speed = None if record is None else record.metrics.get("tokens_per_second")
            if record is not None and speed is not None and record.bytes_held:
                words = f"{byte_text(record.bytes_held)} held\n{axis}: {speed:,.1f} at batch {batch}"
                mine.append((record.bytes_held, speed, row, words, (record.key,)))
        found += [mine] if mine else []
    if len(found) > 1:
        unit, size = byte_unit(max(each[0] for mine in found for each in mine))
        batches = ", ".join(dict.fromkeys(str(each.point.get("batch", 1)) for each in ranked))
        note = ", ".join(filter(None, [note, f"batches of {batches}, joined by lines"]))
        yield _lines(drawn, "Throughput against memory", f"bytes held, {unit}", axis, found, note, size=size)


def _time_bars(drawn: Drawn, shown: Series, name: str, title: str) -> Iterator[Chart]:
    marks: list[list[object]] = []
    for row in drawn.few:
        record = shown.records.get(row.plan_hash)
        timing = record.timings.get(name) if record is not None else None
        if record is None or timing is None or timing["median"] is None:
            continue
        middle, (q1, q3) = timing["median"], (timing[each] for each in ("q1", "q3"))
        floor = record.floor_seconds if name == "tpot" else record.metrics.get("floor_ttft_seconds")
        words = f"{milliseconds(middle)} ms"
        if q1 is not None and q3 is not None:
            words += f", quartiles {milliseconds(q1)} to {milliseconds(q3)}"
        words += "" if floor is None else f"\nfloor {milliseconds(floor)} ms"
        shown_ms = [None if each is None else _brief(1000 * each) for each in (middle, q1, q3, floor)]
        marks.append([drawn.number(row), *shown_ms, milliseconds(middle), words, drawn.behind([record.key])])
    if marks:
        floors = any(mark[4] is not None for mark in marks)
        note = "Medians, quartiles as whiskers" + ("; the thick tick is the physical floor." if floors else ".")
        yield _chart("bars", title, "milliseconds", "", marks, note, mark=None)


def every_task(drawn: Drawn, measures: Sequence[Measure]) -> Iterator[Chart]:
    """Bars for each text and task, a bar for each plan; dashed where 'full' is."""
    full = next((row.plan_hash for row in drawn.rows if row.is_full), None)
    for measure in measures:
        share, marks = measure.unit == "%", []
        for row in (row for row in drawn.few if row.plan_hash in measure.scores):
            score, is_full = measure.scores[row.plan_hash], row.plan_hash == full
            # A mean of shares cannot leave 0 to 100, but an interval of the bootstrap that is added to it can.
            low = max(0.0, score.low) if share and score.low is not None else score.low
            high = min(100.0, score.high) if share and score.high is not None else score.high
            words, difference = f"{score.value:.4g} {measure.unit} over {score.samples} samples", score.difference
            if difference is not None and not is_full:
                words += f"\n{difference.value:+.3g} {measure.difference_unit} over full"
                if difference.low is not None:
                    words += f" ({difference.low:+.3g} to {difference.high:+.3g})"
            ends = [None, None] if is_full else [_brief(low), _brief(high)]
            text = f"{score.value:.1f}" if share else f"{score.value:.2f}"
            marks.append([drawn.number(row), _brief(score.value), *ends, None, text, words, drawn.behind(score.keys)])
        if marks:
            mark = _brief(measure.scores[full].value) if full is not None and full in measure.scores else None
            better = "lower is better" if measure.lower_is_better else "higher is better"
            title = f"{measure.task}: {measure.name}"
            yield _chart("bars", title, f"{measure.unit} ({better})", "", marks, mark=mark)


Value = Callable[[Record], float | None]


def _metric(name: str) -> Value:
    return lambda record: record.metrics.get(name)


def _median(name: str) -> Value:
    def value(record: Record) -> float | None:
        median = record.timings.get(name, {}).get("median")
        return None if median is None else 1000 * median

    return value


_ALONG: tuple[tuple[str, str, Value, str, str], ...] = (
    ("memory", "context", lambda r: r.bytes_resident, "Resident memory against context", "bytes resident"),
    ("memory", "context", lambda r: r.bytes_peak, "Peak of a prefill against context", "bytes at the peak"),
    ("memory", "context", lambda r: r.bytes_peak_decode, "Peak of decoding against context", "bytes at the peak"),
    ("memory", "batch", lambda r: r.bytes_held, "Memory against batch", "bytes held"),
    ("memory", "batch", lambda r: r.bytes_peak, "Peak of a prefill against batch", "bytes at the peak"),
    ("speed", "context", _median("ttft"), "Time to the first token against context", "milliseconds"),
    ("speed", "context", _median("tpot"), "Time for each further token against context", "milliseconds"),
    ("speed", "context", _metric("tokens_per_second"), "Throughput against context", "tokens per second"),
    ("speed", "batch", _metric("tokens_per_second"), "Throughput against batch", "tokens per second"),
    ("speed", "batch", _median("tpot"), "Time for each further token against batch", "milliseconds"),
    ("speed", "tokens", _median("tpot"), "Time for each further token against tokens decoded", "milliseconds"),
    ("perplexity", "context", _metric("perplexity"), "Perplexity against context", "perplexity"),
)
_AXES = {"context": "context, tokens", "batch": "batch, sequences", "tokens": "tokens decoded"}


def along(drawn: Drawn) -> Iterator[Chart]:
    """A chart for each pair of coordinate and number that was measured at two points or more; nothing in between."""
    for task in ("memory", "speed", "perplexity"):
        found = list(_sweep(drawn, task, "context", lambda r: r.bytes_held, "Memory against context", "bytes held"))
        if found:
            # One task's samples only: the next ones weigh their caches at other moments.
            yield from found
            break
    for task, name, value, title, axis in _ALONG:
        yield from _sweep(drawn, task, name, value, title, axis)


def _sweep(drawn: Drawn, task: str, name: str, value: Value, title: str, axis: str) -> Iterator[Chart]:
    groups: dict[str, list[Series]] = {}
    for each in series_of(drawn.records, task):
        if isinstance(each.point.get(name), int):
            # How many samples were taken, and how many tokens follow a context, are no other question.
            other = {k: v for k, v in each.point.items() if k not in (name, "rounds", "continuation")}
            groups.setdefault(json.dumps([each.text, other], sort_keys=True), []).append(each)
    counts = {place: len({each.point[name] for each in members}) for place, members in groups.items()}
    drawable = [place for place, count in counts.items() if count > 1]
    if not drawable:
        return
    # Where the other coordinates vary too, the group with most points is drawn; the tables have the others.
    place = max(drawable, key=counts.__getitem__)
    members = sorted(groups[place], key=lambda each: int(str(each.point[name])))
    found: list[list[_Found]] = []
    for row in drawn.few:
        points = [(int(str(each.point[name])), each.records.get(row.plan_hash)) for each in members]
        line: list[_Found] = [
            (at, y, row, "", (record.key,))
            for at, record in points
            if record is not None and (y := value(record)) is not None
        ]
        if len({each[0] for each in line}) > 1:
            found.append(line)
    if not found:
        return
    unit, size = byte_unit(max(each[1] for line in found for each in line)) if axis.startswith("bytes") else ("", 1)
    told: list[list[_Found]] = [
        [
            (x, y / size, row, f"{name} {x:,}: {byte_text(y) if unit else significant(y, 4)}", keys)
            for x, y, row, _, keys in line
        ]
        for line in found
    ]
    text, point = json.loads(place)
    rest = ", ".join([str(text)] * bool(text) + [f"{k} {v}" for k, v in point.items() if v is not None])
    y_name, note = f"{axis}, {unit}" if unit else axis, rest if len(drawable) > 1 else ""
    yield _lines(drawn, title, _AXES[name], y_name, told, note, zero=axis != "perplexity")


def by_layer(drawn: Drawn) -> Iterator[Chart]:
    """The measures of fidelity for each layer."""
    shown = base(series_of(drawn.records, "fidelity"))
    if shown is None:
        return
    layers: dict[str, int] = {}
    for record in shown.records.values():
        for name, value in record.metrics.items():
            found = re.fullmatch(r"(.+)_(\d+)", name)
            if found is not None and value is not None:
                layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    for name, count in ((name, count) for name, count in layers.items() if count > 1):
        lines: list[list[_Found]] = []
        for row in drawn.few:
            here = shown.records.get(row.plan_hash)
            values = [] if here is None else [here.metrics.get(f"{name}_{layer}") for layer in range(count)]
            line: list[_Found] = [
                (layer, value, row, f"layer {layer}: {significant(value, 4)}", (here.key,))
                for layer, value in enumerate(values)
                if value is not None and here is not None
            ]
            lines += [line] if len(line) > 1 else []
        if lines:
            words = name.replace("_", " ")
            zero = "cosine" not in name and "mass" not in name
            title = f"{words.capitalize()} by layer"
            yield _lines(drawn, title, "layer", words, lines, zero=zero, whole=True)


def needles(drawn: Drawn) -> Iterator[Maps]:
    """A heat map for each plan and kind of document that was measured at several depths or lengths."""
    found = [r for r in drawn.records if r.task == "needle"]
    for kind, outside in dict.fromkeys((str(r.point["kind"]), bool(r.point.get("question_outside"))) for r in found):
        mine = [r for r in found if (str(r.point["kind"]), bool(r.point.get("question_outside"))) == (kind, outside)]
        lengths = sorted({int(str(r.point["length"])) for r in mine})
        depths = sorted({float(str(r.point["depth"])) for r in mine})
        if len(lengths) * len(depths) < 2:
            continue
        what = "recall" if any("recall" in r.values for r in mine) else "right answers"
        where = ", question outside of the compressed context" if outside else ""
        asked = {row.plan_hash: [r for r in mine if r.plan_hash == row.plan_hash] for row in drawn.few}
        yield Maps(
            heading=f"{kind}{where}: {what} in percent, by depth (down) and tokens (across)",
            maps=[
                HeatMap(
                    caption=row.label,
                    number=drawn.number(row),
                    across="depth",
                    columns=[f"{length:,}" for length in lengths],
                    rows=[f"{depth:.2g}" for depth in depths],
                    cells=[[_answers(asked[row.plan_hash], length, depth) for length in lengths] for depth in depths],
                )
                for row in drawn.few
                if asked[row.plan_hash]
            ],
        )


def _answers(records: Sequence[Record], length: int, depth: float) -> tuple[str, float, str] | None:
    mine = [r for r in records if (r.point["length"], r.point["depth"]) == (length, depth)]
    shares = [share for r in mine for share in r.values.get("recall", r.values["hit"])]
    if not shares:
        return None
    text = f"{100 * fmean(shares):.0f}"
    return text, fmean(shares), f"{length:,} tokens, depth {depth:.2g}: {text}% of {len(shares)} documents"


def budgets(drawn: Drawn) -> Iterator[str | Maps]:
    """Tokens held by layer and head of each plan that holds fewer than it saw; flat ones are a sentence."""
    shown: list[tuple[Row, Record, tuple[tuple[float, ...], ...]]] = []
    flat = []
    for row in drawn.few:
        record = next((drawn.by_key[key] for key in row.keys("cache.bytes_held")), None)
        if record is None or not record.tokens_by_head or not record.tokens_seen:
            continue
        held = [tokens for heads in record.tokens_by_head for tokens in heads]
        if min(held) >= record.tokens_seen:
            continue
        if max(held) == min(held):
            flat.append(f"{row.label} ({held[0]:g} of {record.tokens_seen})")
        else:
            shown.append((row, record, record.tokens_by_head))
    if flat:
        yield f"As many tokens in every layer and head: {'; '.join(flat)}."
    if not shown:
        return
    most = max(tokens for _, _, layers in shown for heads in layers for tokens in heads)
    yield (
        "Tokens held, layers down and kv heads across, mean over the rows of the sample that was weighed. The same "
        f"scale for all: darkest is {most:g} tokens."
    )
    yield Maps(
        maps=[
            HeatMap(
                caption=row.label,
                number=drawn.number(row),
                across="layer",
                columns=[str(head) for head in range(max(map(len, layers)))],
                rows=[str(layer) for layer in range(len(layers))],
                cells=[
                    [
                        (
                            f"{tokens:.0f}",
                            tokens / most,
                            f"layer {layer}, head {head}: {tokens:g} of {record.tokens_seen} tokens",
                        )
                        for head, tokens in enumerate(heads)
                    ]
                    for layer, heads in enumerate(layers)
                ],
            )
            for row, record, layers in shown
        ]
    )
