"""With nothing to drop, every plan gives what 'full' gives."""

import pytest
from tests.support.bench.frauds import Numbers
from tests.support.seam.zoo import build

from kvtailor import cache_for
from kvtailor.bench.contestant import OWN
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject, plans_at_whole_budget
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import KvtailorError

SIZES = {"text": "n", "source": "numbers", "context": 50, "continuation": 20, "windows": 5, "least_distinct": 0.0}
# The last one has both a way to evict and a way to read.
PLANS = [
    "streaming @ tokens=20",
    "snapkv(window=8) + adakv + kivi(bits=2, group=8, recent=8) @ keep=0.5",
    "snapkv(window=8) + pyramid @ tokens=24",
    "h2o(recent=4) @ tokens=20",
    "random @ keep=0.5",
    "rocket(tokens=16, turns=true, window=4)",
    "streamingllm @ tokens=20",
    "quest(tokens=16, dense_layers=0) + random @ tokens=20",
]


def tiny(family="llama", make=None, whole=None):
    model = build(family)
    ids = [3 + (7919 * i * i + 13 * i) % (model.config.vocab_size - 3) for i in range(5 * 70)]
    return Subject(name="tiny", model=model, tokenizer=Numbers(ids), make_cache=make, whole_budget=whole)


def test_what_plans_become():
    assert plans_at_whole_budget("full") == plans_at_whole_budget("kivi(bits=4)") == ()
    assert plans_at_whole_budget("snapkv(window=8) + adakv + kivi(bits=2) @ bytes=1MiB, slack=7") == (
        "snapkv(window=8) + adakv @ keep=1.0, slack=7",
    )
    assert plans_at_whole_budget("quest(tokens=64)") == (f"indexed + quest(tokens={2**40})",)
    assert plans_at_whole_budget("streamingllm @ tokens=20") == ("position + rolling @ keep=1.0, slack=0",)
    assert plans_at_whole_budget("rocketkv @ keep=0.5")[1] == f"rocket(tokens={2**40})"
    assert len(plans_at_whole_budget(PLANS[-1])) == 2


@pytest.mark.parametrize("task", [Perplexity, pytest.param(Fidelity, marks=pytest.mark.long)])
def test_every_method_is_tried_and_drops_nothing(task):
    asked = []

    def make(model, plan):
        asked.append(plan)
        return cache_for(model, plan)

    plans = PLANS if task is Perplexity else PLANS[:-1]
    records = run(tiny(make=make, whole=plans_at_whole_budget), contestants_of(plans), [task(**SIZES)], bandwidth=False)
    assert [record.error for record in records] == [None] * (1 + len(plans)) and not any(r.notes for r in records)
    wholes = {whole for plan in plans for whole in plans_at_whole_budget(plan)}
    assert all(asked.count(whole) == 1 for whole in wholes) and len(wholes) == (8 if task is Perplexity else 7)


@pytest.mark.parametrize("task", [Perplexity, Fidelity])
def test_a_plan_that_drops_something_at_its_whole_budget_is_caught(task):
    def leaky(model, plan):
        return cache_for(model, plan.replace("keep=1.0", "keep=0.98"))

    given = tiny(make=leaky, whole=plans_at_whole_budget)
    full, h2o = run(given, contestants_of([PLANS[3]]), [task(**SIZES)], bandwidth=False)
    assert h2o.error.startswith("whole budget: plan 'h2o(recent=4) @ tokens=20' was tried as ")
    assert "keep=1.0" in h2o.error and h2o.metrics == {} and full.error is None and full.metrics


def texts(contestants):
    return tuple(each.text for each in contestants)


def test_it_is_on_for_every_subject_of_kvtailors_own_caches():
    [streaming] = contestants_of([PLANS[0]])[1:]
    assert texts(tiny().at_whole_budget(streaming)) == plans_at_whole_budget(PLANS[0])
    assert tiny().at_whole_budget(OWN) == tiny(make=cache_for).at_whole_budget(streaming) == ()


def test_what_cannot_be_tried_is_said():
    def refusing(model, plan):
        if "keep=1.0" in plan:
            raise KvtailorError("not that much")
        return cache_for(model, plan)

    given = tiny(make=refusing, whole=plans_at_whole_budget)
    full, streaming = run(given, contestants_of([PLANS[0]]), [Perplexity(**SIZES)], bandwidth=False)
    [note] = streaming.notes
    assert note.startswith("Its whole budget could not be tried as position @ keep=1.0") and "not that much" in note
    assert full.notes == () and streaming.error is None


def test_a_plan_that_loses_little_in_half_precision_is_caught():
    """The noise of bfloat16 hides one token of 50 (0.04 nats in the mean are allowed there), float32 does not."""

    def leaky(model, plan):
        return cache_for(model, plan.replace("keep=1.0", "keep=0.98"))

    given = tiny(make=leaky, whole=plans_at_whole_budget)
    given.model.bfloat16()
    _, streaming = run(given, contestants_of([PLANS[0]]), [Perplexity(**SIZES)], bandwidth=False)
    assert streaming.error.startswith("whole budget: with the weights in float32, 'full' and plan 'streaming @")
