"""The program's threads leave a busy machine alone, and a process that imports the library keeps its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtailor.cli.machine_share import granted_cores, share_machine

_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_NUM_THREADS")
# The environment that torch finds, after the program's entry has run a verb that needs no torch.
_PROGRAM = """
import os, sys
from kvtailor.cli import main
assert "torch" not in sys.modules, "the entry has loaded torch before it could say how threads wait"
sys.argv = ["kvtailor", "--version"]
try:
    main()
except SystemExit:
    pass
print(os.environ.get("OMP_WAIT_POLICY"))
"""


def run(code: str, **extra: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _NAMES} | extra
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def test_the_program_waits_without_spinning() -> None:
    assert run(_PROGRAM) == "PASSIVE"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "1000")])
def test_what_the_user_set_stays(name: str, value: str) -> None:
    assert run(_PROGRAM, **{name: value}) == ("ACTIVE" if name == "OMP_WAIT_POLICY" else "None")


def test_the_library_leaves_the_environment_alone() -> None:
    code = "import os, kvtailor, kvtailor.cli\nkvtailor.Plan\nprint(os.environ.get('OMP_WAIT_POLICY'))"
    assert run(code) == "None"


def test_nothing_is_set_once_torch_is_loaded() -> None:
    import torch  # noqa: F401

    environment: dict[str, str] = {}
    share_machine(environment)
    assert not environment


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux says which cores a process may use")
def test_a_quota_below_the_cores_that_are_shown_is_the_number_of_threads(tmp_path: Path) -> None:
    file, shown = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    assert granted_cores(file) is None
    for text, expected in (
        ("max 100000", None),
        ("50000 100000", 1 if shown > 1 else None),
        (f"{shown * 100000} 100000", None),
        (f"{(shown - 1) * 100000 + 10} 100000", shown - 1 if shown > 1 else None),
        ("nonsense", None),
    ):
        file.write_text(text)
        assert granted_cores(file) == expected, text
