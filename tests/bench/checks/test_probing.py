"""What a plan says that it holds is what is read, and all that it keeps: seen by perplexity alone."""

from dataclasses import replace

import pytest
import torch
from tests.support.bench.dummy import FULL, contestant
from tests.support.bench.frauds import record

from kvtailor import cache_for
from kvtailor.bench.checks import Fraud, check_records, findings
from kvtailor.bench.checks.probing import probe, rounding_of
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity, score_window
from kvtailor.calibration.run import calibrate
from kvtailor.calibration_file import shipped
from kvtailor.errors import PlanError
from kvtailor.plan import Plan, registry

TASK = Perplexity(text=generated_text(12_000), source="generated", context=160, continuation=24, windows=3)
LOSSY = "snapkv(window=16) + vector(bits=4, block_size=32) @ keep=0.5"


@pytest.fixture(scope="module")
def half():
    return Subject.load("demo", dtype="bfloat16")


@pytest.fixture(scope="module")
def whole():
    return Subject.load("demo", dtype="float32")


def with_caches(subject, make):
    """The subject with other caches for every plan but 'full'."""

    def made(model, plan):
        cache = cache_for(model, plan)
        return cache if plan == "full" else make(cache)

    return Subject(name="demo", model=subject.model, tokenizer=subject.tokenizer, make_cache=made)


def reading_all(cache):
    """A cache that compresses, and an attention that secretly reads every key and value there was.

    It takes them in blocks of its own, so that its results are those of 'full' but for rounding.
    """

    def secretly(layer):
        whole, append = layer.attend, layer.state.append
        keys, values = [], []

        def heard(new_keys, new_values, **how):
            keys.append(new_keys.clone())
            values.append(new_values.clone())
            append(new_keys, new_values, **how)

        def attend(query, mask, scaling, *module):
            output = whole(query, mask, scaling)
            if len(keys) == 1:
                return output
            k, v = torch.cat(keys, 2), torch.cat(values, 2)
            new, seen = query.shape[2], k.shape[2]
            group = query.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            shown = torch.arange(seen) <= torch.arange(seen - new, seen)[:, None]
            logits = (query.double() @ k.double().mT * scaling).masked_fill(~shown, -torch.inf)
            return (logits.softmax(-1) @ v.double()).to(output.dtype)

        layer.attend, layer.state.append = attend, heard

    for layer in cache.layers:
        secretly(layer)
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_attention_that_reads_all_keys_behind_the_caches_back_is_caught(dtype, half, whole):
    subject = with_caches({"float32": whole, "bfloat16": half}[dtype], reading_all)
    permits = ["untouched cache", "hidden bytes"]
    full, fraud = records = run(subject, [FULL, contestant(LOSSY)], [TASK], bandwidth=False, allow=permits)
    assert full.values["nll"] != fraud.values["nll"], "no fraud of rounding: the bits are those of 'full'"
    assert fraud.reads_held is False
    assert {found.name for found in findings(records)} == {"untouched cache", "hidden bytes"}
    # Neither of the two rests on the other.
    alone = [full, replace(fraud, bytes_alive=None)]
    with pytest.raises(Fraud, match="untouched cache: .*where all that it holds is set to zero"):
        check_records([replace(each, notes=()) for each in alone])
    worst = max(abs(a - b) for a, b in zip(full.values["nll"], fraud.values["nll"], strict=True))
    assert 0 < worst <= fraud.rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_targets_on_an_emptied_cache_condemn_nobody_and_clear_no_fraud(dtype, half, whole, monkeypatch):
    """Where there are more targets than are fed first: what differs clearly by then is told; the rest is fed anew."""
    honest = {"float32": whole, "bfloat16": half}[dtype]
    subject, fed = with_caches(honest, reading_all), []
    forward = Subject.forward

    def counted(self, ids, cache, **how):
        fed.append(ids.shape[1])
        return forward(self, ids, cache, **how)

    monkeypatch.setattr(Subject, "forward", counted)
    task = replace(TASK, continuation=80)
    frauds = [FULL, contestant(LOSSY)]
    sides = [(honest, contestants_of([LOSSY]), True, [31]), (subject, frauds, False, [31, 79])]
    for each, (full, other), reads, emptied in sides:
        window = task.cut(each)[0]
        tokens = window.context, window.targets
        rounding = rounding_of(each, full, *tokens, score_window(each, full, *tokens)[0], None)
        scores = score_window(each, other, *tokens)[0]
        fed.clear()
        assert probe(each, other, *tokens, scores, rounding, None)["reads_held"] is reads
        assert [count for count in fed if count < 160] == emptied


def test_a_codec_that_leaves_its_codes_out_is_caught_without_the_task_memory(whole, monkeypatch):
    prompt = torch.randint(3, 200, (1, 160), generator=torch.Generator().manual_seed(0))
    _, cache = whole.prefill(prompt, whole.new_cache(Contestant.of(LOSSY)))
    [kind] = {type(segment) for state in cache.engine.states for segment in state.stored.segments}
    listed = kind.tensors

    def tensors(segment):
        return {name: each for name, each in listed(segment).items() if each.dtype != torch.uint8}

    def closed_form_bytes(segment):
        return sum(each.numel() * each.element_size() for each in tensors(segment).values())

    honest = run(whole, contestants_of([LOSSY]), [TASK], bandwidth=False)[1]
    monkeypatch.setattr(kind, "tensors", tensors)
    monkeypatch.setattr(kind, "closed_form_bytes", closed_form_bytes)
    _, fraud = run(whole, contestants_of([LOSSY]), [TASK], bandwidth=False, allow=["hidden bytes"])
    with pytest.raises(Fraud, match=r"hidden bytes: plan 'snapkv.*leaves \d+ bytes of tensors alive"):
        check_records([replace(fraud, notes=())])
    assert fraud.bytes_alive == honest.bytes_alive == honest.bytes_held > 1.5 * fraud.bytes_held
    assert fraud.values == honest.values


PLANS = (
    "h2o @ tokens=64",
    "kivi(bits=8)",
    "quest(tokens=64)",
    "palu",
    "minicache4",
    "kvzip @ keep=0.9",
    "disk + fp8",
    "snapkv + adakv @ keep=0.99",
    "vector(bits=8)",
    "asymkv @ keep=0.5",
    "rocketkv",
)


def is_honest(subject, plan, task):
    """A probe says so of the plan, whatever the first one did to tensors that caches share."""
    [full, other] = contestants_of([plan])
    first, *_, window = task.cut(subject)
    plain = score_window(subject, full, first.context, first.targets)[0]
    rounding = rounding_of(subject, full, first.context, first.targets, plain, None)
    scores, weight = score_window(subject, other, window.context, window.targets)
    given = window.context, window.targets, scores, rounding, None
    found = probe(subject, other, *given)
    assert found == probe(subject, other, *given)
    assert torch.equal(score_window(subject, other, window.context, window.targets)[0], scores)
    in_memory = weight["bytes_held"] - weight["bytes_by_tier"].get("disk", 0)
    assert found["reads_held"] is True
    assert in_memory <= found["bytes_alive"] <= in_memory + 2**12


@pytest.mark.parametrize("plan", PLANS)
def test_an_honest_plan_is_not_accused(plan, half):
    is_honest(half, plan, TASK)


def every_plan():
    """Each method, by its examples or alone, with a scorer and a budget where it needs one; and each preset."""
    texts = list(registry.presets())
    for stage in registry.stages():
        for name in registry.methods(stage):
            texts += registry.load(stage, name).examples or (name,)
    for text in texts:
        for whole in (text, f"{text} @ tokens=64", f"snapkv + {text} @ tokens=64"):
            try:
                yield Contestant.of(whole).label
                break
            except PlanError:
                continue


def with_calibrations(plan, subject, folder):
    """The plan, naming a file that is made here for each method whose kind is shipped for no model."""
    changed = Plan.parse(plan)
    for stage, part in changed.parts.items():
        if getattr(part, "wants_calibration", False) and part.calibration is None and not shipped(part.calibrates):
            file = folder / f"{part.calibrates}.safetensors"
            if not file.exists():
                calibrate(
                    subject, part.calibrates, {"another": generated_text(12_000)}, out=file, tokens=1024, context=128
                )
            changed = replace(changed, **{stage: replace(part, file=str(file))})
    return str(changed)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_honest_plan_is_accused(dtype, half, whole, tmp_path):
    subject = {"float32": whole, "bfloat16": half}[dtype]
    task, tried = replace(TASK, context=300), 0
    # Null methods alone are 'full' under another name.
    for plan in (plan for plan in every_plan() if len(contestants_of([plan])) == 2):
        try:
            is_honest(subject, with_calibrations(plan, subject, tmp_path), task)
            tried += 1
        except PlanError as error:
            assert "compress" in str(error) or "the model is on the cpu" in str(error)
    assert tried > 90


def near(values, **fields):
    """Records of 'full' and of a plan that holds a quarter, whose results are `values` apart."""
    common = {"tokens_seen": 100, "bytes_full": 1000, "text_hash": "h"}
    base = (3.0, 3.5, 4.0)
    moved = tuple(a + b for a, b in zip(base, values, strict=True))
    return [
        record("full", "perplexity", values={"nll": base}, tokens_held=100.0, bytes_held=1000, **common),
        record("one", "perplexity", values={"nll": moved}, tokens_held=25.0, bytes_held=250, **common, **fields),
    ]


def test_within_rounding_only_who_was_not_seen_to_read_is_accused():
    apart = (1e-3, -2e-3, 0.0)
    check_records(near(apart))
    check_records(near(apart, rounding=2e-3 + 1e-9, reads_held=True))
    check_records(near(apart, rounding=1.9e-3))
    with pytest.raises(Fraud, match=r"untouched cache: .*by more than rounding does here \(3.0e-03 nats\)"):
        check_records(near(apart, rounding=3e-3))
    with pytest.raises(Fraud, match="untouched cache: .*where all that it holds is set to zero"):
        check_records(near((0.4, 0.1, 0.2), rounding=1e-3, reads_held=False))
    with pytest.raises(Fraud, match="untouched cache: .*no result differs from 'full'"):
        check_records(near((0.0, 0.0, 0.0), rounding=1e-3, reads_held=True))


def test_tensors_that_outlive_the_ledger_are_a_finding_and_what_files_hold_is_none():
    held = {"bytes_held": 100_000, "bytes_full": 400_000}
    check_records([record("one", "perplexity", bytes_alive=105_000, **held)])
    with pytest.raises(Fraud, match="hidden bytes.*100000 bytes in memory.*105200 bytes of tensors"):
        check_records([record("one", "perplexity", bytes_alive=105_200, **held)])
    placed = {"bytes_by_tier": {"device": 40_000, "disk": 60_000}}
    check_records([record("one", "perplexity", bytes_alive=44_000, **held, **placed)])
    with pytest.raises(Fraud, match="hidden bytes.*40000 bytes in memory"):
        check_records([record("one", "perplexity", bytes_alive=45_000, **held, **placed)])


@pytest.mark.parametrize("plan", ["kivi(bits=4)", "snapkv(window=8) @ tokens=40, slack=4"])
def test_bytes_alive_are_of_the_moment_at_which_a_cache_was_weighed(whole, plan):
    """Fed in chunks, a cache is weighed after the targets: by then a codec has encoded a block of its tail."""
    task = Perplexity(
        text=generated_text(30_000), source="generated text", context=128, continuation=16, windows=3, chunk=4
    )
    _, mine = run(whole, contestants_of([plan]), [task], bandwidth=False)
    assert mine.error is None and mine.tokens_seen == 128 + 15 and mine.bytes_held < mine.bytes_full
    assert mine.bytes_alive == pytest.approx(mine.bytes_held, rel=0.02)


def test_notes_of_the_ids_are_nothing_hidden(half):
    """A plan that reads its context twice is shown the ids: 8 bytes a token, which is much beside a sixteenth."""
    task = replace(TASK, context=1600, continuation=24, windows=1)
    _, kept = run(half, contestants_of(["kvzip @ keep=0.03"]), [task], bandwidth=False)
    assert kept.error is None and kept.bytes_alive is not None
    assert kept.bytes_alive < kept.bytes_held + 8 * 1600 - 2**12
