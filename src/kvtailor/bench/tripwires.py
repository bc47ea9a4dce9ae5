"""What a bench that was fooled looks like: each check raises a sentence that names the fraud."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtailor.bench.schema import Record
from kvtailor.errors import KvtailorError

__all__ = ["Fraud", "check_distinct", "check_identity", "check_records", "check_repetition", "distinct_8grams"]

_COMPRESSES = 1.05
_RESIDENT_FACTOR = 1.5
_RESIDENT_NOISE = 2**19


class Fraud(KvtailorError, RuntimeError):
    """Results that cannot be what they say they are."""


def check_identity(
    ours: Sequence[float], own: Sequence[float], tolerance: float, what: str, mean_tolerance: float | None = None
) -> None:
    """The null plan gives what the model's own cache gives.

    Raises:
        Fraud: the largest difference of any token's log-probability is above `tolerance`, or the mean of their sizes
            above `mean_tolerance`.
    """
    sizes = [abs(a - b) for a, b in zip(ours, own, strict=True)]
    worst, mean = max(sizes), sum(sizes) / len(sizes)
    if mean_tolerance is not None and not mean <= mean_tolerance:
        raise Fraud(
            f"identity: plan 'full' and the model's own cache differ by {mean:.2e} nats in the mean token of {what}, "
            f"where {mean_tolerance:.0e} is allowed: no number of this run can be trusted; please report it with the "
            "model's name"
        )
    if not worst <= tolerance:
        raise Fraud(
            f"identity: plan 'full' and the model's own cache differ by up to {worst:.2e} nats in one token of "
            f"{what}, where {tolerance:.0e} is allowed: no number of this run can be trusted; please report it "
            "with the "
            "model's name"
        )


def check_distinct(hashes: Iterable[str], what: str) -> None:
    """No sample is there twice.

    Raises:
        Fraud: two samples have the same tokens.
    """
    seen: set[str] = set()
    for index, each in enumerate(hashes):
        if each in seen:
            raise Fraud(
                f"repeated data: sample {index} of {what} has the same tokens as an earlier one, so the samples are "
                "fewer than they seem: give a longer or another text"
            )
        seen.add(each)


def distinct_8grams(texts: Iterable[str]) -> float | None:
    """Share of different ones among all runs of 8 words; None where there is no such run."""
    grams = [
        tuple(words[i : i + 8]) for words in (text.split() for text in texts) for i in range(max(0, len(words) - 7))
    ]
    return len(set(grams)) / len(grams) if grams else None


def check_repetition(texts: Sequence[str], least: float, what: str) -> float | None:
    """The text is no sentence said again and again. Returns `distinct_8grams`.

    Raises:
        Fraud: too few different runs of 8 words.
    """
    share = distinct_8grams(texts)
    if share is not None and share < least:
        raise Fraud(
            f"repeated text: only {share:.0%} of the runs of 8 words of {what} are different, {least:.0%} are "
            "needed: on "
            "such a text every cache looks good; give another text"
        )
    return share


def check_records(records: Sequence[Record]) -> None:
    """A cache that holds less changes something, and two plans do not do exactly the same.

    Looks at the records of one run that have `values["nll"]`, for each task over all of its points together: one point
    alone may be easy enough for every cache.

    Where a fresh process was measured, it must not have grown by far more than the ledger says, nor its peak by less.
    Bytes must be those of the tensors and fit into the machine, and other data must give other results.

    Raises:
        Fraud: by its name, "untouched cache", "equal results", "hidden bytes", "impossible peak", "nominal bytes",
            "impossible bytes" or "same results on other data".
    """
    _check_bytes(records)
    _check_data(records)
    for record in records:
        if record.bytes_resident is None or record.bytes_held is None:
            continue
        if record.bytes_resident > _RESIDENT_FACTOR * record.bytes_held + _RESIDENT_NOISE:
            raise Fraud(
                f"hidden bytes: plan {record.label!r} says that its cache holds {record.bytes_held} bytes, yet a fresh "
                f"process grew by {record.bytes_resident} for each such cache: something is kept that the ledger does "
                "not see"
            )
    results: dict[str, dict[str, _Result]] = {}
    for record in records:
        if "nll" in record.values and record.error is None:
            of_plan = results.setdefault(record.task, {})
            of_plan.setdefault(record.plan_hash, _Result(record, [], [])).add(record)
    for by_plan in results.values():
        full = next((r for r in by_plan.values() if r.first.label == "full"), None)
        smaller = [r for r in by_plan.values() if _is_smaller(r.first)]
        for found in smaller:
            record = found.first
            if full is not None and found.same_as(full):
                raise Fraud(
                    f"untouched cache: plan {record.label!r} says that it holds {record.tokens_held:.0f} of "
                    f"{record.tokens_seen} tokens in {record.bytes_held} of {record.bytes_full} bytes, yet no result "
                    "differs from 'full': the compressed cache was never read"
                )
        for one, other in itertools.combinations(smaller, 2):
            if one.same_as(other):
                raise Fraud(
                    f"equal results: plans {one.first.label!r} and {other.first.label!r} are different, yet all of "
                    f"their {len(one.values)} samples are equal to the last bit: one of them is not what it says, or "
                    "both mean the same: leave one out"
                )


def _check_bytes(records: Sequence[Record]) -> None:
    for record in records:
        held, form, memory = record.bytes_held, record.bytes_closed_form, record.machine.get("memory_bytes")
        if held is None:
            continue
        if form is not None and form != held:
            raise Fraud(
                f"nominal bytes: plan {record.label!r} holds {held} bytes in its storages, yet {form} by arithmetic: "
                "one of them is a constant and not a measurement"
            )
        if record.bytes_peak is not None and record.bytes_peak < held - _RESIDENT_NOISE:
            raise Fraud(
                f"impossible peak: a prefill under plan {record.label!r} peaked at {record.bytes_peak} bytes, less "
                f"than the {held} bytes that its cache holds: the counter was not reset, or read too early"
            )
        if str(record.device).startswith("cpu") and isinstance(memory, int) and held > memory:
            raise Fraud(
                f"impossible bytes: plan {record.label!r} says that its cache holds {held} bytes on a machine that has "
                f"{memory}: they were never allocated"
            )


def _check_data(records: Sequence[Record]) -> None:
    seen: dict[tuple[str, str, tuple[float, ...]], Record] = {}
    for record in records:
        values = record.values.get("nll", ())
        if record.error is not None or record.text_hash is None or len(set(values)) < 2:
            continue
        earlier = seen.setdefault((record.task, record.plan_hash, values), record)
        if earlier.text_hash != record.text_hash:
            raise Fraud(
                f"same results on other data: plan {record.label!r} gives the same {len(values)} values in task "
                f"{record.task!r} on {earlier.text} at {dict(earlier.point)} and on {record.text} at "
                f"{dict(record.point)}: the data was never read, or is a fallback"
            )


@dataclass
class _Result:
    """All samples of one plan in one task."""

    first: Record
    where: list[tuple[str | None, str]]
    values: list[float]

    def add(self, record: Record) -> None:
        self.where.append((record.text_hash, str(record.point)))
        self.values.extend(record.values["nll"])

    def same_as(self, other: _Result) -> bool:
        return self.where == other.where and self.values == other.values


def _is_smaller(record: Record) -> bool:
    if record.tokens_held is None or record.tokens_seen is None or not record.bytes_held or not record.bytes_full:
        return False
    return record.tokens_held < record.tokens_seen or record.bytes_full > _COMPRESSES * record.bytes_held
