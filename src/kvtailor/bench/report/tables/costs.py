"""Tables over all points that were measured: cost, memory, what fits, fidelity. A row is a plan at a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.statistics import Estimate, geometric_mean, mean
from kvtailor.bench.report.declared import declared_tasks, heading
from kvtailor.bench.report.points import series_of
from kvtailor.bench.report.rows import Row, rate_per_gib
from kvtailor.bench.report.tables.grid import EMPTY, Cell, Grid
from kvtailor.bench.report.words import byte_text, flop_text, milliseconds, significant
from kvtailor.bench.schema import Record

__all__ = ["grids"]

Make = Callable[[Record], Cell]


def grids(records: Sequence[Record], rows: Sequence[Row]) -> Iterator[Grid]:
    """Those tables in which anything was measured."""
    order = [row.plan_hash for row in rows]
    for task, title, note, columns in (
        ("speed", "Cost", _SPEED_NOTE, _SPEED),
        ("speculation", "Speculation", _SPECULATION_NOTE, _SPECULATION),
        ("memory", "Memory of a fresh process", _MEMORY_NOTE, _MEMORY),
        ("capacity", "What fits", _CAPACITY_NOTE, _CAPACITY),
        ("fidelity", "Fidelity", _FIDELITY_NOTE, _FIDELITY),
    ):
        found = _grid(records, order, task, title, note, columns)
        if found is not None:
            yield found
    for task in declared_tasks(records):
        told = KINDS[task].told
        note = "; ".join(f"{metric.name}: {metric.meaning}" for metric in told if metric.meaning)
        columns = {heading(metric): _metric(metric.name) for metric in told}
        found = _grid(records, order, task, task.capitalize(), f"{note}." if note else "", columns)
        if found is not None:
            yield found


def _grid(
    records: Sequence[Record], order: Sequence[str], task: str, title: str, note: str, columns: dict[str, Make]
) -> Grid | None:
    series = series_of(records, task)
    if not series:
        return None
    points = list(dict.fromkeys(name for each in series for name in each.point))
    fixed = [name for name in points if len({str(each.point.get(name)) for each in series}) == 1]
    points = [name for name in points if name not in fixed]
    same = tuple((name.replace("_", " "), _point(name, series[0].point.get(name))) for name in fixed)
    throughout = ", ".join(f"{name} {cell.text}" for name, cell in same if cell.text is not None)
    several = len({each.text for each in series}) > 1
    body, plans = [], []
    for each in series:
        for plan in (plan for plan in order if plan in each.records):
            record = each.records[plan]
            cells = [Cell(text=record.label, value=record.label)]
            cells += [Cell(text=each.text, value=each.text)] if several else []
            cells += [_point(name, each.point.get(name)) for name in points]
            for make in columns.values():
                cell = make(record)
                cells.append(cell if cell.text is None else replace(cell, keys=(record.key,)))
            body.append(tuple(cells))
            plans.append(plan)
    heads = ("plan", *(["text"] if several else []), *(name.replace("_", " ") for name in points), *columns)
    return Grid(
        name=task,
        title=title,
        note=f"{note} All at {throughout}.".lstrip() if throughout else note,
        heads=heads,
        rows=tuple(body),
        plans=tuple(plans),
        same=same,
    ).without_empty_columns()


def _point(name: str, value: object) -> Cell:
    if value is None:
        return EMPTY
    if name.endswith("_bytes") and isinstance(value, int):
        return Cell(text=byte_text(value), value=value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Cell(text=str(value), value=str(value))
    return Cell(text=f"{value:,}" if isinstance(value, int) else f"{value:g}", value=value)


def _time(name: str) -> Make:
    def make(record: Record) -> Cell:
        found = record.timings.get(name, {})
        median, q1, q3 = (found.get(each) for each in ("median", "q1", "q3"))
        if median is None:
            return EMPTY
        if q1 is None or q3 is None:
            return Cell(text=milliseconds(median), value=1000 * median)
        spread = f"{milliseconds(q1)} to {milliseconds(q3)}"
        return Cell(text=milliseconds(median), value=1000 * median, interval=spread, ends=(1000 * q1, 1000 * q3))

    return make


def _floor(name: str, of: Callable[[Record], float | None]) -> Make:
    def make(record: Record) -> Cell:
        floor = of(record)
        if floor is None:
            return EMPTY
        median = record.timings.get(name, {}).get("median")
        share = None if not median else f"{100 * floor / median:.0f} % of the time"
        return Cell(text=milliseconds(floor), value=1000 * floor, interval=share)

    return make


def _fits(name: str) -> Make:
    """A size, and whether it was run or follows from the sizes that were."""

    def make(record: Record) -> Cell:
        value = record.metrics.get(name)
        if value is None:
            return EMPTY
        reckoned = record.metrics.get(f"{name}_verified") == 0
        return Cell(text=f"{value:,.0f}", value=value, interval="not run" if reckoned else None)

    return make


def _metric(name: str, show: Callable[[float], str] = significant, scale: float = 1.0) -> Make:
    def make(record: Record) -> Cell:
        value = record.metrics.get(name)
        return EMPTY if value is None else Cell(text=show(scale * value), value=scale * value)

    return make


def _mean(name: str, of: Callable[[Sequence[float]], Estimate], scale: float = 1.0) -> Make:
    """The mean over samples with its interval."""

    def make(record: Record) -> Cell:
        values = record.values.get(name, ())
        if not values:
            return EMPTY
        found = of(values)
        value = scale * found.value
        if found.low is None or found.high is None:
            return Cell(text=f"{value:.2f}", value=value)
        low, high = scale * found.low, scale * found.high
        return Cell(text=f"{value:.2f}", value=value, interval=f"{low:.2f} to {high:.2f}", ends=(low, high))

    return make


def _bytes(name: str) -> Make:
    def make(record: Record) -> Cell:
        value = getattr(record, name)
        return EMPTY if value is None else Cell(text=byte_text(value), value=value)

    return make


def _of_full(record: Record) -> Cell:
    if not record.bytes_held or not record.bytes_full:
        return EMPTY
    share = 100 * record.bytes_held / record.bytes_full
    return Cell(text=f"{share:.1f}", value=share)


def _per_gib(record: Record) -> Cell:
    each = rate_per_gib(record)
    return EMPTY if each is None else Cell(text=significant(each), value=each)


_SPEED: dict[str, Make] = {
    "bytes held": _bytes("bytes_held"),
    "TTFT, ms": _time("ttft"),
    "floor of TTFT, ms": _floor("ttft", lambda record: record.metrics.get("floor_ttft_seconds")),
    "TPOT, ms": _time("tpot"),
    "floor of TPOT, ms": _floor("tpot", lambda record: record.floor_seconds),
    "tokens/s": _metric("tokens_per_second"),
    "tokens/s per GiB": _per_gib,
    "prefill": _metric("flops_prefill", flop_text),
    "prefill, method": _metric("flops_method_prefill", flop_text),
    "prefill, GFLOP/s": _metric("achieved_gflops_prefill"),
    "token": _metric("flops_token", flop_text),
    "token, method": _metric("flops_method_token", flop_text),
    "token, GFLOP/s": _metric("achieved_gflops_token"),
}
_SPEED_NOTE = (
    "Medians with quartiles. Floor of TPOT: weights and cache read once at the bandwidth that this machine reached; of "
    "TTFT: that of the weights, or the operations at the rate it reached, whichever is longer. Operations are counted "
    "by arithmetic, the method's own apart; GFLOP/s are of both together. Tokens/s per GiB: of all rows, over "
    "what their caches hold, as a memory that is full of such caches would give."
)
_SPECULATION: dict[str, Make] = {
    "on the device": _metric("device_bytes", byte_text),
    "plain, on the device": _metric("plain_device_bytes", byte_text),
    "acceptance, %": _mean("acceptance", mean, 100),
    "emitted per verification": _mean("emitted_per_verification", mean),
    "inner acceptance, %": _metric("inner_acceptance", scale=100),
    "tokens/s": _metric("tokens_per_second"),
    "plain tokens/s": _metric("plain_tokens_per_second"),
    "speed-up": _mean("speed_up", geometric_mean),
    "speed-up over the model's own cache": _mean("speed_up_own", geometric_mean),
    "same text, %": _metric("identical", scale=100),
}
_SPECULATION_NOTE = (
    "With a draft beside the same plan's plain decoding, interleaved; intervals over random states. Acceptance: of "
    "judged tokens. On the device: all caches that are at work, drafts' included. Same text: greedy rounds in which no "
    "token differs."
)
_MEMORY: dict[str, Make] = {
    "bytes held": _bytes("bytes_held"),
    "of full, %": _of_full,
    "resident": _bytes("bytes_resident"),
    "peak, prefill": _bytes("bytes_peak"),
    "peak, decode": _bytes("bytes_peak_decode"),
}
_MEMORY_NOTE = "Above what the process held before its first cache, so without the weights."
_CAPACITY: dict[str, Make] = {
    "memory": _metric("memory_bytes", byte_text),
    "largest batch": _fits("largest_batch"),
    "longest context": _fits("longest_context"),
    "one more token": _metric("bytes_per_token", byte_text),
}
_CAPACITY_NOTE = (
    "The largest batch and the longest context that fit in this memory; not run: reckoned from those that were."
)
_FIDELITY: dict[str, Make] = {
    "KL": _metric("kl"),
    "KL, 99th percentile": _metric("kl_p99"),
    "KL, 99.9 %": _metric("kl_p999"),
    "largest KL": _metric("kl_max"),
    "ruined, %": _metric("ruined", scale=100),
    "tokens to first difference": _metric("divergence", lambda x: f"{x:.1f}"),
    "same text, %": _metric("same_text", scale=100),
    "repeated, %": _metric("repetition", scale=100),
    "top-1, %": _metric("top1", scale=100),
    "calibration error, %": _metric("ece", scale=100),
    "key error": _metric("key_error"),
    "value error": _metric("value_error"),
    "mass retained, %": _metric("retained_mass", scale=100),
    "attention cosine": _metric("attention_cosine", lambda x: f"{x:.4f}"),
    "output error": _metric("output_error"),
}
_FIDELITY_NOTE = (
    "Against 'full' on the same tokens. Errors are relative, means over layers; the charts have them by layer. They "
    "describe what is held. Ruined: windows whose continuation loses more than 0.5 nats a token over 'full'. First "
    "difference: of two texts that are decoded greedily, up to 64 tokens, all of which count where none differs. "
    "Repeated: runs of four tokens in the plan's text that it had before. A largest value grows with the tokens."
)
