"""Whether the numbers of a record agree with the samples that they were computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from kvtailor.bench.kinds import KINDS
from kvtailor.errors import ArgumentError

__all__ = ["check_sums"]


def check_sums(
    task: str,
    samples: int | None,
    metrics: Mapping[str, float | None],
    values: Mapping[str, Sequence[float]],
) -> None:
    """Every list has a number for each sample, and every metric that is the mean of a list is that mean.

    Tasks whose lists are not one number for each sample, such as times, are not held against anything.

    Args:
        task: name of the task.
        samples, metrics, values: of its record.

    Raises:
        ArgumentError: one that does not agree, by its field.
    """
    if task not in KINDS or not KINDS[task].by_sample:
        return
    first = next(iter(values), None)
    for name, found in values.items():
        if samples is not None and len(found) != samples:
            raise ArgumentError(
                f"values.{name} has {len(found)} numbers, but samples is {samples}: the record was edited or damaged"
            )
        if first is not None and len(found) != len(values[first]):
            raise ArgumentError(
                f"values.{name} has {len(found)} numbers, but values.{first} has {len(values[first])}: the record was "
                "edited or damaged"
            )
    for metric, name in _means(task, metrics, values).items():
        said, listed = metrics.get(metric), values.get(name)
        # Predictions were averaged over tokens in float32.
        if said is not None and listed and not math.isclose(said, fmean(listed), rel_tol=1e-5, abs_tol=1e-6):
            raise ArgumentError(
                f"metrics.{metric} is {said}, but the mean of the {len(listed)} numbers in values.{name} is "
                f"{fmean(listed)}: the record was edited or damaged"
            )
    nll, perplexity = metrics.get("nll"), metrics.get("perplexity")
    if nll is None or perplexity is None or task != "perplexity":
        return
    if perplexity <= 0 or not math.isclose(math.log(perplexity), nll, rel_tol=1e-6, abs_tol=1e-6):
        raise ArgumentError(
            f"metrics.perplexity is {perplexity}, but metrics.nll is {nll} and a perplexity is its exponential: the "
            "record was edited or damaged"
        )


def _means(task: str, metrics: Mapping[str, float | None], values: Mapping[str, Sequence[float]]) -> Mapping[str, str]:
    if task != "longcontext":
        return {metric.name: metric.mean_of for metric in KINDS[task].told if metric.mean_of is not None}
    # The geometric mean of several ROUGE scores is the mean of no list.
    return {name: name for name in metrics if name in values and not (name == "score" and len(metrics) > 1)}
