"""What the lm-evaluation-harness found, as fields of a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["is_ratio", "likelihoods_of", "main_metric", "metrics_of", "scores_of", "versions"]

_NOT_METRICS = ("alias", "name", "sample_len", "sample_count")
_MAIN = ("acc", "exact_match", "f1", "em")


def versions(tasks: Mapping[str, Any]) -> str:
    """The versions that the harness gives to these tasks."""
    return ", ".join(sorted({str(task.VERSION) for task in tasks.values()}))


def main_metric(task: Any) -> str:
    """`METRIC,FILTER` of the metric that stands for a document: right or wrong where there is such a one."""
    names = [str(name) for name in task.aggregation()]
    metric = next((name for name in _MAIN if name in names), names[0])
    filters = task.get_config("filter_list")
    return f"{metric},{filters[0]['name'] if filters else 'none'}"


def metrics_of(found: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    """The numbers of one task, None where one is not finite or was not measured, and notes on them."""
    metrics: dict[str, float | None] = {}
    notes = []
    for name, value in found.items():
        if name in _NOT_METRICS:
            continue
        finite = isinstance(value, int | float) and math.isfinite(value)
        metrics[name] = float(value) if finite else None
        if isinstance(value, float) and not finite:
            notes.append(f"The harness gives {value} for {name}.")
    return metrics, notes


def is_ratio(value: object) -> bool:
    """Whether a document's value is a sum and what it is divided by, as those of perplexities over words are."""
    if not isinstance(value, Sequence) or len(value) != 2 or not all(isinstance(each, int | float) for each in value):
        return False
    return bool(value[1])


def scores_of(values: Sequence[Any]) -> tuple[float, ...] | None:
    """A number for each document; None where the harness gives something else for one of them."""
    found = [value[0] / value[1] if is_ratio(value) else value for value in values]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in found):
        return None
    return tuple(float(value) for value in found)


def likelihoods_of(samples: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    """The log-likelihoods of each document summed up; None where text was generated."""
    found = []
    for sample in samples:
        answers = [answer[0] if isinstance(answer, tuple) else answer for each in sample["resps"] for answer in each]
        if not all(isinstance(answer, float) and math.isfinite(answer) for answer in answers):
            return None
        found.append(float(sum(answers)))
    return tuple(found)
