"""One choice of windows or documents of a text, where runs have chosen anew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvtailor.bench.schema import Record

__all__ = ["one_choice"]


def one_choice(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records of one choice of windows or documents at each point of a text, and sentences on the others.

    A run with another number of them, or another state, chooses anew, and may choose some of the same, which would
    count twice where numbers are taken together. The choice that most plans have stays; of several such the one with
    the most samples, then the newest. What one run measured at one point is one choice. Failures all stay.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.error is None:
            place = (*record.subject, record.task, record.text, dict(record.point), record.asked)
            groups.setdefault(json.dumps(place, sort_keys=True), []).append(record)
    left: dict[int, Record] = {}
    for group in groups.values():
        *others, _ = sorted(_choices(group), key=_worth)
        left |= {id(record): record for choice in others for record in choice}
    kept = [record for record in records if id(record) not in left]
    return kept, list(_told(list(left.values()), kept))


def _choices(records: Sequence[Record]) -> list[list[Record]]:
    """Records of the same tokens or of one run together."""
    found: list[list[Record]] = []
    for record in records:
        joined = [
            each
            for each in found
            if any(other.text_hash == record.text_hash or other.run == record.run for other in each)
        ]
        found = [each for each in found if all(each is not other for other in joined)]
        found.append([*(other for each in joined for other in each), record])
    return found


def _worth(choice: Sequence[Record]) -> tuple[int, int, str]:
    """Plans, samples of one of them, and when."""
    plans = {record.plan_hash for record in choice}
    return len(plans), sum(record.samples or 0 for record in choice) // len(plans), max(r.started for r in choice)


def _told(left: Sequence[Record], kept: Sequence[Record]) -> Iterator[str]:
    """A sentence for each task and text of what was left out."""
    for task, text in dict.fromkeys((record.task, record.text) for record in left):
        ours = [record for record in left if (record.task, record.text) == (task, text)]
        there = {record.plan_hash for record in kept if (record.task, record.text) == (task, text)}
        lost = dict.fromkeys(record.label for record in ours if record.plan_hash not in there)
        runs = dict.fromkeys(record.run for record in ours)
        what = task if text is None else f"{task} of {text}"
        with_them = f", and with them {', '.join(lost)}" if lost else ""
        yield (
            f"{what} was measured on several choices of windows or documents, which may share some: {len(ours)} "
            f"records of run {', '.join(runs)} are left out{with_them}. Measure all plans with the same numbers, or "
            "give --leave-out run=NAME to show another choice."
        )
