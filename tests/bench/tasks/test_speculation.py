"""The task `speculation`: counts that must come out as they do, times that are paired, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tests.support.bench.dummy import DummyTokenizer, UniformModel
from tests.support.bench.dummy import subject as dummy_subject
from tests.support.seam.zoo import build

from kvtailor.bench.build import SettingsError, make_task
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.measure.draft_rounds import DraftRounds
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.speculation import Speculation
from kvtailor.errors import KvtailorError
from kvtailor.speculate.rounds import Level

TEXT = "".join(chr(97 + i * i % 23) for i in range(2000))
FULL = Contestant.of("full")


def asked(**settings) -> Speculation:
    settings = {"draft_plan": "full", "context": 24, "tokens": 13, "rounds": 2, "warmup": 0, **settings}
    return Speculation(text=TEXT, source="letters", **settings)


def measured(*plans: str, quiet: bool = True, monkeypatch=None, **settings):
    subject = Subject(name="tiny", model=build("llama"), tokenizer=DummyTokenizer())
    if monkeypatch is not None:
        monkeypatch.setattr(Neighbours, "disturbed", lambda self: not quiet)
    records = run(subject, contestants_of(list(plans)), [asked(**settings)], bandwidth=False)
    return {record.label: record for record in records}


def test_a_draft_that_is_the_target_is_always_right(monkeypatch):
    found = measured(monkeypatch=monkeypatch, gamma=3)["full"]
    # 12 tokens after the first, in rounds of 3 drafted and 1 more.
    assert found.metrics["acceptance"] == 1 and found.metrics["emitted_per_verification"] == 4
    assert found.values["emitted_per_verification"] == (4.0, 4.0) and found.values["identical"] == (1.0, 1.0)
    assert found.metrics["inner_acceptance"] is None and found.metrics["draft_weight_bytes"] is None
    # Two caches of the same tokens; one has not read the last drafted one.
    plain, both = found.metrics["plain_device_bytes"], found.metrics["device_bytes"]
    assert 1.8 * plain < both < 2.2 * plain
    for name in ("generation", "plain"):
        assert found.timings[name]["count"] == 2 and len(found.values[name]) == 2
    ratios = [a / b for a, b in zip(found.values["plain"], found.values["generation"], strict=True)]
    assert found.values["speed_up"] == pytest.approx(ratios)
    assert found.metrics["speed_up"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert found.metrics["tokens_per_second"] == pytest.approx(12 / found.timings["generation"]["median"])
    assert found.tokens_seen == 24 + 12


def test_the_models_own_cache_is_in_every_round(monkeypatch):
    found = measured("vector(bits=8)", monkeypatch=monkeypatch)
    own = found[OWN.label]
    assert set(own.values) == {"plain", "disturbed"} and len(own.values["plain"]) == 2 and own.metrics == {}
    for label in ("full", "vector(bits=8)"):
        ratios = [a / b for a, b in zip(own.values["plain"], found[label].values["generation"], strict=True)]
        assert found[label].values["speed_up_own"] == pytest.approx(ratios)


def test_a_poor_draft_changes_no_text(monkeypatch):
    found = measured(monkeypatch=monkeypatch, draft_plan="position(sinks=1) @ tokens=2", rounds=3)["full"]
    assert found.metrics["identical"] == 1 and found.metrics["acceptance"] < 1
    assert 1 <= found.metrics["emitted_per_verification"] < 5


def test_what_neighbours_disturbed_is_in_no_time_and_rounds_are_added(monkeypatch):
    found = measured(monkeypatch=monkeypatch, quiet=False)["full"]
    assert found.timings == {} and found.metrics["speed_up"] is None and found.metrics["tokens_per_second"] is None
    assert found.values["speed_up"] == () and found.values["disturbed"] == (1.0,) * 4 and found.samples == 0
    assert found.metrics["acceptance"] == 1


def test_ratios_pair_the_rounds_and_leave_out_those_disturbed_on_either_side():
    own = DraftRounds(plain=[8.0, 9.0, 10.0, 11.0], disturbed=[False, True, False, False])
    level = Level(proposed=8, accepted=4, verifications=2, emitted=6)
    mine = DraftRounds(
        plain=[4.0, 4.0, 6.0, 9.0],
        drafted=[2.0, 2.0, 2.0, 3.0],
        disturbed=[False, False, True, False],
        identical=[1.0, 1.0, 0.0, 1.0],
        levels=[(level,)] * 3 + [(replace(level, accepted=8),)],
    )
    values = mine.values(own, greedy=True)
    assert values["speed_up"] == (2.0, 2.0, 3.0) and values["speed_up_own"] == (4.0, 11 / 3)
    assert values["acceptance"] == (0.5, 0.5, 0.5, 1.0)
    metrics = mine.metrics(own, 30, 3, None, greedy=True)
    assert metrics["speed_up"] == pytest.approx(12 ** (1 / 3)) and metrics["acceptance"] == 20 / 32
    assert metrics["identical"] == 0.75 and metrics["emitted_per_verification"] == 3
    assert metrics["tokens_per_second"] == 15 and metrics["plain_tokens_per_second"] == 7.5
    assert mine.timings(3)["generation"]["left_out"] == 1
    mine.disturbed[0] = True
    assert mine.timings(3) == {} and mine.timings(2)["plain"]["count"] == 2
    assert "identical" not in mine.values(own, greedy=False)


def test_sampled_texts_are_not_compared_and_states_differ(monkeypatch):
    found = measured(monkeypatch=monkeypatch, temperature=1.0, top_p=0.9, gamma=2)["full"]
    assert found.metrics["identical"] is None and "identical" not in found.values
    assert found.point["temperature"] == 1.0 and found.metrics["acceptance"] > 0.9


def test_a_plan_that_cannot_be_a_target_says_so_and_the_others_go_on(monkeypatch):
    found = measured("indexed(page=4) + quest(tokens=16)", monkeypatch=monkeypatch)
    refused = found["indexed(page=4) + quest(tokens=16)"]
    assert "cannot verify a draft" in refused.error and refused.metrics == {}
    assert found["full"].error is None


def test_where_the_models_own_cache_is_not_measured_nothing_is_told_over_it(monkeypatch):
    class Turns:
        def live(self, contestant):
            return True

        def __call__(self, contestant):
            return nullcontext(True)

    monkeypatch.setattr(Neighbours, "disturbed", lambda self: False)
    subject, task = Subject(name="tiny", model=build("llama"), tokenizer=DummyTokenizer()), asked()
    (sample,) = task.samples(subject, [FULL])
    found = task.score_all(subject, [FULL], sample, Turns())[FULL.hash]
    assert found.metrics["speed_up_own"] is None and found.metrics["speed_up"] is not None


def test_hits_of_a_tier_are_told(monkeypatch, tmp_path):
    plan = f'disk(on_device_layers=1, resident_layers=0, block=8, folder="{tmp_path}")'
    found = measured(plan, monkeypatch=monkeypatch)
    tier, full = found[plan], found["full"]
    assert tier.error is None and tier.metrics["resident_hits"] == 0 and tier.metrics["bytes_read"] > 0
    assert full.metrics["resident_hits"] is None and full.metrics["bytes_read"] is None
    assert tier.metrics["plain_device_bytes"] < full.metrics["plain_device_bytes"]


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: False)
    subject = Subject(name="tiny", model=build("llama"), tokenizer=DummyTokenizer())
    first = run(subject, [FULL], [asked()], bandwidth=False, out=tmp_path)
    from kvtailor.bench import runner

    monkeypatch.setattr(runner, "finished", lambda *_, **__: {record.key: record for record in first})
    monkeypatch.setattr(Speculation, "_sample", lambda *_: pytest.fail("measured again"))
    assert run(subject, [FULL], [asked()], bandwidth=False, out=tmp_path) == first


def test_what_makes_no_sense_is_refused_before_any_work():
    subject = Subject(name="tiny", model=build("llama"), tokenizer=DummyTokenizer())
    for settings, words in (
        ({}, "there is no draft"),
        ({"draft_plan": "snapkw"}, "did you mean 'snapkv'"),
        ({"draft_plan": "full", "temperature": -1}, "temperature is -1: .* or equal to 0"),
        ({"draft_plan": "full", "tokens": 1}, "tokens is 1: .* or equal to 2"),
        ({"draft_plan": "full", "gama": 3}, "did you mean 'gamma'"),
    ):
        with pytest.raises(SettingsError, match=words):
            make_task("speculation", {"context": 24, **settings}, subject, data=None)
    with pytest.raises(KvtailorError, match="kvtailor's own caches"):
        run(dummy_subject(UniformModel()), [FULL], [asked()], bandwidth=False)


def test_prompts_differ_and_are_the_same_for_all_plans(monkeypatch):
    seen = []
    real = Speculation._generated
    monkeypatch.setattr(
        Speculation, "_generated", lambda self, *args: (seen.append((args[1], args[2].clone())), real(self, *args))[1]
    )
    measured("vector(bits=8)", monkeypatch=monkeypatch)
    by_plan = {plan: [ids for name, ids in seen if name == plan] for plan, _ in seen}
    a, b = by_plan.values()
    assert len(a) == 4 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(a[0], a[1]) and not torch.equal(a[0], a[2])


def test_what_is_timed_is_told_apart(monkeypatch):
    real = Speculation._generated

    def timed(self, subject, plan, prompt, drafts, state):
        found = real(self, subject, plan, prompt, drafts, state)
        found.statistics.seconds = 2.0 if drafts else 6.0
        return found

    monkeypatch.setattr(Speculation, "_generated", timed)
    found = measured(monkeypatch=monkeypatch)["full"]
    assert found.values["plain"] == (6.0, 6.0) and found.values["generation"] == (2.0, 2.0)
    assert found.metrics["speed_up"] == pytest.approx(3) and found.metrics["plain_tokens_per_second"] == 2
