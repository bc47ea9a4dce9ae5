"""The words of `kvtailor bench micro`: what help names, where the old spelling works, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from kvtailor.bench.micro import kernels
from kvtailor.bench.micro.tables import Bench, Cell, Table
from kvtailor.cli import main

NAMES = ("decode", "kernels", "link", "builtins", "host")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


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
    for found in (run("--help"), run("micro", "--help")):
        assert found.exit_code == 0
        for name in NAMES:
            assert f"kvtailor bench micro {name}" in found.output
    for name in NAMES:
        said = run("micro", name, "--help").output
        assert f"bench micro {name}" in said and all(each in said for each in ("--device", "--json", "--threads"))
    assert "transformers' StaticCache" in " ".join(run("micro", "decode", "--help").output.split())


@pytest.mark.parametrize(
    "words",
    [
        ["kernels", "--contexts", "64,128", "--rounds", "3", "--batches", "2"],
        ["--contexts", "64,128", "kernels", "--batches=2", "--rounds", "3"],
        ["micro", "kernels", "--contexts", "64,128", "--rounds", "3", "--batches", "2", "--json"],
    ],
    ids=" ".join,
)
def test_every_spelling_of_kernels(words: list[str], asked: list[dict[str, Any]]) -> None:
    found = run(*words)
    assert found.exit_code == 0, found.output
    assert asked == [{"contexts": (64, 128), "batches": (2,), "only": (), "rounds": 3, "device": torch.device("cpu")}]
    *tables, last = found.stdout.splitlines()
    assert tables == ["about", "here", "a table", "a table"]
    assert '"read_bandwidth": 2.0, "tables": {"rows": [{"name": "a side"}, {"name": "a side"}]}' in last
    assert "[1 of 2, 0:00 so far] one: done" in found.stderr and "[2 of 2, 0:00 so far] two: done" in found.stderr


def test_cases_are_names(asked: list[dict[str, Any]]) -> None:
    assert run("micro", "kernels", "--cases", "quest,ragged").exit_code == 0 and asked[0]["only"] == ("quest", "ragged")
    found = run("micro", "kernels", "--cases", "quests")
    assert found.exit_code == 2 and "'quests' is none of attention, quest" in found.output


@pytest.mark.parametrize("words", [["micro", "kernel"], ["micro"], ["kernels", "more"], ["--tasks", "kernels", "rest"]])
def test_other_words_are_refused(words: list[str], asked: list[dict[str, Any]]) -> None:
    found = run(*words)
    assert found.exit_code == 2 and asked == []


def test_modules_that_ran_by_themselves_name_the_command() -> None:
    import runpy

    for name in NAMES:
        path = Path(kernels.__file__).with_name(f"{name}.py")
        with pytest.raises(SystemExit, match=f"kvtailor bench micro {name} --help"):
            runpy.run_path(str(path), run_name="__main__")
