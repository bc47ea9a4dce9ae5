"""Runs with several texts, contexts, batches and models: which point a row shows, and what may be compared."""

import io
import math
from dataclasses import replace
from statistics import fmean

import pytest
from rich.console import Console
from tests.bench.report.test_report import BASE, FULL, SAME, WORSE, needles, record, scored, timed
from tests.support.bench.made_records import whole_run

from kvtailor.bench.report import summarise
from kvtailor.bench.report.points import base, named, series_of
from kvtailor.bench.report.tables.quality import documents_over
from kvtailor.bench.report.tables.tables import quality_grid
from kvtailor.bench.report.terminal import show
from kvtailor.bench.report.verdict.verdict import judge


def on(text, each):
    return replace(each, text=text, text_hash=text)


def test_a_plan_loses_nothing_only_if_it_loses_nothing_on_every_text():
    both = [FULL, SAME, on("other.txt", FULL), on("other.txt", SAME)]
    assert summarise(both).headline.startswith("same loses less than 0.02 nats per token here at 25 %")
    assert (
        "of other.txt, the worst of 2"
        in summarise(
            [*both[:3], on("other.txt", scored("same", [a + (0.02 if i % 2 else -0.019) for i, a in enumerate(BASE)]))]
        ).headline
    )
    worse = on("other.txt", replace(WORSE, label="same", plan="same", plan_hash="#same"))
    said = summarise([FULL, SAME, on("other.txt", FULL), worse]).headline
    assert said.startswith("Every plan here that saves bytes loses more than 0.02 nats per token; the mildest is same:")
    assert "+0.300 nats per token on other.txt" in said


def test_a_row_is_of_all_texts_that_the_same_plans_have():
    """A plan that loses on the second text only: one text alone would hide it."""
    harmed = on("other.txt", replace(WORSE, label="same", plan="same", plan_hash="#same"))
    summary = summarise([FULL, SAME, on("other.txt", FULL), harmed])
    full, same = summary.rows
    jitter = fmean(SAME.values["nll"]) - fmean(FULL.values["nll"])
    assert same.loss.value == pytest.approx(jitter + 0.3 / 2)
    assert same.loss.count == full.loss.count == 2 * len(BASE)
    nll, perplexity = same.numbers["perplexity.nll"], same.numbers["perplexity.perplexity"]
    assert nll.value == pytest.approx(fmean([*SAME.values["nll"], *harmed.values["nll"]]))
    assert perplexity.value == pytest.approx(math.exp(nll.value))
    assert len(same.keys("perplexity.nll_over_full")) == 4 and len(perplexity.keys) == 2
    (note,) = [note for note in summary.footnotes if note.startswith("ΔNLL")]
    assert f"over {same.loss.count} windows" in note and "of t.txt, other.txt (" in note
    assert not [note for note in summary.footnotes if note.startswith("perplexity: measured at")]


def test_windows_of_a_text_are_drawn_together():
    """Five texts whose windows go together: an interval over single windows would be far too narrow."""
    names = [f"{i}.txt" for i in range(5)]
    shift = dict(zip(names, [-0.1, -0.05, 0.0, 0.05, 0.1], strict=True))
    full = [on(name, FULL) for name in names]
    moved = [on(name, scored("same", [x + shift[name] for x in BASE])) for name in names]
    (_, same) = summarise([*full, *moved]).rows
    assert same.loss.value == pytest.approx(0.0, abs=1e-9) and same.loss.count == 5 * len(BASE)
    # Of five means with a standard error of 0.035.
    assert same.loss.low < -0.06 and same.loss.high > 0.06


def test_documents_of_two_texts_are_not_taken_for_one():
    numbered = [
        replace(FULL, text=name, text_hash=name, values={"nll": (1.0, 1.0), "document": (0.0, 1.0)})
        for name in ("a", "b")
    ]
    assert documents_over(numbered) == (0.0, 1.0, 2.0, 3.0)
    assert documents_over([*numbered[:1], on("c", replace(FULL, values={"nll": (1.0, 1.0)}))]) == (0.0, 1.0, 2.0, 2.0)


def test_bits_a_byte_of_two_texts_are_those_of_their_bytes():
    # 100 tokens of 2 nats in 200 bytes, 300 of 3 nats in 600.
    one = replace(FULL, tokens_scored=100, metrics={"nll": 2.0, "bits_per_byte": 100 * 2 / 200 / math.log(2)})
    second = {"nll": 3.0, "bits_per_byte": 300 * 3 / 600 / math.log(2)}
    two = on("other.txt", replace(FULL, tokens_scored=300, metrics=second))
    (row,) = summarise([one, two]).rows
    assert row.value("perplexity.bits_per_byte") == pytest.approx(1100 / 800 / math.log(2))
    (row,) = summarise([one, replace(two, metrics={"nll": 3.0, "bits_per_byte": None})]).rows
    assert row.value("perplexity.bits_per_byte") is None


def test_a_plan_that_was_not_asked_everything_is_not_said_to_lose_nothing():
    said = summarise([FULL, SAME, on("other.txt", FULL)]).headline
    assert said.startswith("No plan that holds less was measured in all 2 texts and tasks")
    said = summarise([FULL, SAME, WORSE, on("other.txt", FULL), on("other.txt", WORSE)]).headline
    assert said.startswith("Every plan here that saves bytes and was measured in everything loses more than 0.02")
    assert "the mildest is worse" in said


def test_lost_answers_of_one_kind_are_not_made_good_by_another():
    def asked(label, kind, hits):
        one = needles(label, hits)
        return replace(one, point={**one.point, "kind": kind})

    full = [FULL, asked("full", "passkey", [1] * 10 + [0] * 10), asked("full", "needle", [1] * 20)]
    same = [SAME, asked("same", "passkey", [1] * 18 + [0] * 2), asked("same", "needle", [1] * 12 + [0] * 8)]
    said = summarise([*full, *same]).headline
    assert "loses more than 0.02 nats per token or 10 points of right answers" in said
    assert "at worst of 2 tasks -40.0 points" in said and "in needle" in said


def test_a_memory_that_could_not_be_read_says_nothing_about_quality():
    blind = [replace(each, task="memory", error="on an accelerator", values={}, metrics={}) for each in (FULL, SAME)]
    assert summarise([FULL, SAME, *blind]).headline.startswith("same loses less than 0.02 nats")


def test_the_share_of_the_bytes_is_that_of_all_points():
    shorter = [replace(each, point={"context": 50, "continuation": 20}, text_hash="s") for each in (FULL, SAME)]
    said = summarise([FULL, SAME, shorter[0], replace(shorter[1], bytes_held=400)]).headline
    assert "at 25 to 40 % of the bytes" in said


def test_a_row_shows_the_point_that_most_plans_have_and_says_which():
    lonely = on("rare.txt", replace(FULL, metrics={"nll": 9.0}))
    summary = summarise([lonely, FULL, SAME])
    assert [row.value("perplexity.nll") for row in summary.rows] == [FULL.metrics["nll"], SAME.metrics["nll"]]
    (note,) = [note for note in summary.footnotes if note.startswith("perplexity: measured at 2 points")]
    assert "shows t.txt" in note
    assert any("windows of t.txt" in note for note in summary.footnotes)


def test_times_of_graphs_say_so():
    plain = [timed("full", 0.02), timed("same", 0.01)]
    graphs = [replace(each, point={**each.point, "graphs": True}) for each in plain]
    assert [any("CUDA graphs" in note for note in summarise(run).footnotes) for run in (plain, graphs)] == [False, True]


def test_of_points_that_as_many_plans_have_the_first_is_shown():
    first, second = on("b.txt", FULL), on("a.txt", FULL)
    assert base(series_of([first, second], "perplexity")).text == "b.txt"
    assert named(series_of([first, second], "perplexity")) == ["b.txt", "a.txt"]
    grid = [record("full", "speed", point={"context": c, "batch": b, "rounds": 5}) for c in (64, 128) for b in (1, 2)]
    assert named(series_of(grid, "speed"))[2] == "context 128, batch 1"
    assert named(series_of(grid[:2], "speed")) == ["batch 1", "batch 2"]


def test_times_of_two_runs_are_not_divided_by_each_other():
    here = [timed("full", 0.01), timed("half", 0.005)]
    assert summarise(here).rows[1].value("speed.tpot_over_full") == 0.5
    summary = summarise([here[0], replace(here[1], run="another")])
    half = summary.rows[1]
    assert half.value("speed.tpot_over_full") is None and half.value("speed.tpot_median") == 0.005
    assert any("different runs are not compared" in note for note in summary.footnotes)


def test_two_models_never_stand_in_one_row():
    old = [replace(each, model="old", started="2026-01-01") for each in (FULL, SAME)]
    new = [replace(each, model="new", started="2026-01-02") for each in (FULL, WORSE)]
    summary = summarise([*new, *old])
    assert [row.label for row in summary.rows] == ["full", "worse"]
    assert summary.footnotes[0].startswith("Left out: 2 records of another model")


def test_shares_of_different_documents_are_told():
    more = replace(needles("full", [1] * 4), point={**needles("full", [1]).point, "depth": 0.9})
    summary = summarise([needles("full", [1] * 4), more, needles("x", [1] * 4)])
    assert any(note.startswith("x: its answers are of 1 of the 2") for note in summary.footnotes)
    beyond = replace(more, label="x", plan="x", plan_hash="#x")
    summary = summarise([needles("full", [1] * 4), needles("x", [0] * 4), beyond])
    assert (summary.rows[1].hits, summary.rows[1].accuracy.count) == (0, 4)


def test_a_missing_plan_has_no_row():
    summary = summarise(whole_run())
    assert summary.missing == (("rankkv @ keep=0.25", "the score method 'rankkv'"),)
    assert all(row.label != "rankkv @ keep=0.25" for row in summary.rows)
    assert not any("rankkv" in note for note in summary.footnotes)


def test_scores_are_paired_and_on_the_right_scale():
    summary = summarise(whole_run())
    by_name = {measure.name: measure for measure in summary.measures}
    arc = by_name["arc_challenge"]
    records = {each.label: each for each in whole_run() if each.task == "harness"}
    full, other = records["full"], records["snapkv @ keep=0.25"]
    score = arc.scores[other.plan_hash]
    assert score.value == pytest.approx(100 * other.metrics["acc"]) and arc.unit == "%"
    assert score.difference.value == pytest.approx(100 * (other.metrics["acc"] - full.metrics["acc"]))
    assert score.low == pytest.approx(100 * full.metrics["acc"] + score.difference.low)
    assert by_name["longbench lcc"].scores[full.plan_hash].value < 100
    assert by_name["multi_value, recall"].scores[full.plan_hash].samples == 24


def test_scores_on_a_scale_of_their_own_are_judged_by_their_intervals():
    records = [each for each in whole_run() if each.task == "harness" and each.label in ("full", "kivi(bits=4)")]
    full, other = (
        replace(each, bytes_held=size, bytes_full=100) for each, size in zip(records, (100, 30), strict=True)
    )
    nats = tuple(-100.0 - i for i in range(40))
    full = replace(full, values={"score": nats})

    def judged(offset, *notes):
        shifted = tuple(x + offset + (0.1 if i % 2 else -0.1) for i, x in enumerate(nats))
        summary = summarise([replace(full, notes=notes), replace(other, values={"score": shifted}, notes=notes)])
        assert summary.measures[0].unit == "score"
        return summary.headline

    fine = "kivi(bits=4) loses less than 10 % of a score"
    assert judged(0.0).startswith(fine)
    assert judged(-30.0).startswith("Every plan") and judged(3.0).startswith(fine)
    lower = "Of brier_score,none lower is better."
    assert judged(30.0, lower).startswith("Every plan") and judged(-3.0, lower).startswith(fine)


@pytest.mark.parametrize(("whole", "more", "harmful"), [(0.005, 0.007, False), (0.005, 0.05, True), (1.0, 0.05, False)])
def test_a_score_in_nats_has_the_margin_of_text_where_a_tenth_of_it_is_less(whole, more, harmful):
    def asked(label, nll, size):
        values = {"nll": tuple(nll + 1e-4 * (i % 3) for i in range(40))}
        return record(label, "ask", point={"length": 512}, values=values, bytes_held=size, bytes_full=1000, samples=40)

    summary = summarise([asked("full", whole, 1000), asked("less", whole + more, 300)])
    assert summary.measures[0].name == "ask answer nll"
    [judged] = judge(summary.rows, summary.measures, summary.margins).judged
    assert judged.worse is harmful and judged.shown is not harmful
    assert "10 % of a score, or 0.02 nats where that is more" in summary.headline


def test_a_task_without_numbers_for_single_samples_is_shown_and_decides_nothing():
    point = {"task": "wmt", "metric": "bleu,none", "fewshot": 0, "limit": 9}
    corpus = [
        record(label, "harness", point=point, metrics={"bleu,none": value}, samples=9)
        for label, value in (("full", 30.0), ("same", 29.5))
    ]
    summary = summarise([FULL, SAME, *corpus])
    assert summary.headline.startswith("same loses less than 0.02 nats")
    assert [score.value for score in summary.measures[1].scores.values()] == [30.0, 29.5]


def test_what_the_model_cannot_do_shows_no_loss():
    hopeless = [
        record(
            label,
            "longcontext",
            point={"benchmark": "b", "subset": "s"},
            values={"score": (0.0, 3.0) * 5},
            bytes_held=size,
            bytes_full=1000,
        )
        for label, size in (("full", 1000), ("same", 250))
    ]
    summary = summarise(hopeless)
    assert summary.headline.startswith("No verdict: 'full' itself gets next to nothing right")
    assert any(note.startswith("'full' itself gets next to nothing right in b s:") for note in summary.footnotes)
    assert summarise([FULL, SAME, *hopeless]).headline.startswith("same loses less than 0.02 nats")


def test_few_answers_admit_what_they_cannot_see():
    hits = [1, 0] * 10
    moved = [needles("full", hits), needles("same", hits[1:] + hits[:1])]
    said = summarise([FULL, SAME, *moved]).headline
    assert said.startswith("No verdict") and "answers (this run has 20)" in said


def test_the_score_of_a_set_is_its_own_and_not_the_mean_of_its_examples():
    one = next(each for each in whole_run() if each.task == "longcontext")
    odd = replace(one, metrics={"score": 12.5})
    (measure,) = summarise([odd]).measures
    assert measure.scores[odd.plan_hash].value == 12.5 != pytest.approx(sum(one.values["score"]) / 20)


def test_a_score_that_is_no_mean_has_no_interval_of_one():
    pair = [each for each in whole_run() if each.task == "longcontext" and each.point["subset"] == "lcc"][:2]
    sizes = [replace(each, bytes_held=size, bytes_full=100) for each, size in zip(pair, (100, 30), strict=True)]
    (measure,) = summarise(sizes).measures
    score = measure.scores[pair[1].plan_hash]
    assert score.low < score.value < score.high
    assert not any("not the mean" in note for note in summarise(sizes).footnotes)
    odd = [replace(each, metrics={"score": value}) for each, value in zip(sizes, (40.0, 10.0), strict=True)]
    summary = summarise(odd)
    drawn = summary.measures[0].scores[pair[1].plan_hash]
    assert drawn.value == 10 and drawn.low is None and drawn.high is None and drawn.difference == score.difference
    assert any(note.startswith("The score of longbench lcc is not the mean") for note in summary.footnotes)
    assert f"{score.difference.value:+.1f} points ({score.difference.low:+.1f} to" in summary.headline


def own_scale(label, task, value, size, lower=False, spread=0.001):
    """A harness record whose scores lie on a scale of the task's own."""
    values = tuple(value + spread * (i % 3 - 1) * (label != "full") - 1000 * (i == 0) for i in range(12))
    notes = ("Of it lower is better.",) if lower else ()
    return record(
        label,
        "harness",
        point={"task": task},
        values={"score": values},
        samples=12,
        notes=notes,
        bytes_held=size,
        bytes_full=1000,
    )


@pytest.mark.parametrize("lower", [False, True])
def test_the_mildest_plan_is_mild_in_scores_on_their_own_scale_too(lower):
    sign = 1 if lower else -1
    full = own_scale("full", "odd", 500.0, 1000, lower)
    much = own_scale("much", "odd", 500.0 + 90 * sign, 250, lower)
    little = own_scale("little", "odd", 500.0 + 3 * sign, 250, lower)
    assert f"the mildest is little: {3 * sign:+} in odd" in summarise([full, much, little]).headline
    nats = [
        scored(label, [x + more for x in BASE], size=size)
        for label, more, size in (("full", 0.0, 1000), ("much", 0.1, 250), ("little", 0.2, 250))
    ]
    assert "the mildest is little" in summarise([*nats, full, much, little]).headline
    # Of two tasks the headline names the one that was lost.
    kept = [own_scale(label, "another", 7.0, 250 if label != "full" else 1000, lower) for label in ("full", "little")]
    assert f"the mildest is little: {3 * sign:+} in odd" in summarise([*kept, full, little]).headline
    answers = [needles("full", [1] * 20), needles("little", [1] * 20)]
    assert f"20 of 20 answers right ('full': 20), {3 * sign:+} in odd" in summarise([*answers, full, little]).headline


def test_scores_on_their_own_scale_are_explained_and_shown_finely():
    records = [
        each
        for label, size, by in (("full", 1000, 0.0), ("x", 250, -0.02))
        for each in (own_scale(label, "up", 0.5 + by, size), own_scale(label, "down", 0.5 + by, size, True))
    ]
    summary = summarise(records)
    grid = quality_grid(summary.measures, summary.rows)
    assert "score for down (above 0 is worse)" in grid.note and "score for up (below 0 is worse)" in grid.note
    assert "percent" not in grid.note and "nats" not in grid.note
    assert all(cell.interval.startswith("-0.02") and " to -0.0" in cell.interval for cell in grid.rows[1][1:])
    assert all(cell.interval != "-0.0 to -0.0" for cell in grid.rows[1][1:])
    console = Console(file=io.StringIO(), width=200)
    show(summary, console)
    assert "-0.0 …" not in console.file.getvalue() and "-0.02" in console.file.getvalue()
    whole = summarise(whole_run())
    note = quality_grid(whole.measures, whole.rows).note
    assert "nats per token" in note and "points of percent" in note and "scale" not in note


def test_a_difference_names_the_records_of_both_sides():
    for measure in summarise(whole_run()).measures:
        by_label = {plan.removeprefix("#"): score for plan, score in measure.scores.items()}
        full = by_label.pop("full")
        assert by_label and len(set(full.keys)) == len(full.keys)
        assert all(
            s.keys[-len(full.keys) :] == full.keys and len(s.keys) == 2 * len(full.keys) for s in by_label.values()
        )
    alone = summarise([each for each in whole_run() if each.label != "full"]).measures
    assert all(len(score.keys) in (1, 6) for measure in alone for score in measure.scores.values())


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_terminal_shows_costs_and_every_task_within_its_width(width):
    console = Console(file=io.StringIO(), width=width)
    show(summarise(whole_run()), console)
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for shown in (
        "tokens/s",
        "~9,000",
        "floor 0.4",
        "5.6 M",
        "3.1 k",
        "GFLOP/s",
        "3.81 MiB",
        "2.38 MiB",
        "batch fits",
        "qasper",
        "arc_challenge",
        "Not in this kvtailor yet",
        "rankkv @ keep=0.25: the score method",
    ):
        assert shown in text, shown


def test_tokens_a_second_for_each_gib_are_of_the_caches_that_were_timed():
    """And not of those on which the loss was measured, which had another context."""
    rows = {row.label: row for row in summarise(whole_run()).rows}
    shown = 0
    for row in rows.values():
        at = [each for each in whole_run() if each.task == "speed" and each.plan_hash == row.plan_hash]
        at = [each for each in at if "tokens_per_second" in each.metrics and each.bytes_held]
        if not at:
            continue
        found = {
            each.metrics["tokens_per_second"] / (each.bytes_held / 2**30): each.metrics["tokens_per_second"]
            for each in at
        }
        if "speed.tokens_per_second" not in row.numbers:
            continue
        assert found[row.value("speed.tokens_per_second_per_gib")] == row.value("speed.tokens_per_second")
        shown += 1
    assert shown > 2
