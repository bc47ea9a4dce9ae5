"""The bench, the harness and the command line under a plan that reads its context twice."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from tests.bench.measure.test_flops import counted, tiny
from tests.support.seam import zoo

import kvtailor
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.synthetic.documents import make_document
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure.flops import Weights, count, prefill_flops, repetition_flops
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.longcontext import generate
from kvtailor.bench.tasks.needle import Needle, answer_document
from kvtailor.bench.tasks.perplexity import Perplexity, score_window
from kvtailor.bench.tasks.speed import Speed
from kvtailor.cli.run import command
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.run.prefill import instruction_of
from kvtailor.hf.versions import hand_cache

PLAN = "kvzip @ keep=0.3"
TEXT = generated_text(6000)


@pytest.fixture(scope="module")
def demo() -> Subject:
    return Subject.load("demo", dtype="float32")


def test_every_task_reads_a_context_twice_by_itself(demo: Subject) -> None:
    sizes = {"text": TEXT, "source": "t", "context": 100}
    tasks = [
        Perplexity(**sizes, continuation=8, windows=2),
        Fidelity(**sizes, continuation=8, windows=2),
        Needle(lengths=(300,), depths=(0.5,), documents=1, question_outside=True),
        Needle(lengths=(300,), depths=(0.5,), documents=1),
        Speed(**sizes, tokens=3, rounds=1, warmup=0),
    ]
    records = run(demo, contestants_of([PLAN, "kvzip_pooled @ keep=0.3"]), tasks, bandwidth=False)
    for record in records:
        assert record.error is None and not any("could not be tried" in note for note in record.notes), record
        if "kvzip" in record.label and record.task != "speed":
            assert record.tokens_held == pytest.approx(0.3 * record.tokens_seen, abs=1)
    by_task = {(record.task, record.label): record for record in records}
    assert by_task["fidelity", PLAN].metrics["kl"] > 0
    work = by_task["speed", PLAN].metrics
    assert work["flops_method_prefill"] > 0.5 * work["flops_prefill"] and work["flops_method_token"] == 0


@torch.inference_mode()
def test_what_is_scored_is_what_a_prefill_leaves(demo: Subject) -> None:
    ids = demo.tokens(TEXT).ids
    contestant = Contestant.of(PLAN)
    context, targets, question = ids[:90], ids[90:100], ids[90:95]

    def prefilled():
        return kvtailor.prefill(demo.model, context[None], plan=PLAN, tokenizer=demo.tokenizer)

    with kvtailor.session(demo.model, PLAN, tokenizer=demo.tokenizer) as s:
        expected = s.score(context[None], targets[None])[0]
    assert torch.allclose(score_window(demo, contestant, context, targets)[0], expected)
    cache = prefilled()
    logits = [demo.model(piece[None], **hand_cache(cache)).logits[:, -1] for piece in (question, targets[5:6])]
    nats = -sum(row.log_softmax(-1)[0, token] for row, token in zip(logits, targets[5:7], strict=True)) / 2
    found = answer_document(demo, contestant, context, question, targets[5:7], question_outside=True)
    assert found.nll == pytest.approx(float(nats), rel=1e-4)
    full = demo.model(context[None], **hand_cache(kvtailor.cache_for(demo.model, "full"))).logits[0, -1]
    made, weight = generate(demo, contestant, context, most=3)
    cache, expected = prefilled(), [int(full.argmax())]
    while len(expected) < 3:
        expected.append(int(demo.model(torch.tensor([expected[-1:]]), **hand_cache(cache)).logits.argmax()))
    assert made == expected and weight["tokens_seen"] == 90 and weight["tokens_held"] == pytest.approx(27, abs=0.5)


def test_the_question_is_outside_of_what_is_compressed(demo: Subject) -> None:
    """What is held of a document does not depend on what will be asked of it."""
    document = make_document("needle", state=3, length=300, depth=0.5, count_tokens=demo.count)
    context, held = demo.prompt(document.context), []
    for question in (document.question, "And who was it?"):
        found = answer_document(
            demo, Contestant.of(PLAN), context, demo.prompt(question), torch.tensor([5]), question_outside=True
        )
        held.append(found.weight)
    assert held[0] == held[1] and held[0]["tokens_seen"] == context.numel()


def test_the_harness_answers_from_a_context_that_was_read_twice(demo: Subject) -> None:
    pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'kvtailor[harness]'")
    from lm_eval.api.instance import Instance

    from kvtailor.bench.lm_eval.model import HarnessModel

    def ask(kind, *arguments):
        return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]

    model = HarnessModel(demo, PLAN, max_length=300, batch_size=2)
    context, continuations = TEXT[:400], (" the old house", " a silver spoon")
    pairs = ask("loglikelihood", *((context, each) for each in continuations))
    found = model.loglikelihood(pairs, True)
    requests = ask("generate_until", *((TEXT[:n], {"until": ["\n\n"], "max_gen_toks": 6}) for n in (400, 250)))
    texts = model.generate_until(requests, True)
    assert len(model.loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT[:500],)), True)) == 1
    assert model.held.compressed == model.held.contexts == 3
    with kvtailor.session(demo.model, PLAN, tokenizer=demo.tokenizer) as s:
        for (value, _), continuation in zip(found, continuations, strict=True):
            head, tail = model._encode_pair(context, continuation)
            assert value == pytest.approx(float(s.score(torch.tensor([head]), torch.tensor([tail])).sum()), rel=1e-4)
        for text, size in zip(texts, (400, 250), strict=True):
            inputs = demo.tokenizer(TEXT[:size], return_tensors="pt", return_token_type_ids=False)
            made = s.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            assert text == demo.tokenizer.decode(made, skip_special_tokens=True).split("\n\n")[0]


def test_run_reads_a_prompt_twice_by_itself() -> None:
    result = CliRunner().invoke(
        command, ["--plan", "kvzip @ tokens=40", "--prompt", TEXT[:600], "--max-new-tokens", "4", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    # All of the prompt but its last token is compressed; that one and three new ones are held in full.
    assert found["tokens_held"] == 40 + 4 and found["tokens_seen"] == found["prompt_tokens"] + 3
    one = CliRunner().invoke(command, ["--plan", PLAN, "--prompt", "a", "--max-new-tokens", "2", "--json"])
    assert json.loads(one.stdout.splitlines()[-1])["new_tokens"] == 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_torch_counts_the_same_passes(family: str) -> None:
    """Torch counts every pair of the attention, where the formula counts the causal half of the new tokens."""
    model = zoo.build(family, attention="eager")
    weights, geometry = Weights.of(model), Geometry.of(model.config)
    cache = kvtailor.cache_for(zoo.build(family), "kvzip(chunk=10, lead=3, sinks=2) @ keep=0.5")
    n, rows = 17, 3
    ids = torch.randint(97, (rows, n))
    total = looked_at = 0
    # Two pieces: 9 tokens, and 8 after a lead of 3 that share the softmax with two sinks.
    for new, known in ((9, 9), (11, 10)):
        own = counted(model, ids)[1]
        found, _ = counted(model, ids[:, :1].expand(-1, new), own)
        square = 2 * geometry.q_heads * geometry.head_dim * rows * new**2
        if family == "llama":
            total += found - geometry.layers * square
        else:
            # Eager attention multiplies what a window hides.
            seen = replace(geometry, shapes=tuple(replace(shape, window=None) for shape in geometry.shapes))
            total += prefill_flops(weights, seen, rows=rows, tokens=n + new) - prefill_flops(
                weights, seen, rows=rows, tokens=n
            )
            total += rows * 2 * weights.head
            hidden = (n + new - 16) ** 2 - (n - 16) ** 2
            total -= rows * 2 * geometry.q_heads * geometry.head_dim * 2 * hidden
        looked_at += (2 * new * known + new**2) // 2
    looked_at *= rows * len(geometry.compressed) * geometry.q_heads * (2 * geometry.head_dim + 4)
    assert repetition_flops(weights, geometry, cache, None, rows=rows, tokens=n) == total + looked_at
    for plan in ("full", "snapkv(window=4) @ tokens=8"):
        once = kvtailor.cache_for(zoo.build(family), plan)
        assert repetition_flops(weights, geometry, once, None, rows=rows, tokens=n) == 0


def test_the_instruction_has_its_price(demo: Subject) -> None:
    model = tiny()
    ids = torch.randint(97, (1, 20))
    contestant = Contestant.of("kvzip @ keep=0.5")
    silent, told = (
        count(Subject(name="tiny", model=model, tokenizer=tokenizer), contestant, ids, 2)
        for tokenizer in (None, lambda text, **_: {"input_ids": [5] * 7})
    )
    assert silent.prefill == told.prefill and silent.method_prefill < told.method_prefill
    assert instruction_of(demo.tokenizer).numel() > 5
