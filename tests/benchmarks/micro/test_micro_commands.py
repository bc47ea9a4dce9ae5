"""The words of `python -m benchmarks.micro`: what help names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks.micro import kernels
from benchmarks.micro.__main__ import micro
from benchmarks.micro.tables import Bench, Cell, Table

NAMES = ("decode", "kernels", "link", "builtins", "host")


def run(*words: str) -> Result:
    return CliRunner().invoke(micro, list(words))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the bench of kernels is made with, in place of measuring."""
    seen: list[dict[str, Any]] = []

    def bench(**settings: Any) -> Bench:
        seen.append(settings)

        def measure(advance: Any) -> Table:
            advance("a side")
            return Table(lines=["a table"], rows={"rows": [{"name": "a side"}]})

        cells = [Cell(name=name, samples=1, measure=measure) for name in ("one", "two")]
        return Bench(about="about", machine="here", cells=cells, found={"read_bandwidth": 2.0})

    monkeypatch.setattr(kernels, "bench", bench)
    return seen


def test_help_names_all_and_what_each_is_compared_with() -> None:
    found = run("--help")
    assert found.exit_code == 0
    for name in NAMES:
        assert name in found.output
        said = run(name, "--help").output
        assert all(each in said for each in ("--device", "--threads"))
    assert "transformers' StaticCache" in " ".join(run("decode", "--help").output.split())


def test_options_reach_the_bench(asked: list[dict[str, Any]]) -> None:
    found = run("kernels", "--contexts", "64,128", "--rounds", "3", "--batches", "2")
    assert found.exit_code == 0, found.output
    assert asked == [{"contexts": (64, 128), "batches": (2,), "only": (), "rounds": 3, "device": torch.device("cpu")}]
    *tables, last = found.stdout.splitlines()
    assert tables == ["about", "here", "a table", "a table"]
    assert '"read_bandwidth": 2.0, "tables": {"rows": [{"name": "a side"}, {"name": "a side"}]}' in last
    assert "[1 of 2, 0:00 so far] one: done" in found.stderr and "[2 of 2, 0:00 so far] two: done" in found.stderr


def test_cases_are_names(asked: list[dict[str, Any]]) -> None:
    assert run("kernels", "--cases", "quest,ragged").exit_code == 0 and asked[0]["only"] == ("quest", "ragged")
    found = run("kernels", "--cases", "quests")
    assert found.exit_code == 2 and "'quests' is none of attention, quest" in found.output


@pytest.mark.parametrize("words", [["kernel"], ["kernels", "more"], ["kernels", "--layers", "1"], []])
def test_other_words_are_refused(words: list[str], asked: list[dict[str, Any]]) -> None:
    found = run(*words)
    assert found.exit_code == 2 and asked == []
