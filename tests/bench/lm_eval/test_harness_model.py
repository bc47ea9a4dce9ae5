"""`kvtailor` in the lm-evaluation-harness: its own `hf` judges the full plan, `session.score` the others."""

import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'kvtailor[harness]'")

from lm_eval import evaluate
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tests.support.bench.harness_fixtures import folder, rolling_task, words

import kvtailor
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.lm_eval import harness
from kvtailor.bench.lm_eval.model import HarnessModel
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError, PlanError
from kvtailor.hf.model.config import source_of
from kvtailor.hf.versions import hand_cache

pytestmark = pytest.mark.usefixtures("few_harness_tasks")
STATE = random.Random()
PLANS = (
    "snapkv @ keep=0.25",
    "h2o @ tokens=40",
    "streaming @ keep=0.5",
    "kivi(bits=2, recent=32)",
    "snapkv(window=9) + adakv @ tokens=33",
)


# Two of the plans in the default run; the others are long.
FEW = [plan if i < 2 else pytest.param(plan, marks=pytest.mark.long) for i, plan in enumerate(PLANS)]


@pytest.fixture(scope="module")
def subject():
    return Subject.load("demo", dtype="float64")


@pytest.fixture(scope="module")
def hf():
    return HFLM(pretrained=source_of("demo"), device="cpu", dtype="float64", max_length=200)


def model(subject, plan="reference", **settings):
    """`reference` is the full plan whose attention computes in float64: what differs from `hf` is wrong."""
    return HarnessModel(subject, plan, max_length=200, **settings)


def ask(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


def answers_are_equal(ours, theirs):
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("data"), STATE)


@pytest.mark.parametrize(
    ("task", "metrics", "fewshot"),
    [
        ("arc_easy", {"acc,none", "acc_norm,none"}, None),
        pytest.param("lambada_openai", {"perplexity,none", "acc,none"}, None, marks=pytest.mark.long),
        pytest.param("gsm8k", {"exact_match,strict-match", "exact_match,flexible-extract"}, 2, marks=pytest.mark.long),
        pytest.param("mmlu_virology", {"acc,none"}, 2, marks=pytest.mark.long),
        ("pages", {"word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"}, None),
    ],
)
def test_the_full_plan_gives_the_numbers_of_hf(task, metrics, fewshot, subject, hf, data, tmp_path, monkeypatch):
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    local = {} if task == "pages" else {"data": data, "into": tmp_path, "fewshot": fewshot}
    loaded, _ = harness.load_tasks(str(rolling_task(tmp_path, STATE, 320)) if task == "pages" else task, **local)
    found = []
    for each in (hf, model(subject)):
        for one in loaded["tasks"].values():
            one.set_fewshot_seed(7)
            if task == "gsm8k":
                one.set_config("generation_kwargs", {"max_gen_toks": 6}, update=True)
        results = evaluate(each, dict(loaded), bootstrap_iters=0)
        [rows] = results["samples"].values()
        found.append((results["results"][task], [row["resps"] for row in rows]))
    (theirs, their_answers), (ours, our_answers) = found
    assert metrics <= set(ours)
    for name in metrics:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=0), name
        assert task == "gsm8k" or math.isfinite(ours[name])
    flat = [[answer for row in rows for each in row for answer in each] for rows in (our_answers, their_answers)]
    if task == "gsm8k":
        assert flat[0] == flat[1] and any(flat[0])
    elif task == "pages":
        assert flat[0] == pytest.approx(flat[1], rel=1e-5, abs=1e-5)
    else:
        answers_are_equal(*flat)


def test_edges_are_those_of_hf(subject, hf):
    """Contexts that are empty, end in spaces or are cut, and texts that start with the prefix."""
    long = words(STATE, 201)
    start = hf.tokenizer.decode([hf.prefix_token_id])
    pairs = ask(
        "loglikelihood",
        ("", words(STATE, 3)),
        ("", start + "one two"),
        (words(STATE, 4) + "  ", "x y"),
        (long, " and so on"),
        (long + "?", " no"),
        (start + words(STATE, 4), " yes"),
        ("a", " " + words(STATE, 20)),
    )
    answers_are_equal(model(subject).loglikelihood(pairs, True), hf.loglikelihood(pairs, True))
    ours = model(subject)
    ours.loglikelihood(pairs, True)
    assert ours.held.truncated == 2


def test_greedy_means_every_token(subject, hf):
    ids = hf.tok_encode(words(STATE, 30))

    def best(after):
        return int(hf.model(torch.tensor([after])).logits[0, -1].argmax())

    first = best(ids)
    other = (first + 1) % 100
    pairs = [[first, best([*ids, first])], [other, best([*ids, other])], [first, other]]
    asked = [(("context", str(pair)), ids, pair) for pair in pairs]
    found = model(subject)._loglikelihood_tokens(asked, True)
    assert [greedy for _, greedy in found] == [True, False, other == pairs[0][1]]
    answers_are_equal(found, hf._loglikelihood_tokens(asked, True))


@pytest.mark.parametrize("plan", FEW)
def test_continuations_are_scored_on_the_compressed_cache(plan, subject):
    """By `session.score`, each after a prefill of its own; here they share one."""
    context = words(STATE, 130)
    # `apple` has two tokens, of which the second is all but certain under every plan.
    drawn = [words(STATE, n).replace("apple", "stone") for n in (1, 4, 2, 6)]
    continuations = [*(f" {each}" for each in drawn), " a", " b"]
    ours = model(subject, plan)
    found = ours.loglikelihood(ask("loglikelihood", *((context, each) for each in continuations)), True)
    full = model(subject).loglikelihood(ask("loglikelihood", *((context, each) for each in continuations)), True)
    with kvtailor.session(subject.model, plan) as session:
        for (value, greedy), (whole, _), continuation in zip(found, full, continuations, strict=True):
            head, tail = ours._encode_pair(context, continuation)
            scores = session.score(torch.tensor([head]), torch.tensor([tail]))
            # `score` takes logarithms in float32: each rounds to about a millionth, however near to 0 it is.
            assert value == pytest.approx(float(scores.double().sum()), rel=1e-5, abs=1e-5 * len(tail))
            assert (abs(value - whole) > 1e-4) is (len(tail) > 1)
            assert isinstance(greedy, bool)
    assert (ours.held.contexts, ours.held.compressed, ours.held.read) == (1, 1, 1)
    assert ours.held.scored == sum(len(ours._encode_pair(context, each)[1]) for each in continuations)
    assert ours.held.heaviest["tokens_seen"] == len(ours.tok_encode(context))


@pytest.mark.parametrize("plan", [*PLANS[:1], *(pytest.param(plan, marks=pytest.mark.long) for plan in PLANS[1:])])
def test_the_order_of_continuations_changes_nothing(plan, subject):
    context = words(STATE, 120)
    pairs = [(context, " " + words(STATE, n)) for n in (3, 5, 2)]
    forward = model(subject, plan).loglikelihood(ask("loglikelihood", *pairs), True)
    backward = model(subject, plan).loglikelihood(ask("loglikelihood", *pairs[::-1]), True)
    alone = [model(subject, plan).loglikelihood(ask("loglikelihood", pair), True)[0] for pair in pairs]
    assert forward == backward[::-1] == alone


def test_tokens_held_back_are_fed_on_the_compressed_cache(subject):
    context = words(STATE, 66)
    pair = ask("loglikelihood", (context, " a"))
    inside, late = model(subject, PLANS[0]), model(subject, PLANS[0], outside=1)
    [(first, _)], [(held_back, _)] = inside.loglikelihood(pair, True), late.loglikelihood(pair, True)
    [(full, _)] = model(subject, outside=3).loglikelihood(pair, True)
    assert first == pytest.approx(full, rel=1e-5, abs=1e-5) and abs(held_back - full) > 1e-6
    assert (inside.held.read, late.held.read) == (0, 1)
    head, tail = late._encode_pair(context, " a")
    with kvtailor.session(subject.model, PLANS[0]) as session:
        scores = session.score(torch.tensor([head[:-1]]), torch.tensor([head[-1:] + tail]))
    assert held_back == pytest.approx(float(scores[0, -1]), rel=1e-5, abs=1e-5)


def test_a_window_of_a_text_is_cut_in_the_middle(subject, hf):
    text = words(STATE, 120)
    ids = hf.tok_encode(text)
    [found] = model(subject, PLANS[0]).loglikelihood_rolling(ask("loglikelihood_rolling", (text,)), True)
    [chunked] = model(subject, "h2o @ tokens=40", chunk=3).loglikelihood_rolling(
        ask("loglikelihood_rolling", (text,)), True
    )
    [full] = hf.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)), True)
    assert len(ids) < 200 and abs(found - full) > 1e-3 and abs(chunked - full) > 1e-3
    fed = torch.tensor([[hf.prefix_token_id, *ids[:-1]]])
    half = (fed.shape[1] + 1) // 2
    cache = kvtailor.cache_for(subject.model, PLANS[0])
    with torch.inference_mode():
        logits = [subject.model(piece, **hand_cache(cache)).logits for piece in (fed[:, :half], fed[:, half:])]
    scores = torch.cat(logits, 1).log_softmax(-1)[0].gather(1, torch.tensor(ids)[:, None])
    assert found == pytest.approx(float(scores.sum()), rel=1e-5, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("plan", ("reference", *FEW[:3]))
def test_text_is_generated_from_the_compressed_cache_in_any_batch(plan, subject):
    prompts = [words(STATE, n) for n in (70, 44, 61)]
    requests = ask("generate_until", *((each, {"until": ["\n\n"], "max_gen_toks": 6}) for each in prompts))
    ours = model(subject, plan)
    one_by_one = ours.generate_until(requests, True)
    assert model(subject, plan, batch_size=3).generate_until(requests, True) == one_by_one
    for prompt, text in zip(prompts, one_by_one, strict=True):
        inputs = subject.tokenizer(prompt, return_tensors="pt")
        cache = kvtailor.cache_for(subject.model, plan)
        made = subject.model.generate(**inputs, **hand_cache(cache), max_new_tokens=6, do_sample=False)
        whole = subject.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == whole.split("\n\n")[0]
    assert ours.held.compressed == ours.held.read == (0 if plan == "reference" else 3)


def test_prompts_that_are_too_long_lose_their_beginning_as_in_hf(subject, hf):
    requests = ask("generate_until", (words(STATE, 199), {"until": ["\n"], "max_gen_toks": 5}))
    ours = model(subject)
    assert ours.generate_until(requests, True) == hf.generate_until(requests, True)
    assert ours.held.truncated == 1 and ours.held.heaviest["tokens_seen"] == 195


@pytest.mark.parametrize(
    ("line", "plan"),
    [
        ("plan=snapkv @ keep=0.25", "snapkv @ keep=0.25"),
        ("plan=snapkv(window=16, kernel=5) + adakv @ keep=0.25", "snapkv(window=16, kernel=5) + adakv @ keep=0.25"),
        ("plan='snapkv(window=16) @ keep=0.25, slack=64'", "snapkv(window=16) @ keep=0.25, slack=64"),
        ('plan="snapkv @ keep=0.25, slack=64"', "snapkv @ keep=0.25, slack=64"),
    ],
)
def test_plans_survive_the_harness_s_arguments(line, plan, subject):
    given = key_val_to_dict(f"pretrained=demo,{line},batch_size=2")
    assert model(subject, given["plan"]).contestant.hash == Contestant.named(plan).hash
    assert given["pretrained"] == "demo" and given["batch_size"] == 2


def test_a_plan_may_come_from_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(kvtailor.Plan.parse(PLANS[-1]).to_toml())
    assert Contestant.named(str(file)).hash == Contestant.named(PLANS[-1]).hash
    with pytest.raises(KvtailorError, match="absent.toml"):
        Contestant.named(str(tmp_path / "absent.toml"))


def test_wrong_arguments_are_refused(subject):
    with pytest.raises(KvtailorError, match="no argument 'slack'.*needs quotes"):
        HarnessModel(**key_val_to_dict("pretrained=demo,plan=snapkv @ keep=0.25, slack=64"))
    with pytest.raises(KvtailorError, match="no argument 'plans'; did you mean 'plan'"):
        HarnessModel(subject, plans="full")
    with pytest.raises(PlanError):
        model(subject, "snapkv @ keep=2.5")
    with pytest.raises(KvtailorError, match="batch_size='many'.*or auto, which is 1"):
        model(subject, batch_size="many")
    assert model(subject, batch_size="auto:4").batch_size == 1
    with pytest.raises(KvtailorError, match="chunk=0"):
        model(subject, chunk=0)
    with pytest.raises(KvtailorError, match="num_beams=2"):
        model(subject).generate_until(
            ask("generate_until", ("a b", {"until": [], "num_beams": 2, "max_gen_toks": 4})), True
        )
    with pytest.raises(KvtailorError, match="300 tokens"):
        model(subject)._cut([1], [1] * 300)


@pytest.mark.long
def test_the_command_line_is_the_harness_s_own(data, tmp_path, capsys, monkeypatch):
    """With all of its tasks."""
    monkeypatch.undo()
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    before = list(sys.argv)
    arguments = ["--model", "kvtailor", "--tasks", "arc_easy", "--data", str(data), "--device", "cpu"]
    harness.main(
        [*arguments, "--model_args", "pretrained=demo,plan=snapkv @ keep=0.25", "--output_path", str(tmp_path)]
    )
    shown = capsys.readouterr().out
    assert "kvtailor ({'pretrained': 'demo', 'plan': 'snapkv @ keep=0.25'})" in shown and "acc_norm" in shown
    [written] = Path(tmp_path).rglob("results_*.json")
    assert '"contexts_compressed": 5' in written.read_text() and '"plan": "snapkv @ keep=0.25"' in written.read_text()
    assert sys.argv == before
    assert get_model("kvtailor") is HarnessModel


def test_what_the_command_lacks_is_said(monkeypatch):
    """accelerate, and the data of a task that is not on this disk."""

    def offline():
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", offline)
    with pytest.raises(KvtailorError, match="could not read what it needs .*ai2_arc.*give --data FOLDER"):
        harness.main(["--model", "kvtailor", "--tasks", "arc_easy"])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "accelerate" else found(name))
    with pytest.raises(KvtailorError, match="by accelerate, and that is not installed here: pip install"):
        harness.main(["--model", "kvtailor", "--tasks", "arc_easy"])
