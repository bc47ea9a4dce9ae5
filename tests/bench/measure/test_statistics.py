import math

import pytest
import torch

from kvtailor.bench.measure.statistics import (
    FEWEST,
    geometric_mean,
    mean_difference,
    quantile,
    spread,
    student_quantile,
    timings_of,
    wilson,
)


def test_quantiles_by_hand():
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([1, 2, 3, 4, 5], 0.25) == 2
    assert quantile([7], 0.9) == 7
    found = spread([5, 1, 4, 2, 3])
    assert (found.median, found.q1, found.q3, found.p10, found.count) == (3, 2, 4, pytest.approx(1.4), 5)
    assert spread([]).median is None
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


@pytest.mark.parametrize(("freedom", "table"), [(4, 2.7764), (7, 2.3646), (19, 2.0930), (49, 2.0096), (999, 1.9623)])
def test_student_quantile_meets_the_table(freedom, table):
    """The series has four terms; what it leaves out is 3 in 10,000 of the quantile at 4 degrees of freedom."""
    assert student_quantile(0.975, freedom) == pytest.approx(table, rel=4e-4)
    assert student_quantile(0.025, freedom) == pytest.approx(-table, rel=4e-4)


@pytest.mark.parametrize(
    # Wilson's formula by hand: 8 of 10 -> (0.4902, 0.9433); 0 of 10 -> upper end z^2 / (n + z^2).
    ("hits", "count", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_by_hand(hits, count, low, high):
    found = wilson(hits, count)
    assert found.value == hits / count
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_wilson_refuses_what_is_no_share():
    for hits, count in [(1, 0), (3, 2), (-1, 5)]:
        with pytest.raises(ValueError, match="share"):
            wilson(hits, count)


def test_mean_difference_is_paired_and_the_same_every_time():
    noise = torch.randn(40, generator=torch.Generator().manual_seed(1)).tolist()
    ours = [10 * x + 0.5 for x in noise]
    theirs = [10 * x for x in noise]
    found = mean_difference(ours, theirs)
    assert found.value == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5) and found.high == pytest.approx(0.5)
    assert mean_difference(ours, [0.0] * 40) == mean_difference(ours, [0.0] * 40)


def test_mean_difference_says_when_it_has_too_few():
    found = mean_difference([1.0] * (FEWEST - 1), [0.0] * (FEWEST - 1))
    assert (found.value, found.low, found.high) == (1.0, None, None)
    with pytest.raises(ValueError, match="2 and 1"):
        mean_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="confidence"):
        mean_difference([1.0], [1.0], confidence=95)


@pytest.mark.parametrize("count", [6, 20, 50])
def test_intervals_cover_about_as_often_as_they_say(count):
    rng = torch.Generator().manual_seed(count)
    trials, hits = 300, 0
    for _ in range(trials):
        sample = torch.randn(count, generator=rng, dtype=torch.float64) + 0.3
        found = mean_difference(sample.tolist(), [0.0] * count, resamples=800)
        hits += found.low <= 0.3 <= found.high
    # 0.95 with three standard errors of 300 trials; the bootstrap itself is a little short at 6 samples.
    assert 0.90 < hits / trials < 0.99


def test_interval_of_large_counts_is_the_normal_one():
    sample = torch.randn(2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = mean_difference(sample.tolist(), [0.0] * 2000, resamples=4000)
    half = 1.96 * float(sample.std()) / math.sqrt(2000)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.06)


def test_interval_of_few_samples_is_as_wide_as_students():
    """A bootstrap alone would be narrower by the root of 11/12, which is 4%, and by as much as z is below t."""
    rng, count, ratios = torch.Generator().manual_seed(5), 12, []
    for _ in range(60):
        sample = torch.randn(count, generator=rng, dtype=torch.float64)
        found = mean_difference(sample.tolist(), [0.0] * count, resamples=2000)
        half = 2.2010 * float(sample.std()) / math.sqrt(count)
        ratios.append((found.high - found.low) / 2 / half)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.02)


def test_a_geometric_mean_has_its_interval_on_logarithms():
    found = geometric_mean([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert found.value == pytest.approx(2**2.5) and found.low < found.value < found.high
    assert found.low * found.high == pytest.approx(found.value**2, rel=0.05)
    assert geometric_mean([2.0, 8.0]).low is None
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="geometric mean"):
            geometric_mean(bad)


def test_timings_are_those_of_undisturbed_samples():
    found = timings_of({"a": [9.0, 1.0, 2.0, 3.0], "b": [9.0, 4.0, 4.0, 4.0]}, [True, False, False, False], 5)
    assert found["a"]["median"] == 2 and found["b"]["p10"] == 4 and found["a"]["left_out"] == 1
    assert timings_of({"a": [1.0, 2.0, 3.0]}, [True, False, False], 5) == {}
    assert timings_of({"a": [1.0, 2.0]}, [False, False], 2)["a"]["count"] == 2
    assert timings_of({"a": [1.0]}, [True], 0) == {}
