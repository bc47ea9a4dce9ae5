"""What one bench can be asked: suites, sweeps, several texts, sets, permits."""

import json
import random
import re

import pytest
from click.testing import CliRunner
from tests.support.bench.harness_fixtures import folder
from tests.support.bench.longset_rows import lines_to, longbench_row

from kvtailor.bench.schema import read_records
from kvtailor.cli import bench, report
from kvtailor.cli import eval as eval_verb

SUITE = """
title = "A small suite"
awaits = ["tomorrow", "telepathy"]
[settings.default]
keep = 0.25
[tasks.ppl]
run = "perplexity"
text = "generated"
context = 96
continuation = 16
windows = 5
[tasks.guess]
run = "telepathy"
[[tables]]
name = "loss"
title = "Loss by budget"
labels = ["Method"]
columns = [{ label = "ΔNLL", task = "ppl", value = "paired.nll", digits = 4 }]
rows = [
    { Method = "snap", plan = "snapkv @ keep={keep}" },
    { Method = "rank", plan = "snapkv + tomorrow @ keep={keep}" },
]
[[tables]]
name = "rate"
title = "Acceptance"
labels = ["Method"]
columns = [{ label = "rate", task = "guess", value = "metrics.rate" }]
rows = [{ Method = "snap", plan = "snapkv @ keep={keep}" }]
"""


def invoke(*words):
    return CliRunner().invoke(bench.command, list(words))


def last(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_suite_says_what_it_measured_and_what_is_missing_and_its_pages_can_be_made_again(tmp_path):
    (tmp_path / "small.toml").write_text(SUITE)
    result = invoke(
        "--suite", str(tmp_path / "small.toml"), "--dtype", "float32", "--out", str(tmp_path / "out"), "--json"
    )
    found = last(result)
    assert found["missing"] == ["snapkv + tomorrow @ keep=0.25"]
    assert len(found["unavailable"]) == 1 and "telepathy" in found["unavailable"][0]
    assert "Loss by budget" in result.stdout and "tomorrow" in result.stdout and "Not run: Acceptance." in result.stdout
    [grid] = found["pages"]["grids"]
    snap, rank = grid["rows"]
    assert snap[1]["value"] > 0 and snap[1]["keys"] and rank[1]["text"] is None and rank[2]["text"] == "tomorrow"
    pages = {path.name: path for path in (tmp_path / "out").iterdir()}
    csv = (tmp_path / "out" / "suite-small-loss.csv").read_text()
    assert "Loss by budget" in pages["report.html"].read_text() and "Loss by budget" in pages["report.md"].read_text()
    (tmp_path / "out" / "pyproject.toml").write_text("[project]\n")
    again = CliRunner().invoke(report.command, [str(tmp_path / "out"), "--to", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again" / "suite-small-loss.csv").read_text() == csv


def test_the_suites_are_listed_and_their_names_are_checked():
    result = invoke("--suite", "list")
    assert result.exit_code == 0
    assert {line.split()[0] for line in result.stdout.splitlines()} >= {"rankkv", "kv-plugin", "atskv", "standard"}
    assert "did you mean 'rankkv'" in invoke("--suite", "rankv").output
    assert "leave out one of them" in invoke("--suite", "rankkv", "--windows", "3").output
    assert "say which suite" in invoke("--table", "loss").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "harness"], "harness: give some of"),
        (["--tasks", "longbench:"], "longbench:: give some of"),
        (["--tasks", "perplexity:x"], "perplexity:x: give some of"),
        (["--memory", "lots"], "'lots' is not a whole number of bytes"),
        (["--contexts", "x"], "--contexts is 'x'"),
        (["--chunk", "3", "--tasks", "needle"], "--chunk is about perplexity, which --tasks does not ask for"),
        (["--memory", "8GiB"], "--memory is about capacity"),
        (["--allow", "better then full"], "did you mean 'better than full'"),
        (["--allow", "identity"], "no number of a run means anything"),
        (["--text", "wikitxt2", "--tasks", "perplexity"], "did you mean 'wikitext2'"),
        (["--contexts", "5000", "--tasks", "speed"], "4096 positions"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words, said):
    result = invoke("--plans", "full", *words)
    assert result.exit_code != 0 and said in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output


def test_sweeps_texts_and_sets_are_points_of_one_run(tmp_path):
    filler = "some words of it. " * 30
    rows = [longbench_row(f"Paragraph {i}: {filler}", [f"Paragraph {i}"], _id=f"n{i}") for i in (1, 2)]
    lines_to(tmp_path / "data" / "longbench" / "passage_retrieval_en.jsonl", rows)
    text = tmp_path / "mine.txt"
    text.write_text(" ".join(f"word{i} and number {i * i} stand here." for i in range(900)))
    found = last(
        invoke(
            "--plans",
            "streaming @ keep=0.5",
            "--tasks",
            "perplexity,speed,longbench:passage_retrieval_en",
            "--text",
            str(text),
            "--text",
            "generated",
            "--data",
            str(tmp_path / "data"),
            "--context",
            "64",
            "--windows",
            "5",
            "--contexts",
            "32,64",
            "--batches",
            "1,2",
            "--new-tokens",
            "3",
            "--rounds",
            "1",
            "--examples",
            "1",
            "--dtype",
            "float32",
            "--out",
            str(tmp_path / "out"),
            "--json",
        )
    )
    records = read_records(tmp_path / "out")
    assert {r.text for r in records if r.task == "perplexity"} == {"mine.txt", "generated text"}
    points = {(r.point["context"], r.point["batch"]) for r in records if r.task == "speed"}
    assert points == {(32, 1), (32, 2), (64, 1), (64, 2)}
    assert [r.samples for r in records if r.task == "longcontext"] == [1, 1]
    assert {measure["task"] for measure in found["measures"]} == {"perplexity", "longcontext"}


@pytest.mark.usefixtures("few_harness_tasks")
def test_eval_is_the_harness_with_our_model_in_it(tmp_path, capfd):
    pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'kvtailor[harness]'")
    data = folder(tmp_path, random.Random(5))
    words = [
        "--model",
        "kvtailor",
        "--model_args",
        "pretrained=demo,plan='snapkv @ keep=0.25'",
        "--tasks",
        "lambada_openai",
        "--limit",
        "2",
        "--data",
        str(data),
    ]
    done = CliRunner().invoke(eval_verb.command, words)
    assert done.exit_code == 0, done.output
    assert "lambada_openai" in done.output and "perplexity" in done.output and "snapkv @ keep=0.25" in done.output
    assert re.search(r"\|\s*Tasks\s*\|\s*Version\s*\|\s*Filter\s*\|", done.output), "a table without its heads"
    helped = CliRunner().invoke(eval_verb.command, ["--help"])
    assert "with the model `kvtailor` registered" in " ".join(helped.output.split()) and "lm-eval" in helped.output
