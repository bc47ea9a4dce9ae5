"""One task of the lm-evaluation-harness as a task of the bench."""

import random
from dataclasses import replace

import pytest
from tests.support.bench.harness_fixtures import folder

from kvtailor import cache_for
from kvtailor.bench.data.overlap import Calibrated
from kvtailor.bench.lm_eval.held import HeldSummary
from kvtailor.bench.lm_eval.results import likelihoods_of, metrics_of, scores_of
from kvtailor.bench.loop import Given, records_of
from kvtailor.bench.runner import contestants_of, plan_run, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.harness import Harness
from kvtailor.errors import KvtailorError

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'kvtailor[harness]'")

pytestmark = pytest.mark.usefixtures("few_harness_tasks")


@pytest.fixture(scope="module")
def subject():
    return Subject.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("data"), random.Random())


def records(subject, plans, *tasks, **given):
    return run(subject, contestants_of(plans), tasks, bandwidth=False, **given)


def test_records_say_what_was_asked_found_and_held(subject, data, tmp_path):
    steps = []
    task = Harness(task="arc_easy", data=data, limit=4)
    state = random.getstate()
    full, small, large = records(
        subject, ["snapkv @ keep=0.3", "snapkv @ tokens=2048"], task, out=tmp_path, advance=steps.append
    )
    assert random.getstate() == state
    assert len(steps) == plan_run([task], contestants_of(["snapkv @ keep=0.3", "snapkv @ tokens=2048"]))[1] == 300
    for record in (full, small, large):
        assert record.error is None and record.task == "harness" and record.samples == 4
        assert record.point["task"] == "arc_easy" and record.point["limit"] == 4 and record.point["fewshot"] is None
        assert record.point["metric"] == "acc,none" and "lm_eval" in str(record.point["version"])
        assert set(record.metrics) == {"acc,none", "acc_stderr,none", "acc_norm,none", "acc_norm_stderr,none"}
        assert record.metrics["acc,none"] == pytest.approx(sum(record.values["score"]) / 4)
        assert set(record.values["score"]) <= {0.0, 1.0} and len(record.values["loglikelihood"]) == 4
        assert record.text_hash == full.text_hash and record.tokens_scored == full.tokens_scored > 12
    assert small.tokens_held < small.tokens_seen and not small.notes
    assert small.values["loglikelihood"] != full.values["loglikelihood"]
    assert large.tokens_held == large.tokens_seen == full.tokens_seen
    assert large.values["loglikelihood"] == pytest.approx(full.values["loglikelihood"], rel=1e-5)
    assert any("Nothing was compressed: each of the 4 contexts" in note for note in large.notes)
    assert Record.from_json(small.to_json()) == small


def test_answers_of_one_token_tell_plans_apart_only_when_something_is_fed_afterwards(subject, data):
    of = {"task": "mmlu_anatomy", "data": data, "limit": 2, "fewshot": 3}
    full, inside, same, late = records(subject, ["snapkv @ keep=0.25"], Harness(**of), Harness(**of, outside=1))
    assert inside.values == full.values and inside.tokens_held < inside.tokens_seen
    assert any("no compressed cache was read" in note for note in inside.notes)
    assert late.values["loglikelihood"] != same.values["loglikelihood"] and not late.notes
    assert same.values["loglikelihood"] == pytest.approx(full.values["loglikelihood"], rel=1e-5)
    assert same.point["outside"] == 1 and full.point["fewshot"] == 3


def test_generated_answers_have_scores_only(subject, data, monkeypatch):
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.max_gen_toks", 9)
    full, small = records(subject, ["snapkv @ keep=0.25"], Harness(task="gsm8k", data=data, limit=1, fewshot=1))
    assert full.point["metric"] == "exact_match,strict-match"
    for record in (full, small):
        assert set(record.values) == {"score"} and len(record.values["score"]) == 1 and record.tokens_scored is None
    assert small.tokens_held < small.tokens_seen == full.tokens_seen


def test_what_is_known_is_not_measured_again_and_a_plan_that_fails_stops_no_other(subject, data):
    def make(model, plan):
        if plan.startswith("h2o"):
            raise KvtailorError("this plan fails")
        return cache_for(model, plan)

    task = Harness(task="lambada_openai", data=data)
    broken = replace(subject, make_cache=make)
    full, failed, last = records(broken, ["h2o @ keep=0.5", "streaming @ keep=0.5"], task)
    assert failed.error == "this plan fails" and not failed.metrics
    assert full.error is None and last.error is None and last.point == full.point
    asked, steps = [], []
    given = Given(
        subject=replace(subject, make_cache=lambda model, plan: pytest.fail("measured again")),
        contestants=contestants_of([]),
        blank=lambda contestant: replace(full, metrics={}, values={}, notes=(), point={}, text_hash=None),
        advance=steps.append,
        known=lambda blank: asked.append(blank) or full,
    )
    assert list(records_of(task, given)) == [full] and len(steps) == 100
    assert asked[0].key == full.key


def test_a_cache_that_only_says_that_it_is_small_is_caught(subject, data):
    def make(model, plan):
        cache = cache_for(model, "full")
        if plan != "full":
            honest = cache.ledger
            cache.ledger = lambda: replace(honest(), total=honest().total // 4, closed_form=None)
        return cache

    _, liar = records(replace(subject, make_cache=make), ["snapkv @ keep=0.25"], Harness(task="arc_easy", data=data))
    assert liar.error.startswith("untouched cache: ") and "arc_easy" in liar.error and liar.metrics == {}


def test_a_plan_that_was_calibrated_on_the_questions_is_refused(subject, data):
    [asked] = [path.read_text() for path in data.rglob("ARC-Easy-Test.jsonl")]
    made = Calibrated.on(asked, name="filters", model="demo", text_name="the test split")
    full, plan = contestants_of(["snapkv @ keep=0.25"])
    _, tuned = run(
        subject,
        [full, replace(plan, calibration=(made,))],
        [Harness(task="arc_easy", data=data, limit=4)],
        bandwidth=False,
    )
    assert tuned.error.startswith("calibration on the evaluated text: filters")


def test_what_cannot_be_asked_is_refused(subject, data):
    with pytest.raises(KvtailorError, match="no task of the lm-evaluation-harness named 'arc_eazy'.*arc_easy"):
        records(subject, [], Harness(task="arc_eazy", data=data))
    with pytest.raises(KvtailorError, match="mmlu_astronomy.*no row of it"):
        records(subject, [], Harness(task="mmlu_astronomy", data=data))
    with pytest.raises(KvtailorError, match="needs a file piqa"):
        records(subject, [], Harness(task="piqa", data=data))
    with pytest.raises(KvtailorError, match="such a file names its own data"):
        records(subject, [], Harness(task="mine.yaml", data=data))
    for wrong in ({"limit": 0}, {"fewshot": -1}, {"outside": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
            Harness(task="arc_easy", **wrong)


def test_numbers_that_are_none_become_none():
    metrics, notes = metrics_of({"alias": "x", "acc,none": 0.5, "p,none": float("inf"), "p_stderr,none": "N/A"})
    assert metrics == {"acc,none": 0.5, "p,none": None, "p_stderr,none": None}
    assert notes == ["The harness gives inf for p,none."]
    assert scores_of([(-6.0, 3), (-1.0, 2)]) == (-2.0, -0.5)
    assert scores_of([True, 0.0]) == (1.0, 0.0)
    assert scores_of([1.0, ("a", "b")]) is None and scores_of([None]) is None and scores_of([float("nan")]) is None
    assert likelihoods_of([{"resps": [[(-1.0, True)], [(-2.0, False)]]}, {"resps": [[-4.0]]}]) == (-3.0, -4.0)
    assert likelihoods_of([{"resps": [["text"]]}]) is None


def test_held_counts_only_what_is_smaller():
    class Nothing:
        """A cache without a ledger."""

    held = HeldSummary()
    assert held.add(Nothing()) is False and held.contexts == 1 and "no cache" in str(held)
