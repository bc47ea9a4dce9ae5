"""A run whose prompts are kept gives the records of one in which each plan reads its prompts itself."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tests.support.bench.frauds import FRAUDS
from tests.support.bench.harness_fixtures import folder
from tests.support.bench.longset_rows import lines_to, longbench_row
from tests.support.bench.shared_prefill import Louder
from tests.support.calibrated import tiny
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.bench.checks import Fraud
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure.kept_prompts import NOT_SHARED, KeptPrompts
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record, read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.harness import Harness
from kvtailor.bench.tasks.longcontext import LongContext
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.reasoning import Reasoning
from kvtailor.bench.tasks.speed import Speed
from kvtailor.hf.run.kept_prompt import difference
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.random import Random

TEXT = generated_text(9000)
PLANS = ["snapkv(window=6) @ keep=0.4", "h2o(recent=6) @ keep=0.4", "kvzip(chunk=40) @ keep=0.5", "kivi(recent=32)"]
# What tells of the run and of the way, and not of a plan.
APART = {"run", "started", "machine", "wall_seconds", "prefill", "prefill_own", "prefill_compared"}


def perplexity(**changes) -> Perplexity:
    return Perplexity(**{"text": TEXT, "source": "t", "context": 150, "continuation": 12, "windows": 2} | changes)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return tiny()


def facts(record: Record) -> dict:
    return {name: value for name, value in asdict(record).items() if name not in APART}


def counted(subject: Subject) -> list[int]:
    """Tokens of each forward of the model from now on."""
    lengths: list[int] = []
    forward = type(subject.model).forward

    def count(self, *args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    subject.model.forward = count.__get__(subject.model)
    return lengths


def test_records_are_the_same_and_say_how_their_prompts_were_read(subject: Subject) -> None:
    tasks = [
        perplexity(),
        perplexity(chunk=5, continuation=14, windows=1),
        Fidelity(text=TEXT, source="t", context=150, continuation=8, windows=2),
        Needle(lengths=(300,), depths=(0.5,), documents=2, question_outside=True),
    ]
    plans = contestants_of([*PLANS, "reference"])
    shared = run(subject, plans, tasks, bandwidth=False)
    own = run(subject, plans, tasks, bandwidth=False, share=False)
    assert [facts(record) for record in shared] == [facts(record) for record in own]
    assert {record.prefill for record in shared if record.label != "reference"} == {"shared"}
    alone = [record for record in shared if record.label == "reference"]
    assert {record.prefill_own for record in alone} == {"reference reads a prompt in a way of its own"}
    assert {(record.prefill, record.prefill_own) for record in own} == {("own", NOT_SHARED)}
    # Of each kind of pass one plan, once in the run.
    assert [record.label for record in shared if record.prefill_compared] == PLANS[:2]


def test_long_documents_and_chains_are_the_same(subject: Subject, tmp_path: Path) -> None:
    rows = [longbench_row(f"{generated_text(300, state=i)}", ["a"], _id=f"n{i}") for i in range(2)]
    lines_to(tmp_path / "longbench" / "passage_retrieval_en.jsonl", rows)
    tasks = [
        LongContext(benchmark="longbench", subset="passage_retrieval_en", data=tmp_path),
        Reasoning(counts=(2,), prompt=200, chains=1, every=40),
    ]
    plans = contestants_of(PLANS[:1])
    shared, own = (run(subject, plans, tasks, bandwidth=False, share=share) for share in (True, False))
    assert [facts(record) for record in shared] == [facts(record) for record in own]
    assert {record.prefill for record in shared if record.error is None} == {"shared"}


@pytest.mark.usefixtures("few_harness_tasks")
def test_likelihoods_of_the_harness_are_the_same_and_its_answers_are_its_own(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'kvtailor[harness]'")
    demo = Subject.load("demo", dtype="float32")
    data = folder(tmp_path, random.Random(0))
    tasks = [Harness(task="arc_easy", data=data, limit=2), Harness(task="gsm8k", data=data, limit=1, fewshot=0)]
    plans = contestants_of(["snapkv @ keep=0.3"])
    shared, own = (run(demo, plans, tasks, bandwidth=False, share=share) for share in (True, False))
    assert [facts(record) for record in shared] == [facts(record) for record in own]
    assert [record.prefill for record in shared] == ["shared", "shared", "own", "own"]
    assert "generate()" in str(shared[-1].prefill_own)


def test_a_prompt_goes_through_the_model_once(subject: Subject) -> None:
    lengths = counted(subject)
    try:
        run(subject, contestants_of(PLANS[:1] + PLANS[3:]), [perplexity()], bandwidth=False)
    finally:
        del subject.model.forward
    prompts = lengths.count(150)
    # Two windows and the first for plans at their whole budget, each once; the model's own cache reads them, too; one
    # is read both ways, and the null plan once more in pieces.
    assert prompts == 2 + 2 + 1, lengths


def test_what_has_no_room_is_read_by_each_plan(subject: Subject) -> None:
    room = replace(subject, kept=KeptPrompts(most=200 << 10))
    records = run(room, contestants_of(PLANS[:1]), [perplexity(windows=3)], bandwidth=False)
    expected = run(subject, contestants_of(PLANS[:1]), [perplexity(windows=3)], bandwidth=False, share=False)
    assert [facts(record) for record in records] == [facts(record) for record in expected]
    assert "kept prompts may take 0 MiB" in str(records[-1].prefill_own)
    assert room.kept.forwards == 1 and room.kept.bytes == 0 < room.kept.peak <= 200 << 10


def test_what_is_timed_reads_its_own_prompt(subject: Subject) -> None:
    speed = Speed(text=TEXT, source="t", context=100, tokens=3, rounds=1, warmup=0)
    lasting = replace(subject, kept=KeptPrompts(lasting=True))
    run(lasting, contestants_of(PLANS[:1]), [perplexity()], bandwidth=False)
    assert lasting.kept.bytes
    lengths = counted(subject)
    try:
        records = run(lasting, contestants_of(PLANS[:1]), [speed], bandwidth=False)
    finally:
        del subject.model.forward
    assert lengths.count(100) >= len(records) and not lasting.kept.bytes


def test_records_of_before_stand_for_shared_ones(subject: Subject, tmp_path: Path) -> None:
    """A resumed run takes them as they are; a line without the fields is read."""
    given = {"out": tmp_path, "bandwidth": False}
    run(subject, contestants_of(PLANS[:1]), [perplexity()], share=False, **given)
    [file] = tmp_path.glob("*.jsonl")
    first = Record.from_json(file.read_text().splitlines()[0])
    old = {name: value for name, value in asdict(first).items() if not name.startswith("prefill")}
    assert Record(**old).prefill is None and Record(**old).key == first.key
    shared = run(subject, contestants_of(PLANS[:2]), [perplexity()], **given)
    assert len(read_records(tmp_path)) >= len(shared) == 3
    assert {record.key for record in shared} == {
        record.key for record in run(subject, contestants_of(PLANS[:2]), [perplexity()], share=False, bandwidth=False)
    }


def test_prompts_of_earlier_samples_make_room_for_later_ones() -> None:
    model = build("llama")
    plan = Plan.parse(PLANS[0])
    kept = KeptPrompts(most=300 << 10, lasting=True)

    def fill(state: int) -> bool:
        ids, _ = prompts((150,), state=state)
        return kept.filled(model, ids, kvtailor.cache_for(model, plan), last_only=True) is not None

    with torch.inference_mode():
        kept.begin([plan])
        assert fill(1) and fill(1) and kept.forwards == 1
        while fill(kept.forwards + 1):
            pass
        first = kept.forwards
        assert fill(1) and kept.forwards == first, "a prompt of the present sample never goes"
        kept.begin([plan])
        assert fill(100) and kept.forwards == first + 1 and kept.bytes <= 300 << 10


def test_plans_whose_evidence_cannot_be_one_get_a_prompt_each() -> None:
    model = build("llama")
    ids, _ = prompts((150,))
    plans = [Plan.parse(f"expected(sinks={skip}) @ tokens=40") for skip in (2, 5, 2)]
    kept = KeptPrompts()
    kept.begin(plans)
    with torch.inference_mode():
        for plan in plans:
            assert kept.filled(model, ids, kvtailor.cache_for(model, plan), last_only=True) is not None
    assert kept.forwards == 2


def test_one_forward_gathers_for_plans_that_later_samples_have() -> None:
    model = build("llama")
    ids, _ = prompts((150,))
    plans = [
        Plan.parse(each)
        for each in ("kivi(recent=32)", PLANS[0], "expected @ tokens=40", "snapkv(window=9) @ keep=0.4")
    ]
    for ahead, forwards in (((), 4), (plans, 1)):
        kept = KeptPrompts(lasting=True)
        kept.gather_for(ahead)
        with torch.inference_mode():
            for plan in plans:
                kept.begin([plan])
                cache = kvtailor.cache_for(model, plan)
                assert kept.filled(model, ids, cache, last_only=True) is not None
                own = kvtailor.cache_for(model, plan)
                model(ids, **hand_cache(own), logits_to_keep=1)
                assert difference(cache, own) is None
                kept.end()
        assert kept.forwards == forwards


def test_the_model_has_its_own_attention_while_prompts_are_kept() -> None:
    model = build("llama")
    ids, _ = prompts((80,))
    kept, plan = KeptPrompts(), Plan.parse(PLANS[0])
    kept.begin([plan])
    with torch.inference_mode():
        cache = kvtailor.cache_for(model, plan)
        kept.filled(model, ids, cache, last_only=True)
    del cache
    assert kept.bytes and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("place", ["fill", "keep"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, None])
def test_a_device_whose_memory_ends_is_given_back_what_was_kept(
    error: type[Exception] | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    ids, _ = prompts((80,))
    kept, plan = KeptPrompts(), Plan.parse(PLANS[0])

    def full(*args: object, **options: object) -> None:
        if error is None:
            torch.empty(10**16)
        else:
            raise error("no memory")

    monkeypatch.setattr(f"kvtailor.bench.measure.kept_prompts.{place}", full)
    cache = kvtailor.cache_for(model, plan)
    assert kept.filled(model, ids, cache, last_only=True) is None and not kept.bytes
    assert "memory" in kept.told(plan)["prefill_own"] and cache.seen == 0


def test_a_plan_that_fails_says_what_it_says_alone() -> None:
    model = build("llama")
    ids, _ = prompts((80,))
    plan = Plan.parse("snapkv(window=6) + device(device_bytes=1024) @ tokens=30")
    kept = KeptPrompts()
    kept.begin([plan])
    sentences = []
    for way in (lambda cache: kept.filled(model, ids, cache, last_only=True), lambda cache: model(ids, cache=cache)):
        with pytest.raises(kvtailor.errors.TierError) as caught, torch.inference_mode():
            way(kvtailor.cache_for(model, plan))
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    other = Plan.parse(PLANS[0])
    with torch.inference_mode():
        assert kept.filled(model, ids, kvtailor.cache_for(model, other), last_only=True) is not None
    assert kept.forwards == 1, "what was kept serves the next plan"


def test_a_model_that_is_not_the_same_twice_is_not_shared() -> None:
    model = build("llama")
    draw = torch.Generator().manual_seed(0)
    model.model.embed_tokens.register_forward_hook(
        lambda module, given, found: found + 0.01 * torch.randn(found.shape, generator=draw)
    )
    ids, _ = prompts((80,))
    kept, plan = KeptPrompts(), Plan.parse(PLANS[0])
    kept.begin([plan])
    with torch.inference_mode():
        cache = kvtailor.cache_for(model, plan)
        assert kept.filled(model, ids, cache, last_only=True) is None and cache.seen == 0
    told = kept.told(plan)
    assert told == {
        "prefill": "own",
        "prefill_own": "this model does not give the same numbers for a prompt twice",
        "prefill_compared": False,
    }


def test_a_plan_that_is_not_the_same_twice_is_told_of_and_no_other() -> None:
    """Its own doing, and not the model's: the others share the prompt as before."""
    model, (ids, _) = build("llama"), prompts((80,))
    at_random, other = Plan.parse("random @ tokens=30"), Plan.parse(PLANS[0])
    kept = KeptPrompts()
    kept.begin([at_random, other])
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.setattr(Random, "score", lambda self, held: torch.rand(held.positions.shape))
        for _ in range(2):
            assert kept.filled(model, ids, kvtailor.cache_for(model, at_random), last_only=True) is not None
        assert kept.filled(model, ids, kvtailor.cache_for(model, other), last_only=True) is not None
    [said] = kept.notes_on(at_random)
    assert "each time" in said and kept.told(at_random)["prefill_compared"] is False
    assert not kept.notes_on(other) and kept.told(other) == {
        "prefill": "shared",
        "prefill_own": None,
        "prefill_compared": True,
    }


def test_an_attention_that_is_not_what_it_says_is_a_fraud() -> None:
    with pytest.raises(Fraud, match="shared prefill: a cache of .* differs .* --share off"):
        FRAUDS["shared prefill"](True)
    assert Louder().shared_pass() is not None


def test_prompts_of_a_model_whose_weights_have_changed_are_not_used() -> None:
    lasting = replace(tiny(state=3), kept=KeptPrompts(lasting=True))
    given = contestants_of(PLANS[:1]), [perplexity()]
    run(lasting, *given, bandwidth=False)
    forwards = lasting.kept.forwards
    run(lasting, *given, bandwidth=False)
    assert lasting.kept.forwards == forwards, "they last from one run to the next"
    with torch.no_grad():
        lasting.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    changed = run(lasting, *given, bandwidth=False)
    assert lasting.kept.forwards > forwards
    own = run(replace(lasting, kept=None), *given, bandwidth=False, share=False)
    assert [facts(record) for record in changed] == [facts(record) for record in own]
