"""Which plans are safe on a model: harm is found and its cause named, with a bias, without one, and where there is
none."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.bench.checks import Fraud
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.forks import one_thread
from kvtailor.bench.measure import machine
from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.report import summarise
from kvtailor.bench.report.verdict.verdict import judge
from kvtailor.bench.runner import contestants_of
from kvtailor.bench.safety import check as check_module
from kvtailor.bench.safety.page import PAGE, page, parted
from kvtailor.bench.safety.plans import candidates_of
from kvtailor.bench.schema import read_records
from kvtailor.bench.subject import Subject
from kvtailor.cli import main
from kvtailor.errors import KvtailorError

ROOT = Path(__file__).resolve().parents[3]
KIVI = "kivi(bits=4, recent=32)"
CODES = [KIVI, "vector(bits=4)", "kivi(key_bits=8, value_bits=4, recent=32)"]
SHORT = {"context": 96, "margin": 0.05}


def demo_with(*, scale: float = 1.0, bias: float = 0.0) -> tuple[Any, Any]:
    """The embedded model with the same answers, and keys that are hard to code.

    Args:
        scale: the keys of one pair of channels are so many times as large, and its queries so many times smaller.
        bias: so many times what keys differ by is added to the pair that the rotary embedding turns least. Over a few
            hundred tokens it is nearly the same in all logits, which a softmax takes no notice of.
    """
    model, tokenizer = kvtailor.load_model("demo", dtype=torch.float32)
    config = copy.deepcopy(model.config)
    config.attention_bias = True
    biased = type(model)(config).eval()
    left = biased.load_state_dict(model.state_dict(), strict=False)
    assert not left.unexpected_keys
    size = config.head_dim
    for layer in biased.model.layers:
        attention = layer.self_attn
        for each in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            each.bias.data.zero_()
        pair = [size // 4, size // 4 + size // 2]
        for head in range(config.num_key_value_heads):
            rows = [head * size + channel for channel in pair]
            attention.k_proj.weight.data[rows] *= scale
            spread = (attention.k_proj.weight * layer.input_layernorm.weight).detach()[head * size : (head + 1) * size]
            attention.k_proj.bias.data[head * size + size - 1] = bias * float(spread.square().sum().sqrt())
        for head in range(config.num_attention_heads):
            attention.q_proj.weight.data[[head * size + channel for channel in pair]] /= scale
    return biased, tokenizer


@pytest.fixture(scope="module")
def plain() -> Any:
    return kvtailor.check_model("demo", plans=[*CODES, "streaming @ keep=0.25", "kivi4"], **SHORT)


@pytest.mark.together
def test_there_is_no_alarm_without_a_need(plain: Any) -> None:
    eight = plain.verdict("kivi(key_bits=8, value_bits=4, recent=32)")
    assert eight.word == "safe" and eight.windows == 16 and 0.3 < eight.bytes < 0.5
    assert not any("bias" in fact or "mean key" in fact or "channel" in fact for fact in plain.facts)
    assert plain.take["about half"] == eight and plain.take["an eighth"] is None
    assert all(each.cause is None for each in plain.verdicts if each.plan in CODES)


@pytest.mark.together
def test_the_words_are_those_of_the_intervals(plain: Any) -> None:
    for each in plain.verdicts:
        if each.plan == "kivi4":
            continue
        assert each.loss is not None and each.loss.low is not None and each.loss.high is not None
        if each.word == "safe":
            assert each.loss.high <= plain.margin
        elif each.word == "not shown":
            assert each.loss.low <= plain.margin < each.loss.high
        else:
            assert each.loss.low > plain.margin or (each.inside is not None and each.inside.lost)
        assert each.word in each.sentence and each.plan in each.sentence


@pytest.mark.together
def test_a_plan_that_changed_nothing_is_not_called_safe(plain: Any) -> None:
    """The newest 128 tokens of kivi4 are in full precision, and the windows of this file have 96."""
    found = plain.verdict("kivi4")
    assert found.word == "not shown" and found.loss is not None and found.loss.value == 0
    assert found.cause is not None and "--tokens" in found.cause


def test_a_key_bias_is_named_where_it_harms() -> None:
    model, tokenizer = demo_with(bias=60.0)
    found = kvtailor.check_model(model, tokenizer=tokenizer, plans=CODES, **SHORT)
    harmed = found.verdict("vector(bits=4)")
    assert harmed.word == "harmful" and harmed.cause is not None and "key bias" in harmed.cause
    assert "bias" in " ".join(found.facts) and harmed.cause in str(found).replace("\n", " ").replace("      ", "")
    assert found.verdict(KIVI).word != "harmful" and found.verdict(KIVI).cause is None
    assert found.next.count("vector") == 0


def test_harm_without_a_bias_is_found_and_named() -> None:
    model, tokenizer = demo_with(scale=64.0)
    found = kvtailor.check_model(model, tokenizer=tokenizer, plans=CODES, **SHORT)
    harmed = found.verdict("vector(bits=4)")
    assert harmed.word == "harmful" and harmed.cause is not None and "outlier" in harmed.cause
    assert found.verdict(KIVI).word != "harmful"


def test_the_model_of_these_tests_is_the_embedded_one() -> None:
    """Else the two tests above would show what a broken model loses."""
    ids = torch.arange(3, 99)[None]
    own, _ = kvtailor.load_model("demo", dtype=torch.float32)
    with torch.inference_mode():
        expected = own(input_ids=ids).logits.log_softmax(-1)
        for what in ({"scale": 64.0}, {"bias": 60.0}):
            other = demo_with(**what)[0](input_ids=ids).logits.log_softmax(-1)
            assert (other - expected).abs().mean() < 0.15, what


@pytest.mark.together
def test_plans_that_drop_tokens_are_asked(plain: Any) -> None:
    asked = plain.verdict("streaming")
    assert asked.inside is not None and asked.after is not None and asked.inside.count == 5
    assert asked.inside.right <= asked.inside.full
    assert plain.verdict(KIVI).inside is None


def test_a_named_plan_is_asked_though_it_is_harmful_by_then() -> None:
    found = kvtailor.check_model("demo", plans="random @ keep=0.05", context=96, margin=0.0001)
    [verdict] = found.verdicts
    assert verdict.windows == 6 and verdict.loss.low > 0.0001, "harmful on the first windows"
    assert verdict.inside is not None and verdict.after is not None and not found.unanswered


@pytest.mark.together
def test_of_presets_those_are_asked_that_lose_no_more_than_the_margin(plain: Any) -> None:
    loss = plain.verdict("streaming").loss.value
    plans = contestants_of(["streaming @ keep=0.25", "rkv @ keep=0.25"])[1:]
    asked = {by: check_module.worth_asking(plans, plain.records, loss + by) for by in (-1e-6, 1e-6)}
    assert asked == {-1e-6: [], 1e-6: plans[:1]}, "what has no records is not asked either"


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A checkout with changed files reuses nothing.
    monkeypatch.setattr(machine, "_commit", lambda: "0" * 12)
    arguments: dict[str, Any] = {"plans": CODES[:2], "out": tmp_path, **SHORT}

    class Stops(check_module.Silent):
        def finish(self, record: Any) -> None:
            if record.label == CODES[0]:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvtailor.check_model("demo", progress=Stops(), **arguments)
    before = read_records(tmp_path)
    assert [record.label for record in before] == ["full", CODES[0]]
    found = kvtailor.check_model("demo", **arguments)
    runs = {record.label: record.run for record in found.records if record.text.endswith("1 of 2")}
    assert runs["full"] == runs[CODES[0]] == before[0].run != runs[CODES[1]]
    report = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert report.exit_code == 0 and (tmp_path / "report.html").is_file()


@pytest.mark.together
def test_records_are_those_of_the_bench(plain: Any) -> None:
    assert {record.task for record in plain.records} >= {"perplexity"}
    assert all(record.prefill == "shared" for record in plain.records if record.label in CODES)
    summary = summarise(plain.records)
    rows = judge(summary.rows, summary.measures, Margins(nats=plain.margin)).judged
    worse = {each.row.label for each in rows if each.worse}
    assert all(plain.verdict(label).word != "safe" for label in worse)


@pytest.mark.together
def test_a_check_is_held_against_a_bench(plain: Any) -> None:
    spec = importlib.util.spec_from_file_location("check_agrees", ROOT / "benchmarks" / "check_agrees.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    same = script.pairs_of(plain.records, plain.records, plain.margin)
    assert len(same) == len(plain.verdicts) and not any(script.contradicts(*pair) for pair in same)
    worse = [
        dataclasses.replace(each, values={**each.values, "nll": tuple(x + 0.5 for x in each.values["nll"])})
        if each.label in CODES and each.task == "perplexity"
        else each
        for each in plain.records
    ]
    found = script.pairs_of(plain.records, worse, plain.margin)
    assert any(script.contradicts(*pair) for pair in found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"texts": "Too short a text. " * 20}, "enough for"),
        ({"context": 100_000}, "positions"),
        ({"context": 8}, "32 or more"),
        ({"margin": 0.0}, "above 0"),
        ({"texts": "/no/such/file.txt"}, "there is no text file"),
        ({"plans": "snapk @ keep=0.5"}, "snapk"),
        # Also where all plans were harmful in the first windows, which are looked at alone.
        ({"texts": "The same words come again, and again, and once more. " * 2000}, "repeated text"),
    ],
)
def test_bad_inputs_are_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(KvtailorError, match=said):
        kvtailor.check_model("demo", **arguments)


def test_untrained_and_refused_models_are_told() -> None:
    with pytest.raises(KvtailorError, match="random"):
        kvtailor.check_model("random-llama")


def _short_of_ten(model: Any, plan: str) -> Any:
    return kvtailor.cache_for(model, "position(sinks=0) @ tokens=86" if plan == "full" else plan)


def test_a_cache_that_loses_tokens_without_a_plan_ends_a_check() -> None:
    model, tokenizer = kvtailor.load_model("demo", dtype=torch.float32)
    subject = dataclasses.replace(Subject.of(model, tokenizer, "a check"), make_cache=_short_of_ten)
    with pytest.raises(Fraud, match="identity"):
        kvtailor.check_model(subject, plans=KIVI, **SHORT)


def test_a_preset_that_needs_gradients_reads_the_first_windows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graded = "kvgrad @ keep=0.9"
    monkeypatch.setattr(check_module, "candidates_of", lambda subject, _: candidates_of(subject, [graded, KIVI]))
    presets, named = (kvtailor.check_model("demo", plans=plans, **SHORT) for plans in ((), graded))
    assert [presets.verdict(each).windows for each in (graded, KIVI)] == [6, 16]
    assert named.verdict(graded).windows == 16
    said = "and kvgrad @ keep=0.9, which takes longest, as well"
    assert said in " ".join(str(presets).split()) and said not in " ".join(str(named).split())


@pytest.mark.together
def test_what_a_plan_reads_is_probed_in_the_first_windows_alone(plain: Any) -> None:
    first, further = ([r for r in plain.records if r.text.endswith(f"{part} of 2")] for part in (1, 2))
    assert first and further
    assert all(r.reads_held for r in first if r.label not in ("full", "kivi4"))
    assert all(r.rounding is None and r.reads_held is None for r in further)


def test_plans_that_are_scored_side_by_side_are_judged_alike() -> None:
    def checked(workers: int) -> Any:
        return kvtailor.check_model("demo", plans=[*CODES, "streaming @ keep=0.25"], workers=workers, **SHORT)

    with one_thread(2):
        alone, several = checked(1), checked(2)
    assert several.verdicts == alone.verdicts and {r.machine["threads"] for r in several.records} == {1}


def test_the_page_is_in_two_parts_of_whole_passages() -> None:
    first, rest = parted(page(), PAGE)
    assert (len(first.starts), len(rest.starts)) == (3, 5) and first.text in page() and rest.text in page()
    for part in (first, rest):
        assert all(part.text[at - 1] == "\n" and part.text[at] != "\n" for at in part.starts[1:])
    alone, other = parted("word " * 1000, "mine")
    assert alone.starts == other.starts == () and alone.text + other.text == "word " * 1000


def test_the_page_shares_nothing_with_texts_that_judge() -> None:
    words = page().split()
    runs = {tuple(words[i : i + 8]) for i in range(len(words) - 7)}
    others = generated_text(100_000).split()
    assert not any(tuple(others[i : i + 8]) in runs for i in range(len(others) - 7))


def test_the_command_line_says_it(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        main,
        [
            "check",
            f"{CODES[2]}; {CODES[0]}",
            "--model",
            "demo",
            "--measure",
            "--tokens",
            "96",
            "--margin",
            "0.05",
            "--out",
            str(tmp_path),
            "--json",
        ],
    )
    assert found.exit_code == 0, found.output
    lines = found.stdout.strip().splitlines()
    told = json.loads(lines[-1])
    assert {"model", "margin", "facts", "verdicts", "take", "next", "not_measured", "out"} <= set(told)
    verdict, _ = sorted(told["verdicts"], key=lambda each: each["plan"] != CODES[2])
    assert verdict["word"] == "safe" and verdict["plan"] and verdict["sentence"] and verdict["loss"]["high"] <= 0.05
    assert told["take"]["about half"] == verdict["plan"] and told["take"]["an eighth"] is None
    assert all(len(line) <= 80 or line.startswith(("Next:", "All numbers:")) for line in lines[:-1])
    assert "A check of at most" in found.stderr and "about" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--measure"], "without --model"),
        (["check", "full", "--text", "a.txt"], "--text without --measure"),
        (["check"], "Missing argument"),
        (["check", "--model", "demo", "--measure", "--text", "/no/such.txt"], "no such file"),
    ],
)
def test_the_command_line_refuses(arguments: list[str], said: str) -> None:
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code in (1, 2) and said in found.output.replace("\n", " ").lower() or said in found.output


def test_a_forecast_counts_the_readings_of_plans_that_read_a_context_again():
    everyone = contestants_of(["kivi4", "kvzip @ keep=0.25", "kvgrad @ keep=0.25"])
    assert [check_module._readings(each) for each in everyone] == [0, 0, 2, 5]
