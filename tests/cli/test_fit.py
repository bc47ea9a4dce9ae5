"""`kvtailor fit`: what a user reads and gets, and what is refused before any work."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.few_methods import NOT_SEARCHED

import kvtailor
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure import machine
from kvtailor.bench.schema import read_records
from kvtailor.cli.fit import command
from kvtailor.fitting import effort as efforts
from kvtailor.fitting import stages
from kvtailor.fitting.answer import short_plan
from kvtailor.fitting.effort import Effort
from kvtailor.fitting.result import Fit
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan

CONTEXT = 160
LEAST = Effort(
    name="quick",
    first=(4, 1),
    rest=(2, 1),
    widths=(4, 2),
    shares=(0.5,),
    by_head=False,
    trials=3,
    front=1,
    levels=(0.5,),
    fitted=2,
    presets=2,
    windows=(6, 5),
)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(generated_text(60_000), encoding="utf-8")
    return path


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(efforts, "EFFORTS", {**efforts.EFFORTS, "quick": LEAST})
    monkeypatch.setattr(
        machine,
        "versions",
        lambda: {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"},
    )


def fit(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


ASKED = (
    "--context",
    CONTEXT,
    "--effort",
    "quick",
    "--no-times",
    "--without",
    ",".join(NOT_SEARCHED),
    "--tasks",
    "needle",
    "--proof-tasks",
    "passkey",
    "--dtype",
    "float32",
)


@pytest.fixture
def fitted(text, little, tmp_path):
    done = fit("--text", text, "--memory", "30%", *ASKED, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    return tmp_path / "out", done


def test_a_fit_gives_a_plan_that_every_verb_reads(fitted, text):
    folder, done = fitted
    found = Fit.load(folder)
    plan = Plan.from_toml((folder / "fitted.toml").read_text())
    assert str(plan) == found.plan == json.loads(done.stdout.splitlines()[-1])["plan"]
    chosen = found.chosen
    assert chosen.bytes <= found.question.memory == int(0.3 * found.full)
    # The bytes are those that a cache of this plan weighs.
    model, tokenizer = kvtailor.load_model("demo", dtype="float32")
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :CONTEXT]
    cache = kvtailor.cache_for(model, plan)
    model(ids, **hand_cache(cache))
    assert abs(cache.ledger().total - chosen.bytes) <= 0.02 * chosen.bytes
    # What a user reads.
    assert found.plan in done.stdout.replace("\n", "") and "that the search never saw" in done.stdout
    assert max(map(len, done.stderr.splitlines())) < 400
    assert (folder / "fit.html").stat().st_size > 1000
    assert Fit.load(folder) == found and not (folder / "best-so-far.toml").exists()
    # The proof has presets beside it, and a family that the search never had.
    origins = {each.origin for each in found.proof}
    assert {"full", "preset", "layers"} <= origins
    assert {family.name: family.seen for family in chosen.families} == {"needle": True, "passkey": False}

    # Another memory, from what was measured: nothing is measured, and the answer fits.
    count = len(read_records(folder / "records"))
    begun = time.monotonic()
    again = fit("--out", folder, "--memory", "55%", "--json")
    assert again.exit_code == 0, again.output
    answer = json.loads(again.stdout.splitlines()[-1])
    assert answer["measured"]["bytes"] <= 0.55 * found.full
    assert answer["solved_bytes"] <= 0.55 * found.full
    assert "was not measured" in again.stdout
    assert len(read_records(folder / "records")) == count and time.monotonic() - begun < 60
    assert fit("--out", folder, "--memory", "1KiB").exit_code != 0
    # What was asked already is there; what was asked otherwise is not answered from it.
    same = fit("--text", text, "--memory", "30%", *ASKED, "--out", folder, "--json")
    assert same.exit_code == 0 and json.loads(same.stdout.splitlines()[-1])["plan"] == found.plan
    for words in (
        ("--context", 200),
        ("--batch", 4),
        ("--tasks", "key_value"),
        ("--without", "h2o"),
        ("--tpot", "1ms"),
        ("--points", 3),
        ("--model", "demo-draft"),
    ):
        refused = fit("--out", folder, "--memory", "30%", *words)
        assert refused.exit_code != 0 and ("--again" in refused.output or "another --out" in refused.output), words

    # The same question anew measures nothing: all of it is there.
    once_more = fit("--text", text, "--memory", "30%", *ASKED, "--out", folder, "--again", "--json")
    assert once_more.exit_code == 0, once_more.output
    assert json.loads(once_more.stdout.splitlines()[-1])["plan"] == found.plan
    assert len(read_records(folder / "records")) == count


def test_ctrl_c_leaves_a_plan_and_says_what_is_kept(text, little, tmp_path, monkeypatch):
    def interrupt(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "measure_layers", interrupt)
    folder = tmp_path / "out"
    done = fit("--text", text, "--memory", "30%", *ASKED, "--out", folder)
    assert done.exit_code == 130, done.output
    told = " ".join(done.stderr.split())
    # How long it takes comes before the first stage, and the time left with each.
    assert re.match(
        r"A fit of at most \d+ steps: at \S+ s each, as timed here, they take about \d+ \w+\. Ctrl-C stops it\. "
        rf"What was measured stays in {folder}, and the same command goes on there\. first plans: at most "
        r"\d+ steps; about \d+ \w+ left of all best so far: ",
        told,
    )
    best = folder / "best-so-far.toml"
    plan = Plan.from_toml(best.read_text())
    assert f"best so far: {short_plan(str(plan))}, " in told
    assert "Stopped. " in told and told.endswith(f"kvtailor run --plan {best}")
    size = kvtailor.cache_size("demo", plan, context=CONTEXT, dtype="float32")
    assert size.total <= 0.3 * size.full


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--memory", "25%"), "there is no text"),
        (("--memory", "25%", "--text", "/nowhere.txt"), "no text file /nowhere.txt"),
        (("--text", "generated"), "there is no limit"),
        (("--text", "generated", "--memory", "25%", "--keep-bytes", "0.3"), "several units"),
        (("--text", "generated", "--memory", "200"), "the least that any plan can reach"),
        (("--text", "generated", "--memory", "1GiB"), "no plan is needed"),
        (("--text", "generated", "--memory", "25%", "--context", "100000"), "4096 positions"),
        (("--text", "generated", "--memory", "25%", "--tasks", "nedle"), "did you mean 'needle'"),
        (("--text", "generated", "--memory", "25%", "--proof-tasks", "needle"), "name another family"),
        (("--text", "generated", "--memory", "25%", "--loss", "-1"), "loss is -1"),
        (("--text", "generated", "--tpot", "3ms"), "time alone"),
        (("--text", "generated", "--points", "5", "--tasks", "none"), "no tasks are asked"),
        (("--text", "generated", "--memory", "25%", "--tpot", "3ms", "--no-times"), "no times are measured"),
        (("--text", "generated", "--memory", "25%", "--loss", "0.1", "--no-times"), "the time is made small"),
        (("--text", "generated", "--memory", "25%", "--without", "kivi"), "stage 1 makes its plans"),
        (("--text", "generated", "--memory", "0.5"), "not a whole number of bytes"),
        (("--text", "generated", "--memory", "25%", "--without", "kvzp"), "did you mean 'kvzip'"),
    ],
)
def test_a_question_that_has_no_answer_is_refused_before_any_work(words, sentence):
    done = fit(*words, *(() if "--context" in words else ("--context", 256)))
    assert done.exit_code != 0 and sentence in done.output.replace("\n", " ")


def test_a_text_that_is_too_short_says_how_much_is_needed(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("A few words. " * 200)
    done = fit("--text", path, "--memory", "25%", "--context", 256)
    assert done.exit_code != 0 and "at least 4 and 5 are needed" in done.output.replace("\n", " ")


@pytest.mark.long
def test_a_loss_that_none_meets_says_the_least(text, little):
    done = fit("--text", text, "--loss", "1e-9", *ASKED)
    assert done.exit_code != 0 and "the least is" in done.output


CHILD = """
import sys
from kvtailor.bench.measure import machine
machine.versions = lambda: {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}
from kvtailor.fitting import effort
from tests.cli import test_fit
effort.EFFORTS = {**effort.EFFORTS, "quick": test_fit.LEAST}
from kvtailor.cli.fit import command
command(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_fit_that_is_killed_again_and_again_ends_as_one_that_was_not(text, tmp_path):
    """SIGKILL at random times: nothing is lost, nothing is doubled, and the result is the same."""
    words = [str(word) for word in ("--text", text, "--memory", "30%", *ASKED)]
    here = str(Path(__file__).parents[2])
    surroundings = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}

    def start(folder):
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, *words, "--out", str(folder)],
            env=surroundings,
            cwd=here,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    began = time.monotonic()
    assert start(tmp_path / "whole").wait(900) == 0
    seconds = time.monotonic() - began
    draw, kills = random.Random(0), 0
    while True:
        child = start(tmp_path / "killed")
        try:
            # Longer each time: a machine that has become busy since the whole run would never get on.
            assert child.wait(draw.uniform(0.25, 0.4) * 1.2**kills * seconds) == 0
            break
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
    assert kills >= 2
    whole, killed = Fit.load(tmp_path / "whole"), Fit.load(tmp_path / "killed")
    assert (killed.plan, killed.sentence, killed.front) == (whole.plan, whole.sentence, whole.front)
    keys = [record.key for record in read_records(tmp_path / "killed" / "records")]
    assert sorted(keys) == sorted(set(keys))
    assert set(keys) == {record.key for record in read_records(tmp_path / "whole" / "records")}


def test_every_verb_reads_the_file_of_a_plan(tmp_path):
    """`--plan fitted.toml` works wherever a plan is asked for."""
    from kvtailor.cli import Verbs

    path = tmp_path / "fitted.toml"
    path.write_text(Plan.parse("snapkv(window=8) + kivi(bits=4, recent=32) @ tokens=40").to_toml())
    verbs = Verbs()
    for words in (
        ("show", str(path), "--model", "demo"),
        ("check", str(path), "--model", "demo"),
        ("run", "--plan", str(path), "--prompt", "word " * 60, "--max-new-tokens", "2", "--json"),
        (
            "bench",
            "--plans",
            str(path),
            "--tasks",
            "perplexity",
            "--context",
            "64",
            "--windows",
            "5",
            "--continuation",
            "8",
        ),
    ):
        done = CliRunner().invoke(verbs, list(words))
        assert done.exit_code == 0, (words, done.output)
        assert "snapkv(window=8)" in done.output.replace("\n", "")
