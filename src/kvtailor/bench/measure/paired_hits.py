"""Shares of right answers: intervals that stay honest where every answer is right, or no pair differs.

A bootstrap of samples that are all equal has no width, though twenty of twenty show no more than that about nine of ten
may be right. Both intervals here invert a score test, whose variance is that of the share that is being tested.

A score between 0 and 1 (a recall, an F1) counts as that part of a hit. Its variance is at most that of a hit with the
same mean, so the intervals are then too wide and never too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from kvtailor.bench.measure.statistics import Estimate, mean_difference, wilson
from kvtailor.errors import ArgumentError

__all__ = ["hit_difference", "loss_bound", "pairs_for", "share", "share_difference"]

# Score intervals of few hits cover less than their nominal level (95 % is 92.6 % at worst). With so much of the nominal
# error they cover 94.9 % or more for 5 to 200 pairs and losses of 0 to 10 points: docs/write_coverage.py.
_INNER = 0.7
_FEWEST_DIFFERING = 10
_STEPS = 60


def hit_difference(lost: float, gained: float, count: int, *, confidence: float = 0.95) -> Estimate:
    """Difference of two shares of right answers to the same questions, with a score interval.

    Tango 1998, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design", Statistics in Medicine 17, with the closed form of the constrained estimate; at a level that makes up for
    what score intervals lack with few hits.

    Args:
        lost: pairs that the reference alone got right.
        gained: pairs that the other alone got right.
        count: all pairs, equal ones included.
        confidence: share of such intervals that cover the true difference.

    Returns:
        `(gained - lost) / count`, between -1 and 1: below 0 is worse.

    Raises:
        ArgumentError: no pairs, or more that differ than there are.
    """
    _check(lost, gained, count)
    z = NormalDist().inv_cdf(1 - _INNER * (1 - confidence) / 2)
    return Estimate((gained - lost) / count, -_end(lost, gained, count, z), _end(gained, lost, count, z), count)


def loss_bound(lost: float, gained: float, count: int, *, error: float) -> float:
    """What the loss `(lost - gained) / count` is below with a chance of `1 - error`: one side of Tango's interval.

    Raises:
        ArgumentError: no pairs, or more that differ than there are.
    """
    _check(lost, gained, count)
    return _end(lost, gained, count, NormalDist().inv_cdf(1 - error))


def pairs_for(lost: float, gained: float, count: int, *, margin: float, error: float) -> int | None:
    """How many pairs it takes until `loss_bound` is below `margin`, if they turn out as these did.

    None where they lose as much as the margin, so that no number is enough.
    """
    if (lost - gained) / count >= margin:
        return None
    low, high = 0, 1
    while _bound_at(high / count, lost, gained, high, error) >= margin:
        low, high = high, 2 * high
        if high > 10**9:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        enough = _bound_at(middle / count, lost, gained, middle, error) < margin
        low, high = (low, middle) if enough else (middle, high)
    return high


def share(values: Sequence[float]) -> Estimate:
    """Mean of hits, or of scores between 0 and 1, with Wilson's interval.

    Raises:
        ArgumentError: no values, or one outside of 0 to 1.
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ArgumentError(f"asked for the share of {len(values)} values: give at least one, each between 0 and 1")
    return wilson(sum(values), len(values))


def share_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of `ours - theirs` over paired hits or scores between 0 and 1.

    Hits, and scores of which fewer than 10 pairs differ, have the interval of `hit_difference`; others have that of
    `mean_difference`, which uses how much they differ.

    Raises:
        ArgumentError: unequal counts, no samples, or a value outside of 0 to 1.
    """
    if len(ours) != len(theirs) or not ours or not all(0 <= value <= 1 for value in (*ours, *theirs)):
        raise ArgumentError(
            f"asked for paired differences of {len(ours)} and {len(theirs)} shares: give the same samples of both, "
            "each between 0 and 1"
        )
    lost, gained, counts_as_hits = differing(ours, theirs)
    return hit_difference(lost, gained, len(ours)) if counts_as_hits else mean_difference(ours, theirs)


def differing(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, bool]:
    """What was lost and gained, as hits; and whether the samples are hits, or so few differ that they count as such."""
    changes = [a - b for a, b in zip(ours, theirs, strict=True) if a != b]
    hits = all(value in (0.0, 1.0) for value in (*ours, *theirs))
    lost = -math.fsum(change for change in changes if change < 0)
    return lost, math.fsum(c for c in changes if c > 0), hits or len(changes) < _FEWEST_DIFFERING


def _check(lost: float, gained: float, count: int) -> None:
    if count < 1 or min(lost, gained) < 0 or lost + gained > count + 1e-9:
        raise ArgumentError(
            f"asked for the difference of {count} pairs of which {lost:g} are lost and {gained:g} gained: give at "
            "least one pair, and no more that differ than there are"
        )


def _bound_at(scale: float, lost: float, gained: float, count: int, error: float) -> float:
    return _end(scale * lost, scale * gained, count, NormalDist().inv_cdf(1 - error))


def _end(more: float, less: float, count: int, z: float) -> float:
    """Upper end of the interval of `(more - less) / count`."""

    def rejected(difference: float) -> bool:
        # Tango's statistic at a difference, its variance with the nuisance share that is most likely there.
        b = (2 * count - more + less) * difference - more - less
        c = -less * difference * (1 - difference)
        nuisance = (math.sqrt(max(0.0, b * b - 8 * count * c)) - b) / (4 * count)
        variance = count * (2 * nuisance + difference * (1 - difference))
        return (count * difference - more + less) > z * math.sqrt(max(0.0, variance))

    low, high = (more - less) / count, 1.0
    if not rejected(high):
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if rejected(middle) else (middle, high)
    return high
