"""Results that a cache which really holds less cannot have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from kvtailor.bench.checks.fraud import Finding
from kvtailor.bench.measure.statistics import FEWEST, student_quantile
from kvtailor.bench.schema import Record

__all__ = ["is_smaller", "of_results", "same_doings"]

_SIZES = ("tokens_held", "tokens_seen", "bytes_held", "bytes_full")
_COMPRESSES = 1.05
_FALSE_ALARMS = 0.001
_LEAST_GAIN = 0.005


def of_results(records: Sequence[Record]) -> Iterator[Finding]:
    """The frauds that show in the samples of all plans, for each task over all of its points together.

    One point alone may be easy enough for every cache.
    """
    for of_task in _results(records):
        full = next((r for r in of_task if r.first.is_full), None)
        smaller = [r for r in of_task if _is_smaller(r.first)]
        for found in smaller:
            if full is not None and (why := _untouched(found, full)) is not None:
                record = found.first
                yield Finding(
                    "untouched cache",
                    f"plan {record.label!r} claims to hold {record.tokens_held:.0f} of {record.tokens_seen} tokens "
                    f"in {record.bytes_held} of {record.bytes_full} bytes, yet {why}: the compressed cache was never "
                    "read",
                    found.records,
                )
        for one, other in itertools.combinations(smaller, 2):
            if one.same_as(other) and one.held != other.held:
                yield Finding(
                    "equal results",
                    f"plans {one.first.label!r} and {other.first.label!r} hold different things, yet all of their "
                    f"{len(one.values)} samples are equal to the last bit: one of them is not what its name claims",
                    (*one.records, *other.records),
                )
    yield from _better(records)


def _untouched(found: _Result, full: _Result) -> str | None:
    """Why the results cannot come from what the plan holds; None where they can.

    Rounding is no proof on its own: in bfloat16 an honest plan that loses little, such as codes of 8 bits, is as near.
    So a plan that has been seen to read what it holds is only accused where every bit is the same.
    """
    if found.same_as(full):
        return "no result differs from 'full'"
    unread = [record for record in found.records if record.reads_held is False]
    if unread:
        return (
            "its results stay as they are, up to a rounding of "
            f"{unread[0].rounding:.1e} nats, where all that it holds is set to zero"
        )
    roundings = [record.rounding for record in found.records]
    if found.where != full.where or any(r.reads_held for r in found.records) or not all(roundings):
        return None
    most = max(r for r in roundings if r is not None)
    if all(abs(a - b) <= most for a, b in zip(found.values, full.values, strict=True)):
        return f"no result differs from 'full' by more than rounding does here ({most:.1e} nats)"
    return None


def same_doings(records: Sequence[Record]) -> Iterator[str]:
    """Sentences on plans that differ by name alone: same results, and the same tokens and bytes everywhere."""
    for of_task in _results(records):
        for one, other in itertools.combinations([r for r in of_task if _is_smaller(r.first)], 2):
            if one.same_as(other) and one.held == other.held:
                yield (
                    f"{one.first.label} and {other.first.label} did exactly the same in {one.first.task}: the same "
                    "results, tokens of each head and bytes of codes. What they differ in never came to act, as where "
                    "a budget has no room beside an observation window."
                )


def _better(records: Sequence[Record]) -> Iterator[Finding]:
    """Plans that hold less and are better than 'full' beyond chance.

    A wrong alarm fails a whole run, and a run checks this for every plan in every task, so the 95 % of the report's
    intervals is no level for it. All questions of one run together are wrong with a chance of 0.001 (Bonferroni): for
    perplexity by Student's one-sided test of the paired windows, and only if the gain is above 0.005 nats too; for
    answers and scores, which are mostly ties, by the exact one-sided sign test of the pairs that differ. The nats of a
    needle's answer are not compared: a plan that has lost the answer may spread its probability more or less widely.
    """
    questions: list[tuple[_Result, _Result]] = []
    for name in ("nll", "hit", "score"):
        for of_task in _results([r for r in records if (r.task == "needle") == (name == "hit")], (name,)):
            full = next((r for r in of_task if r.first.is_full), None)
            if full is not None:
                questions += [(r, full) for r in of_task if _is_smaller(r.first) and r.where == full.where]
    for ours, full in questions:
        level = _FALSE_ALARMS / len(questions)
        of_text = ours.name == "nll"
        # As the harness declares it for a task's main metric.
        lower = of_text or any(note.endswith("lower is better.") for note in ours.first.notes)
        gains = [(b - a) if lower else (a - b) for a, b in zip(ours.values, full.values, strict=True)]
        beyond = _mean_is_above(gains, level, _LEAST_GAIN) if of_text else _wins_are_more(gains, level)
        if beyond:
            unit = "nats per token" if of_text else f"of {ours.name}"
            yield Finding(
                "better than full",
                f"plan {ours.first.label!r} holds less than 'full' and is better in task {ours.first.task!r} by "
                f"{fmean(gains):.3f} {unit} in the mean of {len(gains)} samples, which chance does not give: the model "
                "makes no use of this context, or the plan was tuned on the answers; take another text or "
                "model, or allow 'better than full' if that is what you want to show",
                (*ours.records, *full.records),
            )


def _mean_is_above(gains: Sequence[float], level: float, least: float) -> bool:
    if len(gains) < FEWEST or not all(map(math.isfinite, gains)):
        return False
    low = fmean(gains) - student_quantile(1 - level, len(gains) - 1) * stdev(gains) / math.sqrt(len(gains))
    return low > 0 and fmean(gains) > least


def _wins_are_more(gains: Sequence[float], level: float) -> bool:
    wins, losses = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
    pairs = wins + losses
    chance: float = sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs
    return chance < level


@dataclass
class _Result:
    """All samples of one plan in one task."""

    first: Record
    name: str
    records: list[Record]

    @property
    def values(self) -> list[float]:
        return [value for record in self.records for value in record.values[self.name]]

    @property
    def where(self) -> list[tuple[str | None, str, int]]:
        return [(r.text_hash, str(r.point), len(r.values[self.name])) for r in self.records]

    @property
    def held(self) -> list[object]:
        """What the results rest on: tokens, and bytes of what is not in full precision.

        Of tokens in full precision their number says what they hold: room behind them takes bytes too. Of evidence
        and an attention's own index no result need say anything.
        """
        return [
            (r.tokens_held, r.tokens_by_head, r.bytes_held if r.bytes_by_stage is None else _apart(r.bytes_by_stage))
            for r in self.records
        ]

    def same_as(self, other: _Result) -> bool:
        return self.where == other.where and self.values == other.values


def _apart(by_stage: Mapping[str, int]) -> dict[str, int]:
    return {stage: held for stage, held in by_stage.items() if held and stage not in ("attend", "observe", "tail")}


def _results(records: Sequence[Record], names: Sequence[str] = ("nll", "kl")) -> list[list[_Result]]:
    """By model and task, the result of each plan."""
    found: dict[tuple[object, ...], dict[str, _Result]] = {}
    for record in records:
        name = next((name for name in names if name in record.values), None)
        if name is not None and record.error is None:
            of_task = found.setdefault((record.model, record.dtypes, record.task, name), {})
            of_task.setdefault(record.plan_hash, _Result(record, name, [])).records.append(record)
    return [list(by_plan.values()) for by_plan in found.values()]


def _is_smaller(record: Record) -> bool:
    return is_smaller({name: getattr(record, name) for name in _SIZES})


def is_smaller(sizes: Mapping[str, Any]) -> bool:
    """Whether the plan holds less than 'full' by these fields of a record."""
    held, seen, taken, full = (sizes.get(name) for name in _SIZES)
    if held is None or seen is None or not taken or not full:
        return False
    return bool(held < seen or full > _COMPRESSES * taken)
