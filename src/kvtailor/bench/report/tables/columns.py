"""How every number is headed and written: the columns of the first table, of a terminal's, and of each task's table.

A column is made from the numbers of one line of a table, by task and metric. What a task declares and no column here
names is shown by its own words, so that a new task needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.report.points import HAND_MADE
from kvtailor.bench.report.rows import Row
from kvtailor.bench.report.table import Number
from kvtailor.bench.report.tables.grid import EMPTY, Cell
from kvtailor.bench.report.words import byte_text, flop_text, milliseconds, significant
from kvtailor.bench.tasks.settings import Metric

__all__ = ["BRIEF", "LOSS", "MAIN", "OF_TASKS", "Column", "TaskColumns", "columns_of_task", "declared_columns"]

Numbers = Mapping[str, Number]
Make = Callable[[Numbers], Cell]
Show = Callable[[float], str]


class Column(NamedTuple):
    """A column.

    Attributes:
        head: its heading.
        cell: how a cell is made.
        is_difference: it is a difference to 'full', which is 0 for 'full' itself.
    """

    head: str
    cell: Make
    is_difference: bool = False


class TaskColumns(NamedTuple):
    """The table of a task over all of its points: its title, how to read it, and its columns."""

    title: str
    note: str
    columns: tuple[Column, ...]


def _fixed(digits: int, sign: str = "", unit: str = "") -> Show:
    return lambda value: f"{value:{sign}.{digits}f}{unit}"


def _rounded(value: float) -> str:
    return f"{value:,.0f}"


def _plain(name: str, show: Show = significant, scale: float = 1.0) -> Make:
    """A number without its interval."""

    def make(numbers: Numbers) -> Cell:
        found = numbers.get(name)
        if found is None:
            return EMPTY
        value = found.value if scale == 1.0 else scale * found.value
        return Cell(text=show(value), value=value, keys=found.keys)

    return make


def _estimate(name: str, show: Show, scale: float = 1.0, *, ends: bool = False) -> Make:
    """A number with its interval, whose ends CSV has too where `ends` is set."""

    def make(numbers: Numbers) -> Cell:
        cell, found = _plain(name, show, scale)(numbers), numbers.get(name)
        if found is None or found.low is None or found.high is None:
            return cell
        low, high = scale * found.low, scale * found.high
        return replace(cell, interval=f"{show(low)} to {show(high)}", ends=(low, high) if ends else None)

    return make


def _time(name: str) -> Make:
    """A median in milliseconds with its quartiles."""

    def make(numbers: Numbers) -> Cell:
        cell = _plain(f"{name}_median", significant, 1000)(numbers)
        q1, q3 = (numbers.get(f"{name}_{each}") for each in ("q1", "q3"))
        if cell.text is None or q1 is None or q3 is None:
            return cell
        spread = f"{milliseconds(q1.value)} to {milliseconds(q3.value)}"
        return replace(cell, interval=spread, ends=(1000 * q1.value, 1000 * q3.value))

    return make


def _floor(name: str, median: str) -> Make:
    def make(numbers: Numbers) -> Cell:
        cell, found, taken = _plain(name, significant, 1000)(numbers), numbers.get(name), numbers.get(median)
        if found is None or taken is None or not taken.value:
            return cell
        return replace(cell, interval=f"{100 * found.value / taken.value:.0f} % of the time")

    return make


def _fits(name: str, before: str = "", small: str | None = None) -> Make:
    """A size, and whether it was run or follows from the sizes that were."""

    def make(numbers: Numbers) -> Cell:
        cell, verified = _plain(name, _rounded)(numbers), numbers.get(f"{name}_verified")
        if cell.text is None or verified is None or verified.value != 0:
            return cell
        return replace(cell, text=f"{before}{cell.text}", interval=small)

    return make


def _share_of_full(numbers: Numbers) -> Cell:
    held, full = numbers.get("memory.bytes_held"), numbers.get("memory.bytes_full")
    if held is None or full is None or not held.value or not full.value:
        return EMPTY
    share = 100 * held.value / full.value
    return Cell(text=f"{share:.1f}", value=share, keys=held.keys)


LOSS = "perplexity.nll_over_full"
MAIN: tuple[Column, ...] = (
    Column("tokens held", _plain("cache.tokens_held", _fixed(0))),
    Column("bytes held", _plain("cache.bytes_held", byte_text)),
    Column("bytes, %", _plain("cache.ratio", _fixed(1), 100)),
    Column("nats over full", _estimate(LOSS, _fixed(4, "+")), is_difference=True),
    Column("perplexity", _plain("perplexity.perplexity", _fixed(3))),
    Column("bits per byte", _plain("perplexity.bits_per_byte", _fixed(4))),
    Column("answers right, %", _estimate("needle.accuracy", _fixed(0), 100)),
    Column("recall, %", _estimate("needle.recall", _fixed(0), 100)),
    Column(
        "nats over full per answer token",
        _estimate("needle.answer_nll_over_full", _fixed(3, "+")),
        is_difference=True,
    ),
    Column("KL", _plain("fidelity.kl", _fixed(4))),
    Column("top-1, %", _plain("fidelity.top1", _fixed(1), 100)),
    Column("TTFT over full", _plain("speed.ttft_over_full", _fixed(3))),
    Column("TPOT over full", _plain("speed.tpot_over_full", _fixed(3))),
    Column("tokens/s", _plain("speed.tokens_per_second", _fixed(1))),
    Column("tokens/s per GiB", _plain("speed.tokens_per_second_per_gib", _fixed(0))),
)
"""What the first table of a page shows of a plan. Times in seconds, with their floors, are in the table of cost."""


def _held_of_seen(numbers: Numbers) -> Cell:
    cell, seen = _plain("cache.tokens_held", _fixed(0))(numbers), numbers.get("cache.tokens_seen")
    return cell if cell.text is None or seen is None else replace(cell, text=f"{cell.text}/{seen.value:.0f}")


def _bytes_and_share(numbers: Numbers) -> Cell:
    cell, ratio = _plain("cache.bytes_held", byte_text)(numbers), numbers.get("cache.ratio")
    return EMPTY if ratio is None else replace(cell, text=f"{cell.text}  {100 * ratio.value:>3.0f} %")


def _hits_of_answers(numbers: Numbers) -> Cell:
    found = numbers.get("needle.accuracy")
    if found is None or found.n is None or found.low is None or found.high is None:
        return EMPTY
    hits = f"{found.value * found.n:.0f}/{found.n}"
    return Cell(text=hits, value=found.value, interval=f"{100 * found.low:.0f} to {100 * found.high:.0f} %")


def _token_and_floor(numbers: Numbers) -> Cell:
    cell, floor = _plain("speed.tpot_median", significant, 1000)(numbers), numbers.get("speed.floor_seconds")
    if cell.text is None or floor is None:
        return cell
    return replace(cell, interval=f"floor {milliseconds(floor.value)}")


def _operations(value: float) -> str:
    return flop_text(value).removesuffix("FLOP")


BRIEF: tuple[Column, ...] = (
    Column("held/seen", _held_of_seen),
    Column("bytes", _bytes_and_share),
    Column("ΔNLL (95 %)", _estimate(LOSS, _fixed(3, "+")), is_difference=True),
    Column("needle (95 %)", _hits_of_answers),
    Column("recall (95 %)", _estimate("needle.recall", _fixed(0, unit=" %"), 100)),
    Column("KL", _plain("fidelity.kl", _fixed(3))),
    Column("top-1", _plain("fidelity.top1", _fixed(1, unit=" %"), 100)),
    Column("TTFT", _plain("speed.ttft_over_full", _fixed(2, unit="×"))),
    Column("TPOT", _plain("speed.tpot_over_full", _fixed(2, unit="×"))),
    Column("tokens/s", _plain("speed.tokens_per_second")),
    Column("per GiB", _plain("speed.tokens_per_second_per_gib")),
    Column("ms/token", _token_and_floor),
    Column("FLOP/token", _plain("speed.flops_token", _operations)),
    Column("of method", _plain("speed.flops_method_token", _operations)),
    Column("GFLOP/s", _plain("speed.achieved_gflops_token")),
    Column("accepted", _estimate("speculation.acceptance", _fixed(0, unit=" %"), 100)),
    Column("emitted", _estimate("speculation.emitted_per_verification", _fixed(2))),
    Column("speed-up", _estimate("speculation.speed_up", _fixed(2, unit="×"))),
    Column("peak prefill", _plain("memory.bytes_peak", byte_text)),
    Column("decode", _plain("memory.bytes_peak_decode", byte_text)),
    Column("batch fits", _fits("capacity.largest_batch", before="~")),
    Column("context fits", _fits("capacity.longest_context", before="~")),
)
"""The same in a terminal, where there is less space."""

OF_TASKS: dict[str, TaskColumns] = {
    "speed": TaskColumns(
        "Cost",
        (
            "Medians with quartiles. Floor of TPOT: weights and cache read once at the bandwidth that this "
            "machine reached; of TTFT: that of the weights, or the operations at the rate it reached, "
            "whichever is longer. Operations are counted by arithmetic, the method's own apart; GFLOP/s are "
            "of both together. Tokens/s per GiB: of all rows, over what their caches hold, as a memory that "
            "is full of such caches would give."
        ),
        (
            Column("bytes held", _plain("speed.bytes_held", byte_text)),
            Column("TTFT, ms", _time("speed.ttft")),
            Column("floor of TTFT, ms", _floor("speed.floor_ttft_seconds", "speed.ttft_median")),
            Column("TPOT, ms", _time("speed.tpot")),
            Column("floor of TPOT, ms", _floor("speed.floor_seconds", "speed.tpot_median")),
            Column("tokens/s", _plain("speed.tokens_per_second")),
            Column("tokens/s per GiB", _plain("speed.tokens_per_second_per_gib")),
            Column("prefill", _plain("speed.flops_prefill", flop_text)),
            Column("prefill, method", _plain("speed.flops_method_prefill", flop_text)),
            Column("prefill, GFLOP/s", _plain("speed.achieved_gflops_prefill")),
            Column("token", _plain("speed.flops_token", flop_text)),
            Column("token, method", _plain("speed.flops_method_token", flop_text)),
            Column("token, GFLOP/s", _plain("speed.achieved_gflops_token")),
        ),
    ),
    "speculation": TaskColumns(
        "Speculation",
        (
            "With a draft beside the same plan's plain decoding, interleaved; intervals over random states. "
            "Acceptance: of judged tokens. On the device: all caches that are at work, drafts' included. "
            "Same text: greedy rounds in which no token differs."
        ),
        (
            Column("on the device", _plain("speculation.device_bytes", byte_text)),
            Column("plain, on the device", _plain("speculation.plain_device_bytes", byte_text)),
            Column("acceptance, %", _estimate("speculation.acceptance", _fixed(2), 100, ends=True)),
            Column("emitted per verification", _estimate("speculation.emitted_per_verification", _fixed(2), ends=True)),
            Column("inner acceptance, %", _plain("speculation.inner_acceptance", scale=100)),
            Column("tokens/s", _plain("speculation.tokens_per_second")),
            Column("plain tokens/s", _plain("speculation.plain_tokens_per_second")),
            Column("speed-up", _estimate("speculation.speed_up", _fixed(2), ends=True)),
            Column("speed-up over the model's own cache", _estimate("speculation.speed_up_own", _fixed(2), ends=True)),
            Column("same text, %", _plain("speculation.identical", scale=100)),
        ),
    ),
    "memory": TaskColumns(
        "Memory of a fresh process",
        "Above what the process held before its first cache, so without the weights.",
        (
            Column("bytes held", _plain("memory.bytes_held", byte_text)),
            Column("of full, %", _share_of_full),
            Column("resident", _plain("memory.bytes_resident", byte_text)),
            Column("peak, prefill", _plain("memory.bytes_peak", byte_text)),
            Column("peak, decode", _plain("memory.bytes_peak_decode", byte_text)),
        ),
    ),
    "capacity": TaskColumns(
        "What fits",
        ("The largest batch and the longest context that fit in this memory; not run: reckoned from those that were."),
        (
            Column("memory", _plain("capacity.memory_bytes", byte_text)),
            Column("largest batch", _fits("capacity.largest_batch", small="not run")),
            Column("longest context", _fits("capacity.longest_context", small="not run")),
            Column("one more token", _plain("capacity.bytes_per_token", byte_text)),
        ),
    ),
    "fidelity": TaskColumns(
        "Fidelity",
        (
            "Against 'full' on the same tokens. Errors are relative, means over layers; the charts have them "
            "by layer. They describe what is held. Ruined: windows whose continuation loses more than 0.5 "
            "nats a token over 'full'. First difference: of two texts that are decoded greedily, up to 64 "
            "tokens, all of which count where none differs. Repeated: runs of four tokens in the plan's text "
            "that it had before. A largest value grows with the tokens."
        ),
        (
            Column("KL", _plain("fidelity.kl")),
            Column("KL, 99th percentile", _plain("fidelity.kl_p99")),
            Column("KL, 99.9 %", _plain("fidelity.kl_p999")),
            Column("largest KL", _plain("fidelity.kl_max")),
            Column("ruined, %", _plain("fidelity.ruined", scale=100)),
            Column("tokens to first difference", _plain("fidelity.divergence", _fixed(1))),
            Column("same text, %", _plain("fidelity.same_text", scale=100)),
            Column("repeated, %", _plain("fidelity.repetition", scale=100)),
            Column("top-1, %", _plain("fidelity.top1", scale=100)),
            Column("calibration error, %", _plain("fidelity.ece", scale=100)),
            Column("key error", _plain("fidelity.key_error")),
            Column("value error", _plain("fidelity.value_error")),
            Column("mass retained, %", _plain("fidelity.retained_mass", scale=100)),
            Column("attention cosine", _plain("fidelity.attention_cosine", _fixed(4))),
            Column("output error", _plain("fidelity.output_error")),
        ),
    ),
}
"""The tables of tasks whose numbers need more than their declared words."""


def columns_of_task(task: str) -> TaskColumns | None:
    """Return the columns of a task's own table; None where it has none."""
    if task in OF_TASKS:
        return OF_TASKS[task]
    if task in HAND_MADE or task not in KINDS:
        return None
    told = KINDS[task].metrics or ()
    note = "; ".join(f"{metric.name}: {metric.meaning}" for metric in told if metric.meaning)
    columns = tuple(Column(_heading(metric), _plain(f"{task}.{metric.name}")) for metric in told)
    return TaskColumns(task.capitalize(), f"{note}." if note else "", columns)


def declared_columns(rows: Sequence[Row]) -> Iterator[Column]:
    """Return the columns of what some plans have from tasks without columns of their own, as they come."""
    for task in dict.fromkeys(number.task for row in rows for number in row.numbers.values()):
        if task in KINDS and task not in HAND_MADE:
            for metric in KINDS[task].metrics or ():
                name = f"{task}.{metric.name}"
                if any(name in row.numbers for row in rows):
                    yield Column(_heading(metric, task), _plain(name, lambda value: significant(value, 4)))


def _heading(metric: Metric, task: str = "") -> str:
    """A metric's name and unit in words, behind the name of its task where that is given."""
    words = f"{task} {metric.name}".strip().replace("_", " ")
    return f"{words}, {metric.unit}" if metric.unit else words
