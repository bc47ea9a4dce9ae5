"""Limits that a plan of the proof either meets or not, whatever it loses. What is out is told."""

from __future__ import annotations

from collections.abc import Sequence

from kvtailor.bench.report.words import byte_text
from kvtailor.errors import KvtailorError
from kvtailor.fitting.judging.verdict import Judged

__all__ = ["fast_enough", "small_enough"]


def small_enough(proved: Sequence[Judged], limit: int | None, notes: list[str]) -> list[Judged]:
    """Return those that have no more bytes than the memory on the text of the proof either.

    Args:
        proved: plans.
        limit: bytes of all rows; None: there is no limit.
        notes: sentences about plans that are out are added.

    Raises:
        KvtailorError: all that have numbers are out.
    """
    if limit is None:
        return list(proved)
    fitting = [each for each in proved if each.error is not None or each.bytes <= limit]
    notes += [
        f"{each.label} has {byte_text(each.bytes)} on the text of the proof, more than the memory, and is out."
        for each in proved
        if each not in fitting
    ]
    if len(fitting) < len(proved) and not any(each.error is None for each in fitting):
        raise KvtailorError(
            f"every plan of the proof has more bytes on its text than the {limit} that were asked for: heads hold "
            "other numbers of tokens there. Give a little more memory, or more text"
        )
    return fitting


def fast_enough(proved: Sequence[Judged], limit: float | None, notes: list[str]) -> list[Judged]:
    """Return those whose median time of a token is at most the limit.

    Args:
        proved: plans.
        limit: seconds; None: there is no limit.
        notes: sentences about plans that are out are added.

    Raises:
        KvtailorError: none is so fast, or no time could be measured.
    """
    if limit is None:
        return list(proved)
    medians = [(each.seconds or {}).get("median") for each in proved]
    fast = [each for each, median in zip(proved, medians, strict=True) if median is not None and median <= limit]
    if not fast:
        known = [(median, each.label) for each, median in zip(proved, medians, strict=True) if median is not None]
        if not known:
            raise KvtailorError(f"asked for a token in {1e3 * limit:g} ms, but no time could be measured here")
        median, label = min(known)
        raise KvtailorError(
            f"no plan decodes a token in {1e3 * limit:g} ms: the fastest takes {1e3 * median:.2f} ms, {label}"
        )
    notes += [
        f"{each.label} is out: a token takes longer than {1e3 * limit:g} ms, or its time could not be measured."
        for each in proved
        if each not in fast
    ]
    return fast
