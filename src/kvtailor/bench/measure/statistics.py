"""Intervals and medians: what a difference is worth, from samples alone and the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

from kvtailor.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FEWEST",
    "Estimate",
    "Spread",
    "calibration_error",
    "geometric_mean",
    "mean",
    "mean_difference",
    "quantile",
    "spread",
    "student_quantile",
    "timings_of",
    "wilson",
]

FEWEST = 5
_LEAST_SAMPLES = 3
_STATE = 20251121
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A value with its interval.

    Attributes:
        value: the point estimate.
        low: lower end of the interval; None where there are too few samples for one.
        high: upper end.
        count: number of samples.
    """

    value: float
    low: float | None
    high: float | None
    count: int

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the interval; None without one."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def map(self, to: Callable[[float], float]) -> Estimate:
        """Return the same in another unit.

        Args:
            to: what becomes of the value and of each end; where it falls, the ends change places.
        """
        low, high = sorted(map(to, self.ends)) if self.ends else (None, None)
        return Estimate(to(self.value), low, high, self.count)

    def interval(self, digits: int, *, scale: float = 1.0, signed: bool = False) -> str | None:
        """Return both ends as words; None without them.

        Args:
            digits: behind the point.
            scale: what they are multiplied with.
            signed: whether one above 0 has its sign too.
        """
        sign = "+" if signed else ""
        return " to ".join(f"{scale * end:{sign}.{digits}f}" for end in self.ends) if self.ends else None


@dataclass(frozen=True)
class Spread:
    """Where samples lie. All None where there is no sample.

    Attributes:
        median: the middle.
        q1: 25th percentile.
        q3: 75th percentile.
        p10: 10th percentile.
        count: number of samples.
    """

    median: float | None
    q1: float | None
    q3: float | None
    p10: float | None
    count: int


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile (0 to 1) of at least one value, linear between neighbours."""
    if not values:
        raise ArgumentError("asked for a quantile of no values: measure at least one")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles and 10th percentile."""
    if not values:
        return Spread(None, None, None, None, 0)
    return Spread(
        quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75), quantile(values, 0.1), len(values)
    )


def timings_of(
    seconds: Mapping[str, Sequence[float]], disturbed: Sequence[bool], wanted: int
) -> dict[str, Mapping[str, float | None]]:
    """The timings of a record: where the undisturbed samples lie, and how many were left out.

    Args:
        seconds: samples, by the name of what they time.
        disturbed: for each sample whether it does not count.
        wanted: samples that were requested. Where fewer than 3 of more are left, there are no timings.
    """
    left = disturbed.count(False)
    if not left or left < min(_LEAST_SAMPLES, wanted):
        return {}
    return {
        name: {
            **asdict(spread([x for x, bad in zip(each, disturbed, strict=True) if not bad])),
            "left_out": len(disturbed) - left,
        }
        for name, each in seconds.items()
    }


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t by its expansion around the normal one (Abramowitz and Stegun 26.7.5).

    Off by less than 1 % from 4 degrees of freedom on, at the tails that intervals need.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** (i + 1) for i, term in enumerate(terms))


def mean_difference(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    documents: Sequence[float] = (),
) -> Estimate:
    """Mean of `ours - theirs` over paired samples, with a bootstrap interval.

    The percentile interval of resampled means, widened for small counts so that it covers like Student's t does
    (Hesterberg 2015, "What teachers should know about the bootstrap", the expanded percentile interval). The random
    state is fixed: the same samples give the same interval. Fewer than `FEWEST` samples give no interval.

    Samples of one document are drawn together (a cluster bootstrap), since their differences may go together. With
    fewer than `FEWEST` documents every sample is drawn by itself: the interval is then about these documents alone.

    Args:
        ours, theirs: sample i of both is the same window, document or round.
        confidence: share of such intervals that cover the true mean.
        resamples: how often the samples are drawn again.
        documents: which document each sample is from; empty where each is from one of its own, or where
            that is not known.

    Raises:
        ArgumentError: unequal counts, no samples, or a confidence outside of 0 to 1.
    """
    import torch

    if len(ours) != len(theirs) or not ours:
        raise ArgumentError(
            f"asked for paired differences of {len(ours)} and {len(theirs)} samples: give the same samples of both"
        )
    if not 0 < confidence < 1:
        raise ArgumentError(f"asked for a confidence of {confidence}: give a share between 0 and 1, such as 0.95")
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    count = len(differences)
    if count < FEWEST:
        return Estimate(fmean(differences), None, None, count)
    sums, sizes = _clusters(differences, documents)
    drawn = len(sums)
    generator = torch.Generator().manual_seed(_STATE)
    means = []
    for rows in _chunks(resamples, max(1, _CHUNK // drawn)):
        chosen = torch.randint(drawn, (rows, drawn), generator=generator)
        means.append(sums[chosen].sum(1) / sizes[chosen].sum(1))
    t = student_quantile(1 - (1 - confidence) / 2, drawn - 1)
    tail = NormalDist().cdf(-math.sqrt(drawn / (drawn - 1)) * t)
    ordered = torch.cat(means).tolist()
    return Estimate(fmean(differences), quantile(ordered, tail), quantile(ordered, 1 - tail), count)


def _clusters(differences: Sequence[float], documents: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(g,) sums and sizes of what is drawn together."""
    import torch

    sample = torch.tensor(differences, dtype=torch.float64)
    if len(documents) != len(differences) or len(set(documents)) < FEWEST:
        return sample, torch.ones_like(sample)
    names, index = torch.tensor(documents, dtype=torch.float64).unique(return_inverse=True)
    sums, sizes = (torch.zeros(names.numel(), dtype=torch.float64) for _ in range(2))
    return sums.index_add(0, index, sample), sizes.index_add(0, index, torch.ones_like(sample))


def mean(values: Sequence[float]) -> Estimate:
    """Mean of some values with the interval of `mean_difference`.

    Raises:
        ArgumentError: no values.
    """
    return mean_difference(values, [0.0] * len(values))


def geometric_mean(values: Sequence[float]) -> Estimate:
    """Geometric mean of positive ratios, with the interval of `mean_difference` on their logarithms.

    Raises:
        ArgumentError: no values, or one that is not positive.
    """
    if not values or min(values) <= 0:
        raise ArgumentError(f"asked for the geometric mean of {len(values)} ratios: give at least one, all above 0")
    return mean([math.log(each) for each in values]).map(math.exp)


def calibration_error(confidence: Sequence[float], right: Sequence[bool], *, bins: int = 15) -> float:
    """Expected calibration error: the sum over bins of their share times the distance of accuracy and confidence.

    Guo et al., arXiv 1706.04599.

    Args:
        confidence: probability of the most likely token, 0 to 1, for each prediction.
        right: whether that token came.
        bins: of equal width; a bin holds its upper end.

    Raises:
        ArgumentError: unequal counts, no predictions, or a confidence outside of 0 to 1.
    """
    if len(confidence) != len(right) or not confidence or not all(0 <= c <= 1 + 1e-6 for c in confidence):
        raise ArgumentError(
            f"asked for the calibration of {len(confidence)} confidences and {len(right)} answers: give as many of "
            "both, with confidences from 0 to 1"
        )
    total = [0.0] * bins
    for each, hit in zip(confidence, right, strict=True):
        total[min(bins - 1, max(0, math.ceil(each * bins - 1e-9) - 1))] += float(hit) - each
    return sum(map(abs, total)) / len(confidence)


def wilson(hits: float, count: int, *, confidence: float = 0.95) -> Estimate:
    """A share of right answers with Wilson's score interval (Wilson 1927), right also at 0 and 1.

    A part of a hit counts as that part; the interval is then wider than it need be.

    Raises:
        ArgumentError: no answers, or more hits than answers.
    """
    if count < 1 or not 0 <= hits <= count:
        raise ArgumentError(
            f"asked for the share of {hits:g} hits among {count} answers: give 0 <= hits <= count, count >= 1"
        )
    z = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    share = hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half), count)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - done) for done in range(0, total, size)]
