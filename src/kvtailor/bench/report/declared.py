"""What a report shows of a task that has no page of its own: the metrics that its file declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtailor.bench.kinds import KINDS, Metric
from kvtailor.bench.schema import Record

__all__ = ["HAND_MADE", "compared_tasks", "declared_tasks", "heading", "metrics_of"]

HAND_MADE = (
    "perplexity",
    "fidelity",
    "needle",
    "speed",
    "memory",
    "capacity",
    "speculation",
    "longcontext",
    "harness",
)
"""Tasks with columns, tables and words of their own in `rows.py` and `tables/`."""


def declared_tasks(records: Sequence[Record]) -> list[str]:
    """Return the tasks of some records that are declared and have no page of their own, as they come."""
    return [task for task in dict.fromkeys(r.task for r in records) if task in KINDS and task not in HAND_MADE]


def compared_tasks() -> list[str]:
    """Return the tasks whose records have a number for each sample, so that plans can be compared sample by sample."""
    by_sample = [task for task, kind in KINDS.items() if kind.by_sample]
    return sorted(by_sample, key=lambda task: HAND_MADE.index(task) if task in HAND_MADE else len(HAND_MADE))


def metrics_of(record: Record) -> Mapping[Metric, float]:
    """Return the declared metrics of a record that were measured, in the order in which they are declared."""
    found = {metric: record.metrics.get(metric.name) for metric in KINDS[record.task].told}
    return {metric: value for metric, value in found.items() if value is not None}


def heading(metric: Metric, task: str = "") -> str:
    """Return a metric's name and unit in words, behind the name of its task where that is given."""
    words = f"{task} {metric.name}".strip().replace("_", " ")
    return f"{words}, {metric.unit}" if metric.unit else words
