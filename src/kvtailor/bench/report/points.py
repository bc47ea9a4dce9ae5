"""Which records belong together, and which point of a task the main table shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.bench.choices import one_choice
from kvtailor.bench.schema import Record, latest
from kvtailor.errors import ArgumentError

__all__ = [
    "Series",
    "base",
    "named",
    "of_one_model",
    "series_of",
    "texts_together",
]


@dataclass(frozen=True, kw_only=True)
class Series:
    """What all plans did at one point of one task, over the same tokens.

    Attributes:
        task: name of the task.
        text: name of the text; None where the task has none.
        point: the task's coordinates.
        records: by plan hash, those without an error.
    """

    task: str
    text: str | None
    point: dict[str, object]
    records: dict[str, Record]


def series_of(records: Sequence[Record], task: str) -> list[Series]:
    """The points of a task in the order in which they come; a point at which every plan failed is none."""
    found: dict[str, Series] = {}
    for record in records:
        if record.task != task or record.error is not None:
            continue
        place = json.dumps([record.text, record.text_hash, dict(record.point)], sort_keys=True)
        empty = Series(task=task, text=record.text, point=dict(record.point), records={})
        found.setdefault(place, empty).records[record.plan_hash] = record
    return list(found.values())


def base(series: Sequence[Series]) -> Series | None:
    """The point that most plans have; of several such, the first."""
    return max(series, key=lambda each: len(each.records), default=None)


def texts_together(records: Sequence[Record], task: str) -> list[Series]:
    """The texts at the point of `base` that the same plans have: what a number of a plan over all texts is made of.

    A text that one of these plans lacks is none of them, so that all plans have their numbers over the same tokens.
    """
    series = series_of(records, task)
    shown = base(series)
    if shown is None:
        return []
    return [each for each in series if each.point == shown.point and set(each.records) == set(shown.records)]


def named(series: Sequence[Series], *, text: bool = False) -> list[str]:
    """What distinguishes these points, in words: texts where they differ, and coordinates that distinguish more.

    Args:
        series: points of one task.
        text: name the text in any case.
    """
    texts = [each.text or "no text" for each in series]
    keys: list[tuple[str, ...]] = [(name,) for name in texts]
    telling = []
    for name in dict.fromkeys(name for each in series for name in each.point):
        finer = [(*key, str(each.point.get(name))) for key, each in zip(keys, series, strict=True)]
        if len(set(finer)) > len(set(keys)):
            keys = finer
            telling.append(name)
    with_text = text or len(set(texts)) > 1 or not telling
    return [
        ", ".join(
            ([name] if with_text else [])
            + [
                f"{coordinate} {each.point[coordinate]}"
                for coordinate in telling
                if each.point.get(coordinate) is not None
            ]
        )
        for name, each in zip(texts, series, strict=True)
    ]


def of_one_model(records: Sequence[Record]) -> tuple[list[Record], int]:
    """The records of the model (and weights, dtype and device) that was measured last, and how many others there are.

    Numbers of two models never stand in one row. Of records of the same thing, the latest, and of several choices of
    windows or documents one (`one_choice`).
    """
    single, _ = one_choice(latest(records))
    if not single:
        raise ArgumentError("asked for a summary of no records: run a task first")
    last = max(single, key=lambda record: record.started)
    ours = [record for record in single if record.subject == last.subject]
    return ours, len(single) - len(ours)
