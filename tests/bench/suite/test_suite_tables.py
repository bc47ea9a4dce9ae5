"""The tables of a suite from records alone: the right numbers, and nothing beside what was measured otherwise."""

import csv
import io
import math
import re
from dataclasses import replace

import pytest
from tests.support.bench.made_records import record
from tests.support.bench.suite_case import CONTEXT, KEEP, PLAN, WINDOWS, dummy, go, nats, small_suite, write_text

from kvtailor.bench.report import summarise
from kvtailor.bench.report.files import markdown_page
from kvtailor.bench.report.suite.numbers import measured
from kvtailor.bench.report.suite.tables import provenance, suite_grids, suite_pages
from kvtailor.bench.report.tables.grid import as_csv
from kvtailor.bench.schema import latest, read_records
from kvtailor.bench.suite.run import prepare
from kvtailor.bench.suite.suite import read_suite
from kvtailor.errors import KvtailorError


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


@pytest.fixture
def small(tmp_path, text):
    return small_suite(tmp_path, text)


def test_the_tables_hold_what_was_measured_and_say_what_was_not(small, text, tmp_path):
    records = go(small, out=tmp_path / "out", data=tmp_path)
    loss, again, guess = suite_grids(small, records)
    full, kept = nats(text, None), nats(text, KEEP)
    rows = {cells[0].text: cells[1:] for cells in loss.rows}
    snap, of_full, of_rank = (f"{label} · {text}" for label in ("snap", "full", "rank"))
    values = [cell.value for cell in rows[snap][:-1]]
    means = [sum(each) / WINDOWS for each in (full, kept)]
    assert values[0] == pytest.approx(math.exp(means[1]), rel=1e-6)
    assert values[1] == pytest.approx(means[1] - means[0], abs=1e-6) and abs(values[1]) > 1e-3
    cell = rows[snap][1]
    assert cell.ends[0] < cell.value < cell.ends[1] and cell.text == f"{cell.value:+.6f}" and len(cell.keys) == 2
    assert cell.interval == f"{cell.ends[0]:+.6f} to {cell.ends[1]:+.6f}"
    assert values[2] == pytest.approx(100 * math.expm1(values[1]), rel=1e-5)
    assert values[3] == pytest.approx(math.exp(values[1]), abs=1e-6)
    assert values[4] == pytest.approx(8 * KEEP / 1024)
    assert values[5:] == pytest.approx([KEEP / CONTEXT, 1 - KEEP / CONTEXT])
    assert [cell.value for cell in rows[of_full][:4]] == pytest.approx([math.exp(means[0]), 0, 0, 1])
    # Data that is not there: dashes, with the reason below; the other text was measured all the same.
    assert {cell.text for cell in rows["snap · c4"]} == {None}
    assert "c4" in loss.note and loss.note.startswith("A note. ")
    assert re.search(r"snap[^.]* and again[^.]* are the same plan\.", loss.note)
    # A plan and a task that are not there.
    assert rows[of_rank][-1].text == "tomorrow" and {cell.value for cell in rows[of_rank][:-1]} == {None}
    assert guess.rows[0][-1].text == "the task telepathy" and guess.rows[0][1].text is None
    assert again.rows[0][1].value == pytest.approx(math.exp(means[0]))
    pages = suite_pages(small, records)
    told = markdown_page(summarise(records), [pages])
    assert "not in this kvtailor yet" in told and "tomorrow" in told and "Not run: Telepathy." in told
    assert "| Method · Text |" in told and "| 1.00 |" in told
    assert provenance(small, records) in told and "dummy" in provenance(small, records)
    assert suite_pages(small, latest(read_records(tmp_path / "out"))) == pages


def test_a_cell_of_several_tasks_is_empty_where_one_is_lacking(small, tmp_path):
    records = go(small, data=tmp_path)
    hits = [x for r in records if r.task == "needle" for x in r.values["hit"]]
    cells = suite_grids(small, records)[1].rows[0][1:]
    assert len(hits) == 8 and cells[1].value == pytest.approx(100 * sum(hits) / 8)
    means = [r.metrics["answer_nll"] for r in records if r.task == "needle"]
    assert cells[2].value == pytest.approx(sum(means) / len(means))
    some = [r for r in records if r.task != "needle" or r.point["kind"] == "needle"]
    assert [cell.value for cell in suite_grids(small, some)[1].rows[0][2:]] == [None, None]


def test_a_plan_that_failed_in_a_part_of_a_task_has_no_number_of_the_rest(small, tmp_path):
    """It would stand beside numbers of more samples. What a later run mended is no failure any more."""
    records = go(small, data=tmp_path)
    at = next(i for i, r in enumerate(records) if r.task == "needle" and r.point["depth"] == 1.0)
    whole = suite_grids(small, records)[1]
    failed = replace(records[at], error="too little memory", values={}, metrics={})
    broken = suite_grids(small, [*records[:at], failed, *records[at + 1 :]])[1]
    assert broken.rows[0][1] == whole.rows[0][1] and {cell.value for cell in broken.rows[0][2:]} == {None}
    assert "`full`: needle: too little memory" in broken.note and "too little" not in whole.note

    ended = replace(failed, point={}, text_hash=None, text=None)
    assert {cell.value for cell in suite_grids(small, [*records, ended])[1].rows[0][2:]} == {None}
    later = [replace(r, run="later", started="2999" + r.started[4:]) if r.task == "needle" else r for r in records]
    assert suite_grids(small, [failed, ended, *later])[1].rows == whole.rows
    # The error of a text that is not asked for any more says nothing of this one.
    other = replace(failed, text_hash="another text", started="2001" + failed.started[4:])
    assert suite_grids(small, [other, *records])[1].rows == whole.rows


def test_a_number_of_a_run_under_way_says_of_how_many_points_it_is(small, tmp_path):
    records = go(small, data=tmp_path)
    at = next(i for i, r in enumerate(records) if r.task == "needle" and r.point["depth"] == 1.0)
    others = [replace(r, plan_hash="another plan") for r in records if r.task == "needle"]
    under_way = suite_grids(small, [*records[:at], *records[at + 1 :], *others])[1]
    assert "`full`: needle: 1 of 2 points are measured." in under_way.note
    assert under_way.rows[0][2].value is not None
    assert "points are measured" not in suite_grids(small, [*records, *others])[1].note


@pytest.mark.parametrize("field", ["text_hash", "model_hash", "dtype", "device", "task_version"])
def test_what_was_not_measured_alike_does_not_stand_together(small, text, tmp_path, field):
    records = go(small, data=tmp_path)
    other = 1 if field == "task_version" else "other"
    mixed = [replace(r, **{field: other}, started="2001" + r.started[4:]) if r.label == PLAN else r for r in records]
    rows = {cells[0].text: cells[1:] for cells in suite_grids(small, mixed)[0].rows}
    assert rows[f"snap · {text}"][0].value is None and rows[f"full · {text}"][0].value is not None


def test_ratios_have_a_geometric_mean(tmp_path):
    path = tmp_path / "drafts.toml"
    path.write_text("""
title = "Drafts"
tasks.draft = { run = "speculation", draft_plan = "streaming @ tokens=8" }
settings.default = {}
[[tables]]
name = "drafts"
title = "Drafts"
labels = ["plan"]
columns = [{ label = "speed-up", task = "draft", value = "geometric.speed_up" }]
rows = [{ plan = "full" }]
""")
    cell = read_suite(path).tables_for("any")[0].rows[0].cells[0]

    def found(*ratios):
        return measured(cell, [[record("full", "speculation", values={"speed_up": ratios})]], None)

    assert found(0.5, 2.0, 1.0, 1.0, 4.0, 0.25).value == pytest.approx(1.0)
    assert found(0.5, 2.0, 1.0, 1.0, 4.0, 0.25).low < 1 < found(0.5, 2.0, 1.0, 1.0, 4.0, 0.25).high
    assert found() is None and found(1.0, 0.0) is None


def test_times_of_another_run_do_not_stand_together(tmp_path):
    path = tmp_path / "times.toml"
    path.write_text("""
title = "Times"
tasks.speed = { run = "speed", context = 40, tokens = 3, rounds = 2, warmup = 0 }
settings.default = {}
[[tables]]
name = "times"
title = "Times"
labels = ["plan"]
columns = [{ label = "ms", task = "speed", value = "timings.tpot", scale = 1e3 }]
rows = [{ plan = "full" }, { plan = "snapkv @ tokens=32" }]
""")
    suite = read_suite(path)
    records = prepare(suite, dummy()).run(bandwidth=False)
    timed = [replace(r, timings={"tpot": {"median": 0.5}}) for r in records]
    assert [cells[1].value for cells in suite_grids(suite, timed)[0].rows] == [500.0, 500.0]
    disturbed = suite_grids(suite, [replace(r, timings={}) for r in records])[0]
    assert disturbed.rows[0][1].text is None and "disturbed" in disturbed.note
    other = [replace(r, run="other", started="2001" + r.started[4:]) if r.label == PLAN else r for r in timed]
    assert [cells[1].value for cells in suite_grids(suite, other)[0].rows] == [500.0, None]


def test_a_note_says_why_there_is_no_number(small, text, tmp_path):
    records = go(small, data=tmp_path)
    where = [r for r in records if r.asked and "c4" in r.asked and r.label == PLAN]
    good = next(r for r in records if r.task == "perplexity" and r.label == PLAN and r.error is None)
    other = replace(good, asked=where[0].asked, text="some books")
    told = suite_grids(small, [*[r for r in records if r not in where], other])[0].note
    assert "c4 is some books here." in told and "no record" not in told
    told = suite_grids(small, [r for r in records if r is not good])[0].note
    assert "no record that may stand" in told


def test_rows_of_one_plan_with_other_numbers_are_not_called_the_same(tmp_path, text):
    path = tmp_path / "rows.toml"
    path.write_text(f"""
title = "Rows"
settings.default = {{}}
tasks.ppl = {{ run = "perplexity", text = "{text}", context = 90, continuation = 21, windows = 6 }}
[[tables]]
name = "rows"
title = "Rows"
labels = ["Metric"]
columns = [{{ label = "full", plan = "full", task = "ppl" }}]
rows = [{{ Metric = "PPL", value = "metrics.perplexity" }}, {{ Metric = "bytes", value = "bytes_held" }}]
""")
    suite = read_suite(path)
    assert suite_grids(suite, prepare(suite, dummy()).run(bandwidth=False))[0].note == ""


def test_records_of_others_are_passed_over(small, tmp_path):
    records = go(small, data=tmp_path)
    foreign = [replace(r, asked=None, started="2999" + r.started[4:]) for r in records]
    assert suite_grids(small, [*records, *foreign]) == suite_grids(small, records)
    for these in ([], foreign):
        with pytest.raises(KvtailorError, match="kvtailor bench --suite small"):
            suite_grids(small, these)
    with pytest.raises(KvtailorError, match="for other"):
        suite_grids(small, records, model="other")


def test_the_line_names_every_machine_and_version_behind_the_numbers(small, tmp_path):
    records = [replace(r, device="cpu") for r in go(small, data=tmp_path)]
    one = {"processor": "one", "torch": "2", "commit": "a" * 40}
    two = {"processor": "two", "torch": "2", "commit": "b" * 40}
    mixed = [replace(r, machine=two if r.label == PLAN else one) for r in records]
    said = provenance(small, mixed)
    assert "one and two" in said and f"commit {'a' * 12} and {'b' * 12}, torch 2." in said
    # A plan that no table asks for, and a record that a later one replaces, are not behind the numbers.
    stray = replace(mixed[0], plan_hash="stray", machine={"processor": "three"})
    assert provenance(small, [*mixed, stray]) == said
    early = replace(mixed[0], started="2001" + mixed[0].started[4:], machine={"processor": "four"})
    assert provenance(small, [early, *mixed]) == said


def test_csv_has_the_hashes_of_a_rows_plans(small, tmp_path):
    records = go(small, data=tmp_path)
    pages = suite_pages(small, records)
    rows = list(csv.DictReader(io.StringIO(as_csv(pages.grids[0]))))
    hashes = {row["Method · Text"].split(" · ")[0]: row["plan_hash"] for row in rows}
    known = {r.label: r.plan_hash for r in records}
    assert hashes["full"] == known["full"] and hashes["snap"] == known[PLAN]
    path = tmp_path / "two.toml"
    path.write_text(f"""
title = "Two"
settings.default = {{}}
tasks.ppl = {{ run = "perplexity", text = "{tmp_path}/letters.txt", context = 90, continuation = 21, windows = 6 }}
[[tables]]
name = "two"
title = "Two"
labels = ["Metric"]
columns = [{{ label = "full", plan = "full", task = "ppl" }}, {{ label = "snap", plan = "{PLAN}", task = "ppl" }}]
rows = [{{ Metric = "PPL", value = "metrics.perplexity" }}]
""")
    two = read_suite(path)
    (grid,) = suite_pages(two, prepare(two, dummy()).run(bandwidth=False)).grids
    assert grid.plans == (f"{known['full']} {known[PLAN]}",)
