"""What changes along a coordinate: lines over context and batch, and over the layers of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from kvtailor.bench.report.charts.charts import Drawn, figure
from kvtailor.bench.report.charts.svg import Line, Mark, lines
from kvtailor.bench.report.points import Series, base, series_of
from kvtailor.bench.report.words import byte_text, byte_unit, significant
from kvtailor.bench.schema import Record

__all__ = ["along", "by_layer"]

Value = Callable[[Record], float | None]


def along(drawn: Drawn) -> Iterator[str]:
    """A chart for each pair of coordinate and number that was measured at two points or more; nothing in between."""
    for task in ("memory", "speed", "perplexity"):
        found = list(_charts(drawn, task, "context", lambda r: r.bytes_held, "Memory against context", "bytes held"))
        if found:
            # One task's samples only: the next ones weigh their caches at other moments.
            yield from found
            break
    asked: tuple[tuple[str, str, Value, str, str], ...] = (
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
    for task, name, value, title, axis in asked:
        yield from _charts(drawn, task, name, value, title, axis)


def by_layer(drawn: Drawn) -> Iterator[str]:
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
    for name, count in layers.items():
        if count < 2:
            continue
        drawn_lines = []
        for row in drawn.few:
            here = shown.records.get(row.plan_hash)
            values = [] if here is None else [here.metrics.get(f"{name}_{layer}") for layer in range(count)]
            marks = tuple(
                _mark(drawn, here, float(layer), value, f"layer {layer}: {significant(value, 4)}")
                for layer, value in enumerate(values)
                if value is not None and here is not None
            )
            if len(marks) > 1:
                behind = drawn.behind([here.key]) if here is not None else ""
                drawn_lines.append(Line(marks=marks, behind=behind))
        title = name.replace("_", " ").capitalize() + " by layer"
        if drawn_lines:
            zero = "cosine" not in name and "mass" not in name
            picture = lines(drawn_lines, x="layer", y=name.replace("_", " "), title=title, zero=zero, whole=True)
            yield figure(title, picture)


def _charts(drawn: Drawn, task: str, name: str, value: Value, title: str, axis: str) -> Iterator[str]:
    groups: dict[str, list[Series]] = {}
    for each in series_of(drawn.records, task):
        if isinstance(each.point.get(name), int):
            # How many samples were taken, and how many tokens follow a context, are no other question.
            other = {k: v for k, v in each.point.items() if k not in (name, "rounds", "continuation")}
            groups.setdefault(json.dumps([each.text, other], sort_keys=True), []).append(each)
    drawable = {place: members for place, members in groups.items() if _points(members, name) > 1}
    if drawable:
        # Where the other coordinates vary too, the group with most points is drawn; the tables have the others.
        place, members = max(drawable.items(), key=lambda each: _points(each[1], name))
        found = []
        for row in drawn.few:
            mine = sorted(
                (each for each in members if row.plan_hash in each.records), key=lambda each: int(str(each.point[name]))
            )
            points = [(int(str(each.point[name])), each.records[row.plan_hash]) for each in mine]
            known = [(at, record, y) for at, record in points if (y := value(record)) is not None]
            if len({at for at, _, _ in known}) > 1:
                found.append(known)
        if not found:
            return
        unit, size = byte_unit(max(y for line in found for _, _, y in line)) if axis.startswith("bytes") else ("", 1)
        shown = []
        for line in found:
            marks = []
            for at, record, y in line:
                words = byte_text(y) if unit else significant(y, 4)
                marks.append(_mark(drawn, record, float(at), y / size, f"{name} {at:,}: {words}"))
            shown.append(Line(marks=tuple(marks), behind=drawn.behind([record.key for _, record, _ in line])))
        note = _rest(place) if len(drawable) > 1 else ""
        zero = axis != "perplexity"
        picture = lines(shown, x=_axis(name), y=f"{axis}, {unit}" if unit else axis, title=title, zero=zero)
        yield figure(title, picture, note)


def _points(members: Sequence[Series], name: str) -> int:
    return len({each.point[name] for each in members})


def _rest(place: str) -> str:
    text, point = json.loads(place)
    parts = [str(text)] if text else []
    return ", ".join(parts + [f"{k} {v}" for k, v in point.items() if v is not None])


def _axis(name: str) -> str:
    return {"context": "context, tokens", "batch": "batch, sequences", "tokens": "tokens decoded"}[name]


def _mark(drawn: Drawn, record: Record, x: float, y: float, words: str) -> Mark:
    plan = record.plan_hash
    return Mark(
        x=x,
        y=y,
        label=record.label,
        number=drawn.numbers[plan],
        kind=drawn.kinds[plan],
        hover=words,
    )


def _metric(name: str) -> Value:
    return lambda record: record.metrics.get(name)


def _median(name: str) -> Value:
    def value(record: Record) -> float | None:
        median = record.timings.get(name, {}).get("median")
        return None if median is None else 1000 * median

    return value
