"""Differences of right answers: intervals that do not shrink to nothing where no pair differs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.bench.report.test_report import needles
from tests.support.bench.made_records import record

from kvtailor.bench.measure.paired_hits import hit_difference, loss_bound, pairs_for, share, share_difference
from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.report import summarise


def test_a_difference_without_a_discordant_pair_has_an_interval():
    (measure,) = summarise([needles("full", [1] * 20), needles("x", [1] * 20)]).measures
    found = measure.scores["#x"].difference
    # Nothing was lost in 20: the rule of three says that up to about 3 of 20 may be.
    assert found.value == 0 and found.low < -13 and found.high > 13


def test_a_recall_that_is_always_whole_has_an_interval():
    whole = [
        replace(needles(label, [1] * 12), values={"hit": (1.0,) * 12, "recall": (1.0,) * 12, "nll": (0.1,) * 12})
        for label in ("full", "x")
    ]
    row = summarise(whole).rows[1]
    assert row.recall.value == 1 and row.recall.low < 0.85 and row.recall.high == 1
    found = summarise(whole).measures[0].scores["#x"].difference
    assert found.low < -15


def test_scores_of_a_set_that_are_all_equal_have_an_interval():
    alike = [
        record(label, "longcontext", point={"benchmark": "b", "subset": "s"}, values={"score": (50.0, 80.0) * 10})
        for label in ("full", "x")
    ]
    found = summarise(alike).measures[0].scores["#x"].difference
    assert found.value == 0 and found.low < -13 and found.high > 13


def covered(count, lost, gained):
    """The exact chance that the interval covers, over all pairs of counts."""
    total = 0.0
    for b in range(count + 1):
        for c in range(count - b + 1):
            ways = math.comb(count, b) * math.comb(count - b, c)
            chance = ways * lost**b * gained**c * (1 - lost - gained) ** (count - b - c)
            if chance > 1e-9:
                found = hit_difference(b, c, count)
                total += chance * (found.low <= gained - lost <= found.high)
    return total


@pytest.mark.parametrize("count", [5, 9, 20])
def test_intervals_of_hits_cover_exactly_computed(count):
    for gained in (0.0, 0.02, 0.1):
        for loss in (0.0, 0.01, 0.03, 0.05, 0.1):
            assert covered(count, loss + gained, gained) >= 0.94, (loss, gained)


def test_intervals_cover_where_that_is_hardest():
    """Of 60 pairs with losses alone; an interval that were not widened for the discrete count would cover 0.935."""
    assert covered(60, 0.09, 0.0) >= 0.94


@pytest.mark.long
@pytest.mark.parametrize("count", [7, 12, 35, 60, 80, 100, 125, 150, 200])
def test_intervals_of_hits_cover_from_few_to_many_pairs(count):
    """Losses alone, where score intervals are at their worst, and finely; with gains at fewer places."""
    for step in range(101):
        assert covered(count, step / 1000, 0.0) >= 0.94, step
    if count <= 60:
        for gained in (0.005, 0.02, 0.05, 0.1, 0.3):
            for loss in (0.0, 0.02, 0.055, 0.1):
                assert covered(count, loss + gained, gained) >= 0.94, (loss, gained)


def statistic(lost, gained, count, difference):
    """Tango's statistic for losses, its nuisance share found by trying all of them."""

    def likelihood(share):
        logs = [(lost, share + difference), (gained, share), (count - lost - gained, 1 - 2 * share - difference)]
        return sum(k * math.log(max(p, 1e-300)) for k, p in logs if k)

    most = max((i / 20000 * (1 - difference) / 2 for i in range(20001)), key=likelihood)
    variance = count * (2 * most + difference * (1 - difference))
    return (lost - gained - count * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("lost", "gained", "count"), [(0, 0, 20), (3, 0, 20), (5, 2, 31), (9, 4, 200), (1, 6, 44)])
def test_the_bound_inverts_the_score_test(lost, gained, count):
    bound = loss_bound(lost, gained, count, error=0.05)
    if bound >= 0:
        assert statistic(lost, gained, count, bound) == pytest.approx(-1.6449, abs=0.01)
    both = hit_difference(lost, gained, count)
    turned = hit_difference(gained, lost, count)
    assert both.low == pytest.approx(-turned.high) and both.low < both.value < both.high


def test_without_a_lost_pair_the_bound_is_that_of_wilson():
    for count in (5, 20, 200):
        z2 = 1.6448536**2
        assert loss_bound(0, 0, count, error=0.05) == pytest.approx(z2 / (count + z2), rel=1e-5)
    assert pairs_for(0, 0, 12, margin=0.1, error=0.05) == 25
    assert loss_bound(0, 0, 25, error=0.05) < 0.1 < loss_bound(0, 0, 24, error=0.05)
    assert pairs_for(3, 0, 20, margin=0.1, error=0.05) is None


def test_shares_that_often_differ_keep_the_interval_of_their_mean():
    ours, theirs = [0.5 + 0.01 * (i % 9) for i in range(40)], [0.5 + 0.012 * (i % 7) for i in range(40)]
    assert share_difference(ours, theirs) == mean_difference(ours, theirs)
    few = [0.5] * 36 + [0.4] * 4
    found = share_difference(few, [0.5] * 40)
    assert found.value == pytest.approx(-0.01) and found.low < -0.08 and found.high > 0.05
    assert share([1.0] * 8).low < 0.7 and share([0.5, 1.0]).value == 0.75


@pytest.mark.parametrize(
    "call",
    [
        lambda: hit_difference(3, 3, 5),
        lambda: hit_difference(0, 0, 0),
        lambda: share([]),
        lambda: share([1.2]),
        lambda: share_difference([1.0], []),
        lambda: share_difference([2.0], [0.0]),
    ],
)
def test_what_is_no_share_is_refused(call):
    with pytest.raises(ValueError, match="asked for"):
        call()
