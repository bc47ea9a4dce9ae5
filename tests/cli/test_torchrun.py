"""`kvtailor run` and `kvtailor bench` under torchrun: one process speaks, and all say what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtailor.bench.schema import read_records
from kvtailor.cli import main

PLAN = "snapkv(window=8) + adakv @ tokens=64"
PROMPT = "The old mill stood at the end of the village, and nobody had lived there for years. " * 12


def launched(*given: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """The program in so many processes."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "-m",
        "kvtailor",
        *given,
    ]
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=told, capture_output=True, text=True, timeout=500, check=False)


def last_line(text: str) -> Any:
    """The JSON object at the end of standard output."""
    return json.loads(text.strip().splitlines()[-1])


@pytest.mark.long
def test_a_run_in_two_processes_says_once_what_one_says() -> None:
    given = ["run", "--dtype", "float32", "--plan", PLAN, "--prompt", PROMPT, "--max-new-tokens", "12", "--json"]
    done = launched(*given)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = CliRunner().invoke(main, given)
    assert alone.exit_code == 0, alone.output
    found, expected = last_line(done.stdout), last_line(alone.stdout)
    for name in ("text", "tokens_seen", "tokens_held", "bytes_full", "prompt_tokens", "new_tokens"):
        assert found[name] == expected[name], name
    # Pages and tails are those of each process, so bytes are near, and of the whole cache.
    assert 0.85 < found["bytes_held"] / expected["bytes_held"] < 1.15
    assert done.stdout.count(found["text"]) == 2 and done.stderr.count("plan    ") == 1


@pytest.mark.long
def test_a_bench_in_two_processes_has_the_records_of_one(tmp_path: Path) -> None:
    given = ["bench", "--dtype", "float32", "--plans", PLAN, "--tasks", "perplexity,fidelity", "--windows", "3"]
    for out, work in (
        ("one", lambda *more: CliRunner().invoke(main, [*more]).exit_code),
        ("two", lambda *more: launched(*more).returncode),
    ):
        assert work(*given, "--out", str(tmp_path / out)) == 0
    one, two = ({(r.task, r.label): r for r in read_records(tmp_path / out)} for out in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 4
    for key, record in one.items():
        other = two[key]
        assert other.error is None and other.model_hash == record.model_hash and other.bytes_full == record.bytes_full
        assert other.tokens_held == record.tokens_held
        for name, value in record.metrics.items():
            assert other.metrics[name] == pytest.approx(value, abs=2e-5), name
    if str(one["perplexity", "full"].machine["commit"]).endswith("-dirty"):
        return  # what changed files have measured stands for nothing
    # A second run measures nothing again, whichever process looks for what is there.
    lines = sum(len(path.read_text().splitlines()) for path in (tmp_path / "two").glob("*.jsonl"))
    again = launched(*given, "--out", str(tmp_path / "two"))
    assert again.returncode == 0, again.stderr[-3000:]
    assert sum(len(path.read_text().splitlines()) for path in (tmp_path / "two").glob("*.jsonl")) == lines


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["calibrate", "duo", "--text", "x"], "calibrate runs in one process, and torchrun started 2"),
        (["demo"], "demo runs in one process"),
        (["run", "--plan", "full"], "cannot share standard input"),
    ],
)
def test_what_one_process_does_is_refused(given: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, given, input="text")
    assert done.exit_code == 2 and sentence in done.output


def test_incomplete_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(main, ["run", "--prompt", "hello"])
    assert done.exit_code == 2 and "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set" in done.output


@pytest.mark.long
def test_tasks_that_time_are_refused_in_several_processes() -> None:
    done = launched("bench", "--tasks", "speed", "--plans", PLAN)
    assert done.returncode != 0 and "such tasks time or weigh a single process" in done.stderr
