import json
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from kvtailor.cli import bench, demo, run
from kvtailor.cli.run import Streamer

LONG = "The baker of the town found a silver spoon under the old bridge. " * 12


def invoke(command, *words, **options):
    return CliRunner().invoke(command, list(words), **options)


def last(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_run_streams_text_and_ends_with_one_object():
    result = invoke(run.command, "--plan", "snapkv @ tokens=64", "--max-new-tokens", "5", "--json", input=LONG)
    found = last(result)
    assert found["new_tokens"] == 5
    assert result.stdout.startswith(found["text"])
    assert found["tokens_held"] < found["tokens_seen"] == found["prompt_tokens"] + 4
    assert 0 < found["bytes_held"] < found["bytes_full"]
    assert found["ttft_seconds"] > 0 and found["tpot_seconds"] > 0
    assert "tokens" in result.stderr and "% " not in result.stdout


def test_run_full_gives_the_same_text_as_the_model_alone():
    from kvtailor.hf.model.loading import load

    model, tokenizer = load("demo")
    ids = tokenizer(LONG, return_tensors="pt").input_ids
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[
        0, ids.shape[1] :
    ]
    found = last(invoke(run.command, "--prompt", LONG, "--max-new-tokens", "8", "--json"))
    assert found["text"] == tokenizer.decode(alone, skip_special_tokens=True)


def test_sampling_is_the_same_for_the_same_seed():
    words = ["--prompt", LONG, "--max-new-tokens", "6", "--temperature", "1.5", "--json", "--seed"]
    one, same, other = (last(invoke(run.command, *words, seed))["text"] for seed in ("1", "1", "2"))
    assert one == same != other


@pytest.mark.parametrize("words", [["--prompt", ""], ["--prompt", " \n"], []])
def test_an_empty_prompt_is_refused_in_one_sentence(words):
    result = invoke(run.command, *words, input="")
    assert result.exit_code == 2
    assert "The prompt is empty: give --prompt" in result.output


def test_a_prompt_that_is_not_text_is_refused():
    result = invoke(run.command, input=b"\xff\xfe\x00\x81")
    assert result.exit_code == 1 and "not UTF-8" in result.output


def test_two_prompts_are_refused(tmp_path):
    (tmp_path / "p").write_text("text")
    result = invoke(run.command, "--prompt", "a", "--prompt-file", str(tmp_path / "p"))
    assert result.exit_code == 2 and "give one of them" in result.output


def test_a_prompt_longer_than_the_positions_is_refused_and_a_tight_one_is_cut_with_a_word():
    result = invoke(run.command, "--prompt", LONG * 40)
    assert result.exit_code == 1
    assert "the prompt has" in result.output and "made for 4096" in result.output and "Traceback" not in result.output
    from kvtailor.bench.subject import Subject

    subject = Subject.load("demo")
    ids = subject.tokens(LONG * 40)
    tight = ids.text.encode()[: ids.ends[4091]].decode()
    result = invoke(run.command, "--prompt", tight, "--max-new-tokens", "50", "--json")
    assert last(result)["new_tokens"] <= 5
    assert "not for 50" in result.stderr


def test_a_model_that_is_not_there_and_a_bad_plan_are_sentences():
    result = invoke(run.command, "--model", "./nowhere", "--prompt", "x")
    assert result.exit_code == 1 and "there is no folder" in result.output
    for command in (run.command, bench.command):
        result = invoke(command, "--plan", "snapk @ tokens=4", *(["--prompt", "x"] if command is run.command else []))
        assert result.exit_code == 1 and "snapkv" in result.output and "Traceback" not in result.output


def test_bench_ends_with_one_object_and_leaves_records(tmp_path):
    words = [
        "--plans",
        "snapkv @ keep=0.25; streaming @ keep=0.5",
        "--context",
        "200",
        "--continuation",
        "16",
        "--windows",
        "6",
        "--dtype",
        "float32",
    ]
    few = [
        "--documents",
        "1",
        "--depths",
        "0.5",
        "--rounds",
        "3",
        "--new-tokens",
        "4",
        "--tasks",
        "perplexity,needle,speed",
    ]
    result = invoke(bench.command, *words, *few, "--out", str(tmp_path), "--json")
    found = last(result)
    assert [row["label"] for row in found["rows"]][:3] == ["full", "snapkv @ keep=0.25", "streaming @ keep=0.5"]
    full, snap, stream = (row["numbers"] for row in found["rows"][:3])
    assert full["perplexity.nll_over_full"]["value"] == 0 and snap["perplexity.nll_over_full"]["low"] is not None
    assert [each["cache.tokens_held"]["value"] for each in (full, snap, stream)] == [200, 50, 100]
    assert 0.25 <= snap["cache.ratio"]["value"] < 0.6 < full["cache.ratio"]["value"]
    assert "memory.bytes_resident" not in full
    lines = next(tmp_path.glob("records-*.jsonl")).read_text().splitlines()
    assert len(lines) == 3 + 3 + 4
    assert found["headline"] in " ".join(result.stdout.split())


def test_bench_refuses_what_it_does_not_know(tmp_path):
    for words, said in [
        (["--tasks", "perplexity,speeed"], "speeed: give some of perplexity"),
        (["--needles", "many"], "--needles is 'many'"),
        (["--windows", "0"], "x>=1"),
    ]:
        result = invoke(bench.command, *words)
        assert result.exit_code == 2 and said in result.output, result.output


def test_bench_says_that_a_text_cannot_be_read_or_is_short(tmp_path):
    (tmp_path / "short").write_text("Too short to say anything.")
    for path, said in [("missing", "cannot be read"), ("short", "give a longer text")]:
        result = invoke(bench.command, "--text", str(tmp_path / path), "--plans", "full", "--tasks", "perplexity")
        assert result.exit_code == 1 and said in result.output, result.output


def test_a_character_of_several_tokens_is_shown_whole():
    pieces = []
    streamer = Streamer(lambda ids: bytes(ids).decode(errors="replace"), pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))
    for byte in "aé€b".encode():
        streamer.put(torch.tensor([byte]))
    streamer.end()
    assert pieces == ["a", "é", "€", "b"]
    assert len(streamer.times) == 7


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" 48213. Next", True),
        ("48213", True),
        (" 482134", False),
        (" 4821", False),
        ("It is 48213", False),
        (" 48213x", False),
    ],
)
def test_an_answer_is_right_only_exactly(text, right):
    assert demo.is_right(text, " 48213") is right


def test_help_does_not_wait_for_torch():
    code = "import sys; from kvtailor.cli import run, bench, demo; sys.exit(bool({'torch', 'rich'} & set(sys.modules)))"
    import subprocess

    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )


def test_the_positions_left_of_a_model_that_does_not_say_is_unknown():
    assert run._positions_left(SimpleNamespace(positions=None, name="m"), 10**9) is None


@pytest.mark.parametrize("plans", ["", "  ", ";", " ; ;"])
def test_plans_that_are_none_are_refused_before_any_work(plans, monkeypatch):
    monkeypatch.setattr("kvtailor.bench.subject.Subject.load", None)
    told = invoke(bench.command, "--plans", plans)
    assert told.exit_code == 2 and "--plans is empty: give a plan" in " ".join(told.output.split())
