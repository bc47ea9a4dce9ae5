"""Every example runs as it stands; one of them from a terminal, as its own docstring says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.docs_code import example_as_installed

FOLDER = Path(__file__).parents[2] / "examples"
# It is started by torchrun, and leaves a process group behind.
PROCESSES = FOLDER / "tensor_parallel.py"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {PROCESSES})
# A search measures many plans.
LONG = {"fit_to_memory"}


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=pytest.mark.long if each.stem in LONG else ()) for each in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example_as_installed(example, tmp_path)), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.long
def test_the_example_of_several_processes_runs_in_two(tmp_path: Path) -> None:
    example = str(example_as_installed(PROCESSES, tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("loaded again: 265 tokens seen") == 1


@pytest.mark.long
def test_an_example_runs_from_a_terminal(tmp_path: Path) -> None:
    example = next(path for path in EXAMPLES if path.stem == "one_line")
    example = example_as_installed(example, tmp_path)
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
