"""A plan is parsed when a contestant is made of it, and by no task, check or cache after that."""

from __future__ import annotations

import pytest
import torch
from tests.support.bench.frauds import Numbers
from tests.support.seam.zoo import build

from kvtailor.attend.contract import Attention
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.speed import Speed
from kvtailor.errors import KvtailorError
from kvtailor.plan import Plan, plan, registry

PLANS = ["snapkv(window=8) @ tokens=24", "kivi(bits=4, group=8, recent=8)", "quest(tokens=16) + random @ tokens=20"]
SIZES = {"text": "n", "source": "numbers", "context": 50}


def tiny(**more) -> Subject:
    model = build("llama")
    ids = [3 + (7919 * i * i + 13 * i) % (model.config.vocab_size - 3) for i in range(5 * 70)]
    return Subject(name="tiny", model=model, tokenizer=Numbers(ids), **more)


def test_a_run_parses_each_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    reading = plan.line_parts

    def counted(line: str, *more: object, **named: object):
        parsed.append(line)
        return reading(line, *more, **named)

    monkeypatch.setattr(plan, "line_parts", counted)
    windows = {"continuation": 20, "windows": 3, "least_distinct": 0.0}
    tasks = [
        Perplexity(**SIZES, **windows),
        Fidelity(**SIZES, **windows),
        Speed(**SIZES, tokens=3, rounds=2, warmup=0),
    ]
    records = run(tiny(), contestants_of(PLANS), tasks, bandwidth=False, allow=("cold side",))
    assert not any(record.error for record in records) and len(records) == 4 + 4 + 5
    assert sorted(parsed) == sorted(["full", *PLANS])


def test_a_cache_of_a_plan_that_was_never_parsed_is_refused() -> None:
    with pytest.raises(KvtailorError, match=r"cache of 'snapkv', which holds no parsed plan: make it by Contestant.of"):
        tiny().new_cache(Contestant(label="snapkv", text="snapkv", hash="x"))


def test_a_subject_with_caches_of_its_own_gets_the_line() -> None:
    asked = []
    given = tiny(make_cache=lambda model, line: asked.append(line))
    given.new_cache(Contestant.of(" snapkv(window=8)   @ tokens=24 "))
    assert asked == ["snapkv(window=8) @ tokens=24"]


def test_which_is_the_null_plan_is_a_fact_of_the_plan_and_not_of_its_label() -> None:
    full, other = contestants_of(["topk + plain", PLANS[0]])
    assert full.is_full and not other.is_full and not OWN.is_full and OWN.is_own and not full.is_own
    assert Contestant.of("topk").is_full and Contestant.of("topk").label == "topk"
    assert Contestant.of(str(Plan())).is_full
    common = {"run": "r", "model": "m", "started": "2026-01-01", "plan_hash": "x", "task": "speed", "task_version": 1}
    assert Record(label="mine", plan="full", **common).is_full
    assert not Record(label="full", plan="snapkv @ tokens=3", **common).is_full


@pytest.mark.parametrize("name", registry.methods("attend"))
def test_an_attention_with_a_budget_in_tokens_declares_it(name: str) -> None:
    kind = registry.load("attend", name)
    assert issubclass(kind, Attention)
    assert kind.has_token_budget == ("tokens" in kind.__dataclass_fields__)


def test_rows_are_the_same_with_a_parsed_plan() -> None:
    """The cache that a contestant's plan makes is the one that its line makes."""
    from kvtailor import cache_for

    given, ids = tiny(), torch.arange(3, 60)[None]
    [contestant] = contestants_of(PLANS[:1])[1:]
    ours, _ = given.prefill(ids, given.new_cache(contestant), last_only=True)
    theirs, _ = given.prefill(ids, cache_for(given.model, PLANS[0]), last_only=True)
    assert torch.equal(ours, theirs)
