"""`kvtailor bench --ray`: its optional address, what it refuses, and a run end to end on an executor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.in_process import InProcess

from kvtailor import cluster
from kvtailor.bench.schema import read_records
from kvtailor.cli import main

SMALL = [
    "--plans",
    "snapkv @ keep=0.25",
    "--tasks",
    "perplexity",
    "--context",
    "64",
    "--continuation",
    "16",
    "--windows",
    "2",
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were asked for; calls run in this process."""
    found: list[str] = []

    def connect(address: str, **given: Any) -> InProcess:
        found.append(address)
        return InProcess()

    monkeypatch.setattr(cluster, "connect", connect)
    return found


@pytest.mark.parametrize(
    ("words", "address"),
    [(["--ray"], "here"), (["--ray", "auto"], "auto"), (["--ray=head:6379"], "head:6379")],
)
def test_an_address_may_be_left_out(words: list[str], address: str, asked: list[str]) -> None:
    # There is no such model, which is looked for after the cluster.
    done = CliRunner().invoke(main, ["bench", *words, "--model", "./nothing-there", "--plans", "full"])
    assert done.exit_code == 2 and asked == [address]


def test_a_run_on_an_executor_writes_the_records_of_a_run_alone(asked: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["bench", "--ray", *SMALL, "--out", str(tmp_path / "spread")])
    assert done.exit_code == 0, done.output
    assert asked == ["here"]
    assert "done on " in done.output and "records by machine: " in done.output
    alone = CliRunner().invoke(main, ["bench", *SMALL, "--out", str(tmp_path / "alone")])
    assert alone.exit_code == 0 and "records by machine" not in alone.output
    one, other = (read_records(tmp_path / name) for name in ("spread", "alone"))
    assert [(r.key, r.metrics, r.values, r.bytes_held) for r in one] == [
        (r.key, r.metrics, r.values, r.bytes_held) for r in other
    ]


def test_resources_are_for_a_cluster_and_checked_before_anything_is_loaded(asked: list[str]) -> None:
    done = CliRunner().invoke(main, ["bench", *SMALL, "--resources", "cpus=2"])
    assert done.exit_code == 2 and "--resources without --ray" in done.output
    done = CliRunner().invoke(main, ["bench", "--ray", *SMALL, "--resources", "cpu=2, speed.gpu=1"])
    assert done.exit_code == 2 and "has 2 faults" in done.output and "did you mean 'cpus'" in done.output
    assert not asked


def test_a_suite_with_wrong_resources_is_refused(asked: list[str], tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "cluster" / "sweep.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("cpus = 1", "cpu = 1").replace("[resources.needle]", "[resources.needl]"))
    done = CliRunner().invoke(main, ["bench", "--suite", str(path)])
    assert done.exit_code == 2 and "has 2 faults" in done.output
    assert "resources.cpu; did you mean 'cpus'" in done.output and "did you mean 'needle'" in done.output


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(main, ["bench", "--ray", *SMALL])
    assert done.exit_code == 2 and "pip install 'kvtailor[ray]'" in done.output
