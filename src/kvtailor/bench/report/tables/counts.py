"""Plans that were not asked as much as others, sentence by sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtailor.bench.report.points import compared_tasks, series_of
from kvtailor.bench.report.rows import OWN
from kvtailor.bench.schema import Record
from kvtailor.presets import FULL

__all__ = ["idle_plans", "unequal_samples"]

_AS_MUCH = 0.99


def unequal_samples(records: Sequence[Record]) -> Iterator[str]:
    """Tasks in which plans have unequal numbers of points or samples, a sentence each.

    A plan that failed at a point has a sentence of its own elsewhere, so such points do not count here.

    Args:
        records: of one model.
    """
    failed = {(r.task, r.plan_hash) for r in records if r.error is not None}
    for task in compared_tasks():
        series = series_of(records, task)
        plans = {h: r.label for each in series for h, r in each.records.items() if h != OWN and (task, h) not in failed}
        counts = {
            label: (
                sum(plan in each.records for each in series),
                sum(each.records[plan].samples or 0 for each in series if plan in each.records),
            )
            for plan, label in plans.items()
        }
        most = max(counts.values(), default=(0, 0))
        fewer = [f"{label} {_words(*count)}" for label, count in counts.items() if count != most]
        if fewer:
            others = FULL if counts.get(FULL) == most else next(x for x, count in counts.items() if count == most)
            yield (
                f"{task}: not every plan has the same samples: {', '.join(fewer)}, where {others} has {_words(*most)}. "
                "Only what a plan and 'full' both have is compared; run the bench again for what is missing."
            )


def idle_plans(records: Sequence[Record]) -> Iterator[str]:
    """Plans whose every result is that of 'full' to the last bit while they hold no fewer bytes: a sentence each.

    Plans that read less than they hold, or that keep bytes elsewhere than 'full' does, did something else and have no
    such sentence.

    Args:
        records: of one model.
    """
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for task in compared_tasks():
        for each in series_of(records, task):
            full = next((r for r in each.records.values() if r.is_full), None)
            if full is None or not full.values:
                continue
            for record in each.records.values():
                if not record.is_full and record.plan_hash != OWN:
                    pairs.setdefault(record.label, []).append((record, full))
    for label, found in pairs.items():
        if all(_is_idle(record, full) for record, full in found):
            yield (
                f"{label} did nothing here: each of its {sum(r.samples or 0 for r, _ in found)} samples is that of "
                "'full' to the last bit, and it holds no fewer bytes. These contexts may be shorter than its budget, "
                "or than what it leaves in full precision: ask for longer ones, or for a smaller budget."
            )


def _is_idle(record: Record, full: Record) -> bool:
    if record.bytes_held is None or record.bytes_full is None or record.bytes_held < _AS_MUCH * record.bytes_full:
        return False
    if record.traffic is not None or set(record.bytes_by_tier or {}) != set(full.bytes_by_tier or {}):
        return False
    if record.tokens_read is not None and record.tokens_held is not None and record.tokens_read < record.tokens_held:
        return False
    return record.values == full.values


def _words(points: int, samples: int) -> str:
    return f"{samples} samples at {points} {'point' if points == 1 else 'points'}"
