"""Plans at equal bytes: which budget each fits, who leads, who is called worse, and what is shown as not measured."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from tests.support.bench.equal_bytes import SUITE, records_of, suite_in
from tests.support.bench.pages import data_of

from kvtailor.bench.report.leaderboard import board_grid, leaderboard_page
from kvtailor.bench.report.suite.ranking import FEWER, LEADS, LEVEL, WORSE, rank
from kvtailor.bench.report.tables.grid import as_csv
from kvtailor.bench.suite.suite import read_suite


@pytest.fixture
def suite(tmp_path):
    return suite_in(tmp_path)


def worse_by_student(ours, theirs, tests):
    """A plain paired test: the lower end of the mean difference at 5 % over so many one-sided tests."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    t = {12: 2.98, 20: 3.2}[tests]
    return fmean(apart) - t * stdev(apart) / math.sqrt(len(apart)) > 0


def test_who_stands_where_and_who_is_called_worse(suite):
    records = records_of(suite)
    found = rank(suite, records)
    places = {place.label: place for place in found.places}
    # 25.5 % is within 2 % of a quarter, 25.51 % is not: it stands at a half, where it is not compared with the others.
    assert [place.label for place in found.at(0.25)] == ["best", "far", "half done", "near", "small"]
    assert [place.label for place in found.at(0.5)] == ["over"] and places["large"].budget is None
    text = {name: place.scores["text"].standing for name, place in places.items() if "text" in place.scores}
    assert text == {
        "half done": LEADS,
        "best": WORSE,
        "near": WORSE,
        "far": WORSE,
        "small": FEWER,
        "over": LEADS,
        "large": None,
    }
    samples = {r.plan_hash: r.values["nll"] for r in records if r.task == "perplexity"}
    leader = samples[places["half done"].plan_hash]
    assert worse_by_student(samples[places["best"].plan_hash], leader, 20)
    # Of 20 answers 18 are not told from 17, and 3 are fewer: four plans have all of them, so twelve pairs.
    easy = {name: place.scores["easy"].standing for name, place in places.items() if "easy" in place.scores}
    assert easy == {"best": LEADS, "near": LEVEL, "far": WORSE, "small": FEWER, "over": LEADS, "large": None}
    assert places["best"].scores["easy"].difference.value == pytest.approx(-0.1)
    # What has less than 'full' is not measured, and so is what failed.
    assert "easy" not in places["half done"].scores and places["broken"].missing == "It broke."
    assert places["never"].share is None and not places["never"].scores and places["never"].missing is None
    # The uncompressed cache is right in 2 of 20: that task says nothing of anyone.
    hard = next(column for column in found.columns if column.label == "hard")
    assert "'full' itself is right in 10 % of 20 (3 to 30)" in hard.silent
    assert {place.scores["hard"].standing for place in found.places if "hard" in place.scores} == {None}
    # A time is over that of 'full' in its own run.
    assert places["best"].times == {"TPOT": 1.5} and not places["near"].times
    assert found.full.share == 1.0 and found.full.scores["text"].difference.value == 0


def test_no_plan_is_called_worse_by_its_mean_alone(suite):
    """As many samples as these cannot tell them apart, though the means differ."""
    few = [
        replace(r, values={name: values[:5] for name, values in r.values.items()}, samples=min(5, r.samples or 5))
        for r in records_of(suite)
        if r.task == "needle" and r.point.get("depth") == 0.1
    ]
    found = rank(suite, few)
    standings = {place.label: place.scores["easy"].standing for place in found.at(0.25)}
    assert set(standings.values()) == {LEADS, LEVEL} and standings["far"] == LEVEL


def test_a_suite_without_a_leaderboard_has_none(tmp_path):
    (tmp_path / "plain.toml").write_text(SUITE[: SUITE.index("[leaderboard]")] + SUITE[SUITE.index("[settings") :])
    plain = read_suite(tmp_path / "plain.toml")
    assert rank(plain, records_of(plain)) is None
    # Of columns that rank nothing it said that no plan had been measured.
    (tmp_path / "equal.toml").write_text(SUITE.replace("paired.nll", "mean.nll").replace("paired.hit", "mean.hit"))
    unranked = read_suite(tmp_path / "equal.toml")
    assert rank(unranked, records_of(unranked)) is None


def test_the_page_stands_alone_and_reads_without_scripts(suite):
    page = leaderboard_page([rank(suite, records_of(suite))], ["made <i>up</i>"], records_of(suite))
    assert not any(word in page for word in ("http://", "https://", "src=", "@import", "url("))
    assert "At equal bytes &lt;b&gt;: made-up" in page and "made &lt;i&gt;up" in page
    assert page.count('<table class="sortable of-plans') == 2
    assert page.index("25 % of the bytes") < page.index("<script>")
    assert "6.0 million parameters" in page and "at most 2 % above it" in page
    assert "It says nothing here" in page and "says nothing here" in page
    assert "it holds 90.0 % of the bytes" in page and "It broke." in page and "it was not measured" in page
    assert "; worse</small>" in page and "; behind with fewer bytes</small>" in page and "; level</small>" in page


def test_the_chart_has_what_each_plan_held_and_lost_in_each_column_that_says_something(suite):
    records = records_of(suite)
    ranking, by_key = rank(suite, records), {record.key: record for record in records}
    data = data_of(leaderboard_page([ranking], [""], records))
    plans = {each["number"]: each for each in data["plans"]}
    assert [each["label"] for each in data["plans"]][:2] == ["full", "over"] and plans["1"]["whole"]
    assert [each["name"] for each in data["asked"]] == ["text", "easy"]
    places = {place.plan: place for place in ranking.places}
    for column, sign in zip(data["asked"], (1, -100), strict=True):
        found = {plans[number]["plan"]: rest for number, *rest in column["points"]}
        assert set(found) == {plan for plan, place in places.items() if column["name"] in place.scores}
        for plan, (size, _, share, loss, low, high) in found.items():
            score = places[plan].scores[column["name"]]
            held = {(by_key[key].bytes_held, by_key[key].bytes_full) for key in score.keys}
            assert any((size, share) == (ours, ours / full) for ours, full in held)
            assert loss == sign * score.difference.value and (low is None or low <= loss <= high)


def test_the_csv_has_every_plan_with_its_interval_and_its_records(suite):
    found = rank(suite, records_of(suite))
    rows = list(csv.DictReader(io.StringIO(as_csv(board_grid([found])))))
    assert [row["named"] for row in rows][:3] == ["full", "best", "near"] and len(rows) == 10
    best, never = (next(row for row in rows if row["named"] == name) for name in ("best", "never"))
    assert float(best["text, low"]) < float(best["text"]) < float(best["text, high"]) and best["records"]
    assert never["text"] == never["bytes, %"] == never["budget"] == ""
