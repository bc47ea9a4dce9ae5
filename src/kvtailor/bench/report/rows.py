"""One row for each plan, joined from the records of all tasks: of each task the point that most plans have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvtailor.bench.measure.paired_hits import share
from kvtailor.bench.measure.statistics import Estimate, geometric_mean, mean, wilson
from kvtailor.bench.report.declared import HAND_MADE, declared_tasks, heading, metrics_of
from kvtailor.bench.report.points import Series, base, series_of, texts_together
from kvtailor.bench.report.tables.quality import difference, documents_of, documents_over
from kvtailor.bench.schema import Record
from kvtailor.presets import FULL

__all__ = ["OWN", "Row", "asked_of_both", "rate_per_gib", "rows_of"]

OWN = "own"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a report has about one plan. None: not measured.

    Attributes:
        label: the plan as the user wrote it.
        plan: canonical form.
        plan_hash: content hash; "own" for the model's own cache.
        tokens_held: mean over rows, layers and heads, of the perplexity windows, else of the longest needles.
        tokens_seen: of the same sample.
        bytes_held: of the same sample.
        bytes_full: of the same sample.
        ratio: bytes_held / bytes_full.
        bytes_resident: growth of a fresh process for each cache.
        bytes_peak: highest memory of that process in one prefill, above what it held before.
        bytes_peak_decode: the same while it decodes.
        nll: nats per token, mean over the windows of all texts that the same plans have.
        perplexity: exp of `nll`.
        bits_per_byte: of the text scored in them.
        loss: mean over these windows of the difference of `nll` to 'full', with its 95 % interval.
        accuracy: share of right answers with its 95 % interval.
        hits: right answers.
        answers: all answers.
        recall: mean share of the parts that came, of the answers with several, with a 95 % interval.
        answer_loss: mean over documents of the difference to 'full' in nats per answer token.
        kl: mean of KL(full || plan) in nats per token.
        kl_p99: its 99th percentile over tokens.
        top1: share of tokens of which the plan and 'full' find the same most likely.
        ece: expected calibration error of the plan's own predictions.
        output_error: relative error of the attention output, mean over layers.
        ttft_seconds: median.
        tpot_seconds: median.
        floor_seconds: the physical floor of a token: weights and cache read once.
        ttft_ratio: median over the median of 'full'; None where 'full' was not timed in the same run.
        tpot_ratio: the same for a further token.
        tpot_spread: (q1, q3) over the median of 'full'.
        floor_ratio: the physical floor of a token over the median of this plan: 1 would be perfect.
        tokens_per_second: decoded, over the whole batch.
        tokens_per_second_per_gib: the same over what the batch's caches hold after these tokens.
        flops_prefill, flops_token: of the model, by arithmetic, for a prefill of all rows and for a token of one.
        flops_method_prefill, flops_method_token: what the plan itself adds to them.
        achieved_gflops_prefill, achieved_gflops_token: both together over the time they took.
        largest_batch, longest_context: that fit the memory that was asked for.
        largest_batch_verified, longest_context_verified: 1 where that size and the next were run, 0 where
            it was reckoned.
        bytes_per_token: what one more token takes.
        acceptance, emitted: with a draft, share of judged tokens that were accepted, and tokens for each verification.
        speed_up: with a draft, over the same plan without one.
        metrics: numbers of tasks that have no fields here, by the heading that is made of what their files declare.
        metric_tasks: the task of each of them.
        errors: why numbers are missing.
        sources: keys of the records behind the numbers by task, of those behind the bytes by "bytes"; and of both
            sides, the plan's and then those of 'full', by "loss", "answer_loss" and "time_ratio".
    """

    label: str
    plan: str
    plan_hash: str
    tokens_held: float | None = None
    tokens_seen: int | None = None
    bytes_held: int | None = None
    bytes_full: int | None = None
    ratio: float | None = None
    bytes_resident: int | None = None
    bytes_peak: int | None = None
    bytes_peak_decode: int | None = None
    nll: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    loss: Estimate | None = None
    accuracy: Estimate | None = None
    hits: int | None = None
    answers: int | None = None
    recall: Estimate | None = None
    answer_loss: Estimate | None = None
    kl: float | None = None
    kl_p99: float | None = None
    top1: float | None = None
    ece: float | None = None
    output_error: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    floor_seconds: float | None = None
    ttft_ratio: float | None = None
    tpot_ratio: float | None = None
    tpot_spread: tuple[float, float] | None = None
    floor_ratio: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gib: float | None = None
    flops_prefill: float | None = None
    flops_token: float | None = None
    flops_method_prefill: float | None = None
    flops_method_token: float | None = None
    achieved_gflops_prefill: float | None = None
    achieved_gflops_token: float | None = None
    largest_batch: float | None = None
    largest_batch_verified: float | None = None
    longest_context: float | None = None
    longest_context_verified: float | None = None
    bytes_per_token: float | None = None
    acceptance: Estimate | None = None
    emitted: Estimate | None = None
    speed_up: Estimate | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_tasks: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether it is of the null plan, which everything is compared with."""
        return self.plan == FULL


def rate_per_gib(record: Record) -> float | None:
    """Return the tokens per second of a record of `speed` over the GiB that its cache holds; None without either."""
    rate = record.metrics.get("tokens_per_second")
    return None if rate is None or not record.bytes_held else rate / (record.bytes_held / 2**30)


_ONE_POINT = tuple(task for task in HAND_MADE if task != "needle")
_FIDELITY = ("kl", "kl_p99", "top1", "ece", "output_error")
_COST = (
    "tokens_per_second",
    "flops_prefill",
    "flops_token",
    "flops_method_prefill",
    "flops_method_token",
    "achieved_gflops_prefill",
    "achieved_gflops_token",
)
_CAPACITY = (
    "largest_batch",
    "largest_batch_verified",
    "longest_context",
    "longest_context_verified",
    "bytes_per_token",
)


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Rows in the order in which the plans appear, 'full' first and the model's own cache last.

    A plan that this kvtailor does not have (`Record.missing`) has no row.
    """
    order: dict[str, Record] = {}
    for record in records:
        if not record.missing:
            order.setdefault(record.plan_hash, record)
    full = next((h for h, record in order.items() if record.is_full), None)
    ranked = sorted(order, key=lambda h: (h == OWN, h != full))
    shown = {name: base(series_of(records, name)) for name in (*_ONE_POINT, *declared_tasks(records))}
    texts = texts_together(records, "perplexity")
    return [_row(order[h], [r for r in records if r.plan_hash == h], records, shown, texts, full) for h in ranked]


def _row(
    first: Record,
    ours: Sequence[Record],
    records: Sequence[Record],
    shown: Mapping[str, Series | None],
    texts: Sequence[Series],
    full: str | None,
) -> Row:
    def at(task: str, plan: str | None) -> Record | None:
        series = shown[task]
        return None if series is None or plan is None else series.records.get(plan)

    mine = first.plan_hash
    scored, faithful, timed, fresh, capacity, drafted = (
        at(task, mine) for task in ("perplexity", "fidelity", "speed", "memory", "capacity", "speculation")
    )
    sets = [at(task, mine) for task in ("longcontext", "harness")]
    declared = {task: at(task, mine) for task in shown if task not in HAND_MADE}
    needles = asked_of_both(records, mine, full)
    longest = sorted(needles, key=lambda r: -(r.tokens_seen or 0))
    weighed = next(
        (
            r
            for r in [scored, *longest, faithful, *sets, timed, fresh, drafted, *declared.values()]
            if r is not None and r.bytes_held is not None
        ),
        None,
    )
    found: dict[str, object] = {}
    timed_full = at("speed", full)
    ours_scored, full_scored = ([each.records[plan] for each in texts if plan in each.records] for plan in (mine, full))
    answered = _pairs(needles, [r for r in records if r.plan_hash == full and r.task == "needle"])
    behind: dict[str, Sequence[Record | None]] = {
        "bytes": [weighed],
        "perplexity": ours_scored,
        "loss": [*ours_scored, *full_scored],
        "needle": needles,
        "answer_loss": [r for side in zip(*answered, strict=True) for r in side],
        "fidelity": [faithful],
        "speed": [timed],
        "time_ratio": [timed, timed_full],
        "memory": [fresh],
        "capacity": [capacity],
        "speculation": [drafted],
        **{task: [record] for task, record in declared.items()},
    }
    if weighed is not None:
        found |= {
            "tokens_held": weighed.tokens_held,
            "tokens_seen": weighed.tokens_seen,
            "bytes_held": weighed.bytes_held,
            "bytes_full": weighed.bytes_full,
            "ratio": weighed.bytes_held / weighed.bytes_full if weighed.bytes_held and weighed.bytes_full else None,
        }
    if ours_scored:
        found |= _over_texts(ours_scored)
        pairs = _pairs(ours_scored, full_scored)
        found["loss"] = _paired(pairs, "nll", documents_over([record for record, _ in pairs]))
    if needles:
        hits = sum(int(sum(r.values["hit"])) for r in needles)
        answers = sum(len(r.values["hit"]) for r in needles)
        found |= {
            "hits": hits,
            "answers": answers,
            "accuracy": wilson(hits, answers),
            "recall": _recall(needles),
            "answer_loss": _paired(answered, "nll", documents_of(answered[0][0]) if len(answered) == 1 else ()),
        }
    for record, names in ((faithful, _FIDELITY), (timed, _COST), (capacity, _CAPACITY)):
        found |= {} if record is None else {name: record.metrics.get(name) for name in names}
    if timed is not None:
        found["tokens_per_second_per_gib"] = rate_per_gib(timed)
    if timed is not None and timed.timings:
        found |= _times(timed, timed_full)
    if fresh is not None:
        found |= {name: getattr(fresh, name) for name in ("bytes_resident", "bytes_peak", "bytes_peak_decode")}
    if drafted is not None:
        found |= _of_draft(drafted)
    found["metrics"] = {
        heading(metric, task): value
        for task, record in declared.items()
        if record is not None
        for metric, value in metrics_of(record).items()
    }
    found["metric_tasks"] = {
        heading(metric, task): task
        for task, record in declared.items()
        if record is not None
        for metric in metrics_of(record)
    }
    return Row(
        label=first.label,
        plan=first.plan,
        plan_hash=first.plan_hash,
        errors=tuple(dict.fromkeys(f"{r.task}: {r.error}" for r in ours if r.error is not None)),
        sources={
            name: tuple(dict.fromkeys(r.key for r in some if r is not None))
            for name, some in behind.items()
            if any(some)
        },
        **found,  # type: ignore[arg-type]
    )


def asked_of_both(records: Sequence[Record], plan: str, full: str | None) -> list[Record]:
    """The needle records of a plan at the points that 'full' has too; all of them where 'full' was not asked."""
    series = [each for each in series_of(records, "needle") if plan in each.records]
    shared = [each for each in series if full in each.records]
    return [each.records[plan] for each in shared or series]


def _of_draft(drafted: Record) -> dict[str, object]:
    taken: dict[str, tuple[str, Callable[[Sequence[float]], Estimate]]] = {
        "acceptance": ("acceptance", mean),
        "emitted": ("emitted_per_verification", mean),
        "speed_up": ("speed_up", geometric_mean),
    }
    return {name: of(drafted.values[value]) for name, (value, of) in taken.items() if drafted.values.get(value)}


def _times(timed: Record, full: Record | None) -> dict[str, object]:
    found: dict[str, object] = {f"{name}_seconds": timed.timings[name]["median"] for name in ("ttft", "tpot")}
    found["floor_seconds"] = timed.floor_seconds
    # Times of two runs may have been taken on a machine in two states.
    if full is not None and full.timings and full.run == timed.run:
        found |= {f"{name}_ratio": _over(timed, full, name, "median") for name in ("ttft", "tpot")}
        quartiles = _over(timed, full, "tpot", "q1"), _over(timed, full, "tpot", "q3")
        found["tpot_spread"] = quartiles if None not in quartiles else None
    median = timed.timings["tpot"]["median"]
    if timed.floor_seconds is not None and median:
        found["floor_ratio"] = timed.floor_seconds / median
    return found


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


def _over_texts(scored: Sequence[Record]) -> dict[str, float | None]:
    """Perplexity of one plan over some texts: what one record has, or means over their windows and tokens."""
    if len(scored) == 1:
        return {name: scored[0].metrics.get(name) for name in ("nll", "perplexity", "bits_per_byte")}
    windows = [x for record in scored for x in record.values.get("nll", ())]
    nll = fmean(windows) if windows and all(record.values.get("nll") for record in scored) else None
    bits = [(record.metrics.get("bits_per_byte"), record.metrics.get("nll"), record.tokens_scored) for record in scored]
    found: dict[str, float | None] = {"nll": nll, "perplexity": None if nll is None else math.exp(nll)}
    # Bytes of a text are its nats over those of a byte.
    nats = [each * tokens for _, each, tokens in bits if each is not None and tokens]
    sizes = [each * tokens / (rate * math.log(2)) for rate, each, tokens in bits if rate and each and tokens]
    whole = len(nats) == len(sizes) == len(scored)
    return found | {"bits_per_byte": sum(nats) / math.log(2) / sum(sizes) if whole else None}


def _recall(needles: Sequence[Record]) -> Estimate | None:
    shares = [part for record in needles for part in record.values.get("recall", ())]
    return share(shares) if shares else None


def _over(ours: Record, base: Record, name: str, which: str) -> float | None:
    top, bottom = ours.timings[name][which], base.timings[name]["median"]
    return top / bottom if top is not None and bottom else None
