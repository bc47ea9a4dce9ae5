"""One row for each plan, joined from the records of all tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.bench.schema import Record
from kvtailor.bench.statistics import Estimate, mean_difference, wilson

__all__ = ["FULL", "OWN", "Row", "rows_of"]

FULL = "full"
OWN = "own"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a report says about one plan. None: not measured.

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
        nll: nats per token.
        perplexity: exp of `nll`.
        bits_per_byte: of the scored text.
        loss: mean over windows of the difference of `nll` to 'full', with its 95 % interval.
        accuracy: share of right answers with its 95 % interval.
        hits: right answers.
        answers: all answers.
        recall: mean share of the parts that came, of the answers with several, with a 95 % interval.
        answer_loss: mean over documents of the difference to 'full' in nats per answer token.
        kl: mean of KL(full || plan) in nats per token.
        top1: share of tokens of which the plan and 'full' find the same most likely.
        ttft_seconds: median.
        tpot_seconds: median.
        ttft_ratio: median over the median of 'full', same run.
        tpot_ratio: the same for a further token.
        tpot_spread: (q1, q3) over the median of 'full'.
        floor_ratio: the physical floor of a token over the median of this plan: 1 would be perfect.
        errors: why numbers are missing.
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
    top1: float | None = None
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    ttft_ratio: float | None = None
    tpot_ratio: float | None = None
    tpot_spread: tuple[float, float] | None = None
    floor_ratio: float | None = None
    errors: tuple[str, ...] = ()


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Rows in the order in which the plans appear, 'full' first and the model's own cache last."""
    order: dict[str, Record] = {}
    for record in records:
        order.setdefault(record.plan_hash, record)
    full = next((h for h, record in order.items() if record.label == FULL), None)
    ranked = sorted(order, key=lambda h: (h == OWN, h != full))
    of = {h: [r for r in records if r.plan_hash == h] for h in ranked}
    return [_row(order[h], of[h], of[full] if full is not None else []) for h in ranked]


def _row(first: Record, ours: Sequence[Record], full: Sequence[Record]) -> Row:
    good = [r for r in ours if r.error is None]
    scored = next((r for r in good if r.task == "perplexity"), None)
    needles = [r for r in good if r.task == "needle"]
    faithful = next((r for r in good if r.task == "fidelity"), None)
    timed = next((r for r in good if r.task == "speed"), None)
    fresh = next((r for r in good if r.task == "memory"), None)
    needles.sort(key=lambda r: -(r.tokens_seen or 0))
    weighed = next(
        (r for r in [scored, *needles, faithful, timed, fresh] if r is not None and r.bytes_held is not None), None
    )
    base = next((r for r in full if r.task == "speed" and r.error is None), None)
    found: dict[str, object] = {}
    if weighed is not None:
        found |= {
            "tokens_held": weighed.tokens_held,
            "tokens_seen": weighed.tokens_seen,
            "bytes_held": weighed.bytes_held,
            "bytes_full": weighed.bytes_full,
            "ratio": weighed.bytes_held / weighed.bytes_full if weighed.bytes_held and weighed.bytes_full else None,
        }
    if scored is not None:
        found |= {name: scored.metrics.get(name) for name in ("nll", "perplexity", "bits_per_byte")}
        found["loss"] = _paired([scored], full, "nll")
    if needles:
        hits = sum(int(sum(r.values["hit"])) for r in needles)
        answers = sum(len(r.values["hit"]) for r in needles)
        found |= {
            "hits": hits,
            "answers": answers,
            "accuracy": wilson(hits, answers),
            "recall": _recall(needles),
            "answer_loss": _paired(needles, full, "nll"),
        }
    if faithful is not None:
        found |= {name: faithful.metrics.get(name) for name in ("kl", "top1")}
    if timed is not None and timed.timings:
        found |= {f"{name}_seconds": timed.timings[name]["median"] for name in ("ttft", "tpot")}
        if base is not None and base.timings:
            found |= {f"{name}_ratio": _over(timed, base, name, "median") for name in ("ttft", "tpot")}
            quartiles = _over(timed, base, "tpot", "q1"), _over(timed, base, "tpot", "q3")
            found["tpot_spread"] = quartiles if None not in quartiles else None
        median = timed.timings["tpot"]["median"]
        if timed.floor_seconds is not None and median:
            found["floor_ratio"] = timed.floor_seconds / median
    return Row(
        label=first.label,
        plan=first.plan,
        plan_hash=first.plan_hash,
        bytes_resident=fresh.bytes_resident if fresh is not None else None,
        errors=tuple(dict.fromkeys(f"{r.task}: {r.error}" for r in ours if r.error is not None)),
        **found,  # type: ignore[arg-type]
    )


def _paired(ours: Sequence[Record], full: Sequence[Record], name: str) -> Estimate | None:
    """Mean difference over the samples that both sides have, matched by task, text and point."""
    theirs = {(r.task, r.text_hash, str(r.point)): r for r in full if r.error is None}
    pairs = [(r, theirs[k]) for r in ours if (k := (r.task, r.text_hash, str(r.point))) in theirs]
    a = [x for r, _ in pairs for x in r.values[name]]
    b = [x for _, r in pairs for x in r.values[name]]
    if not a or not all(map(math.isfinite, a + b)):
        return None
    return mean_difference(a, b)


def _recall(needles: Sequence[Record]) -> Estimate | None:
    shares = [share for record in needles for share in record.values.get("recall", ())]
    return mean_difference(shares, [0.0] * len(shares)) if shares else None


def _over(ours: Record, base: Record, name: str, which: str) -> float | None:
    top, bottom = ours.timings[name][which], base.timings[name]["median"]
    return top / bottom if top is not None and bottom else None
