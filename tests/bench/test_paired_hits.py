"""Differences of right answers: intervals that do not shrink to nothing where no pair differs."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.made_records import record
from tests.bench.test_report import needles

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
