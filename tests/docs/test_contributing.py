"""CONTRIBUTING's worked example is real: its two files, copied into a copy of the house, pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kvtailor

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


def test_the_worked_example_is_two_files_and_passes(tmp_path: Path) -> None:
    files = dict(EXAMPLE.findall((REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert len(files) == 2
    leave_out = shutil.ignore_patterns("weights", "__pycache__", "hf", "bench")
    shutil.copytree(Path(kvtailor.__file__).parent, tmp_path / "src" / "kvtailor", ignore=leave_out)
    for name in (
        "__init__.py",
        "support/discover.py",
        "support/held_rows.py",
        "support/naming.py",
        "contract/test_score.py",
    ):
        name = f"tests/{name}"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name, text in files.items():
        assert not (REPOSITORY / name).exists(), f"{name} is now a real file: choose another example"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # The other paths stay, so that a run without an installed package finds what it needs.
    paths = [str(tmp_path / "src"), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            "tests",
            "-k",
            "test_loudest or (Loudest and frozen)",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "tests/score/test_loudest.py" in found.stdout
    assert "tests/contract/test_score.py::" in found.stdout, "the stage's contract is tested on the new method"
