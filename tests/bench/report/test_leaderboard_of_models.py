"""One leaderboard of several models: each ranked as by itself, a plan's places on them beside each other."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.support.bench.equal_bytes import OTHER_PLANS, PLANS, SUITE, records_of, suite_in
from tests.support.bench.pages import data_of

from kvtailor.bench.report.leaderboard import board_grid, leaderboard_page
from kvtailor.bench.report.suite.ranking import LEADS, WORSE, rank, rank_each
from kvtailor.bench.report.suite.records import SuiteRun, by_model
from kvtailor.bench.report.tables.grid import as_csv
from kvtailor.bench.schema import latest
from kvtailor.bench.suite.suite import read_suite
from kvtailor.cli import main
from kvtailor.errors import KvtailorError

FIRST, SECOND = "org/one", "team/two"
KEPT = {
    FIRST: {"knorm @ share=0.25": "knorm @ keep=0.21", "keydiff @ share=0.25": "keydiff @ keep=0.22"},
    SECOND: {"knorm @ share=0.25": "knorm @ keep=0.23", "keydiff @ share=0.25": "keydiff @ keep=0.24"},
}


@pytest.fixture
def suite(tmp_path):
    return suite_in(tmp_path, KEPT)


@pytest.fixture
def records(suite):
    """Of both models; the second has other bytes, and was measured later."""
    return [*records_of(suite, FIRST), *records_of(suite, SECOND, OTHER_PLANS, full=40_000, day=3)]


def both(suite, records):
    return rank_each(by_model([SuiteRun(suite=suite, records=records)]))


def board(suite, records):
    return leaderboard_page(both(suite, records), ["one", "two"], records)


def rows_of(rankings):
    return list(csv.DictReader(io.StringIO(as_csv(board_grid(rankings)))))


def table(page, budget):
    """The texts of a budget's table: the heads, and the cells of each line by its first text."""
    [part] = re.findall(rf'<section id="at-{budget}">(.*?)</section>', page, re.DOTALL)
    plain = [
        [re.sub(r"<[^>]+>", "", each.replace("<small>", "|")).strip() for each in re.findall(cells, line, re.DOTALL)]
        for cells, line in [(r"<th.*?</th>", part)] + [(r"<td.*?</td>", x) for x in part.split("<tr")[2:]]
    ]
    return plain[0], {line[1]: dict(zip(plain[0], line, strict=True)) for line in plain[1:]}


def test_each_model_is_ranked_as_by_itself(suite, records):
    found = both(suite, records)
    assert [each.last.model for each in found] == [FIRST, SECOND]
    alone = [rank(suite, [r for r in records if r.model == model], model=model) for model in (FIRST, SECOND)]
    assert found == alone
    # The same plan leads on one model and is worse on the other; every pair of 5 % is of one model.
    standing = {
        (name, place.label): place.scores["text"].standing
        for name, ranking in zip(("one", "two"), found, strict=True)
        for place in ranking.places
        if "text" in place.scores
    }
    assert standing["one", "half done"] == LEADS and standing["one", "near"] == WORSE
    assert standing["two", "near"] == LEADS and standing["two", "best"] == WORSE
    assert standing["two", "far"] == LEADS  # alone at a half


def test_the_csv_names_the_model_of_each_line_and_has_the_numbers_of_its_own_leaderboard(suite, records):
    found = both(suite, records)
    rows = rows_of(found)
    for ranking in found:
        mine = [
            {name: value for name, value in row.items() if name not in ("model", "cache", "in the suite")}
            for row in rows
            if row["model"] == ranking.last.model
        ]
        own = rows_of([ranking])
        assert mine == own and "model" not in own[0]
    best = {row["model"]: row for row in rows if row["named"] == "best"}
    assert {model: row["plan"] for model, row in best.items()} == {
        FIRST: "knorm @ keep=0.21",
        SECOND: "knorm @ keep=0.23",
    }
    assert {row["in the suite"] for row in best.values()} == {"knorm @ share=0.25"}
    assert {row["cache"] for row in rows} == {"bfloat16"}
    small = {row["model"]: row for row in rows if row["named"] == "small"}
    assert small[FIRST]["text"] and small[SECOND]["text"] == small[SECOND]["bytes, %"] == ""


def test_a_plan_stands_in_one_line_with_a_dash_where_it_was_not_measured(suite, records):
    heads, lines = table(board(suite, records), "0-25")
    pairs = [f"{label}|{name}" for label in ("text", "easy", "hard", "bytes, %", "TPOT") for name in ("one", "two")]
    assert heads == ["#", "plan", *pairs]
    for name in ("one", "two"):
        assert re.fullmatch(r"\+0\.000\|2\.\d{3} nats", lines["full"][f"text|{name}"])
        assert lines["full"][f"easy|{name}"] == "100 %|84 to 100 %"
    assert lines["best"]["text|one"].endswith("; worse") and lines["best"]["easy|one"].endswith("; leads")
    assert lines["near"]["text|one"].endswith("; worse") and lines["near"]["text|two"].endswith("; leads")
    assert lines["small"]["bytes, %|one"] == "20.0"
    assert lines["small"]["bytes, %|two"] == lines["small"]["text|two"] == lines["small"]["easy|two"] == "–"
    # On the second model it takes 26 %, so that its standing is among those at a half.
    assert lines["far"]["bytes, %|two"] == "26.0" and lines["far"]["text|two"].endswith("; leads at 50 %")
    # And what fits a quarter on the second model alone stands there too.
    assert lines["over"]["text|one"].endswith("; leads at 50 %") and lines["over"]["text|two"].endswith("; worse")


def test_two_plans_that_are_one_on_a_model_stand_in_two_lines(tmp_path):
    same = dict.fromkeys(("random @ share=0.25", "random(state=1) @ share=0.5"), "random @ keep=0.3")
    suite = suite_in(tmp_path, {FIRST: same})
    first = {name: numbers for name, numbers in PLANS.items() if name != "large"}
    records = [
        *records_of(suite, FIRST, first),
        *records_of(suite, SECOND, {**OTHER_PLANS, "large": (0.4, 0.1, 20)}, full=40_000, day=3),
    ]
    lines = table(board(suite, records), "0-5")[1]
    assert lines["over"]["text|one"] == lines["large"]["text|one"] != "–"
    assert lines["over"]["bytes, %|two"] == "24.9" and lines["large"]["bytes, %|two"] == "40.0"


def test_numbers_are_those_of_the_page_of_each_model_alone(suite, records):
    page = board(suite, records)
    for model, name in ((FIRST, "one"), (SECOND, "two")):
        alone = rank(suite, [r for r in records if r.model == model], model=model)
        own = leaderboard_page([alone], [""], records)
        for budget in ("0-5", "0-25"):
            for plan, line in table(own, budget)[1].items():
                mine = table(page, budget)[1][plan]
                assert all(mine[f"{head}|{name}"] == cell for head, cell in line.items() if f"{head}|{name}" in mine)
                assert {f"{head}|{name}" for head in ("text", "easy", "bytes, %")} < set(mine)
        assert "|" not in " ".join(table(own, "0-25")[0])


def test_who_leads_and_what_full_does_stand_by_model(suite, records):
    page = board(suite, records)
    leaders = re.sub(r"<[^>]+>", " ", re.search(r'<section id="leaders">.*?</section>', page, re.DOTALL)[0])
    assert re.search(r"25 %\s+one\s+half done", leaders) and re.search(r"25 %\s+two\s+near", leaders)
    models = re.sub(r"<[^>]+>", " ", re.search(r'<section id="models">.*?</section>', page, re.DOTALL)[0])
    assert "97.7 KiB" in models and "39.1 KiB" in models and "bfloat16" in models and "nats, 20 samples" in models
    assert "10 %" in models and "says nothing here" in models
    assert "no number here is of two models" in page and "cache, one in bfloat16, two in bfloat16." in page
    assert "one has 6.0 million parameters, two has 6.0 million parameters. What holds" in page
    assert "It holds" not in page and "The plans as they are written on two" in page


def test_the_chart_has_a_question_for_each_model_with_its_own_bytes_and_plans(suite, records):
    data = data_of(board(suite, records))
    numbers = {each["label"]: each["number"] for each in data["plans"]}
    assert len(numbers) == len(data["plans"]) == 10
    assert [each["name"] for each in data["asked"]] == ["text on one", "text on two", "easy on one", "easy on two"]
    assert [each["full"] for each in data["asked"]] == [100_000, 40_000] * 2
    assert [each["full_text"] for each in data["asked"][:2]] == ["97.7 KiB in bfloat16", "39.1 KiB in bfloat16"]
    for each, keep, size in zip(data["asked"][:2], (0.21, 0.23), (25_500, 10_000), strict=True):
        assert each["plans"][numbers["best"]] == f"knorm @ keep={keep}"
        [best] = [point for point in each["points"] if point[0] == numbers["best"]]
        assert best[1] == size and best[3] == size / each["full"]
    drawn = {number for number, *_ in data["asked"][1]["points"]}
    assert numbers["small"] not in drawn and numbers["near"] in drawn


def test_shares_of_another_dtype_say_so(suite, records):
    mixed = [replace(r, cache_dtype=None) if r.model == SECOND else r for r in records]
    page = board(suite, mixed)
    assert "uncompressed cache, one in bfloat16, two in float32." in page
    assert {row["cache"] for row in rows_of(both(suite, mixed))} == {"bfloat16", "float32"}


def folder_of(where, records, fitted):
    suite_in(where / "suites", fitted)
    (where / "records.jsonl").write_text("".join(each.to_line() + "\n" for each in records))
    return where


def report(*words):
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_the_command_line_takes_several_folders(tmp_path, records):
    one, two = (
        folder_of(tmp_path / name, [r for r in records if r.model == model], {model: KEPT[model]})
        for name, model in (("a", FIRST), ("b", SECOND))
    )
    refused = report(one, two)
    assert refused.exit_code == 2 and "2 folders without --to" in refused.stderr
    done = report(one, two, "--to", tmp_path / "pages")
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        "report.html and its tables are of team/two, the last measured of 2 models; leaderboard-equal.html has all "
        "that its suite was run on\n"
    )
    assert {str(path) for path in (tmp_path / "pages").iterdir()} == set(done.stdout.split())
    together = folder_of(tmp_path / "c", records, KEPT)
    assert report(together).exit_code == 0
    for name in ("leaderboard-equal.html", "leaderboard-equal.csv"):
        assert (tmp_path / "pages" / name).read_text() == (together / name).read_text()
    alone = report(one)
    assert alone.exit_code == 0 and alone.stderr == ""
    assert "model" not in (one / "leaderboard-equal.csv").read_text().splitlines()[0]


def test_records_of_one_model_in_two_folders_are_ranked_together(suite, records):
    mine = [r for r in records if r.model == FIRST]
    cut = [SuiteRun(suite=suite, records=some, folder="") for some in (mine[:9], mine[9:])]
    [found], [whole] = rank_each(by_model(cut)), both(suite, latest(mine))
    assert found.places == whole.places


def test_what_cannot_stand_beside_each_other_is_refused(tmp_path, suite, records):
    other = suite_in(tmp_path / "other", {FIRST: {"knorm @ share=0.25": "knorm @ keep=0.3"}})
    runs = [SuiteRun(suite=each, records=records, folder=name) for each, name in ((suite, "a"), (other, "b"))]
    with pytest.raises(KvtailorError, match=r"on org/one from a and b, where it has other plans.*give one of these"):
        by_model(runs)
    (tmp_path / "equal.toml").write_text(SUITE.replace("tolerance = 0.02", "tolerance = 0.2"))
    wider = read_suite(tmp_path / "equal.toml")
    runs = [
        SuiteRun(suite=each, records=[r for r in records if r.model == model])
        for each, model in ((suite, FIRST), (wider, SECOND))
    ]
    with pytest.raises(KvtailorError, match=r"org/one and team/two.*tolerance = 0\.02.*tolerance = 0\.2"):
        rank_each(by_model(runs))
