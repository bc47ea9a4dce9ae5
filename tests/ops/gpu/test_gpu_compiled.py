"""Registers, spills and instruction counts of the compiled kernels against recorded ceilings.

`ceilings.json` holds what one version of Triton made of each variant, times 1.1. To record anew:
    python -m tests.ops.gpu.compiled | python -m tests.ops.gpu.record
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ops.gpu.exact_attention import needs_triton

from kvtailor.ops.triton_launch import missing

pytestmark = needs_triton

RECORDED = json.loads((Path(__file__).parent / "ceilings.json").read_text(encoding="utf-8"))
VARIANTS = sorted({name.rsplit(" ", 1)[0] for name in RECORDED["ceilings"]})


def compiled(*names: str) -> list[dict[str, Any]]:
    """In a process of its own, since here kernels may run in the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.gpu.compiled", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(*names: str) -> None:
    if missing() is None:
        import triton

        if triton.__version__ != RECORDED["triton"]:
            pytest.skip(f"ceilings were recorded with triton {RECORDED['triton']}, installed is {triton.__version__}")
    for made in compiled(*names):
        name = made["name"]
        ceiling = RECORDED["ceilings"][f"{name} {made['sm']}"]
        assert made["stack"] == 0 and made["local"] == 0, f"{name} spills on sm_{made['sm']}"
        assert made["registers"] <= 255
        for what in ("registers", "instructions", "loop"):
            assert made[what] <= ceiling[what], (
                f"{name} on sm_{made['sm']}: {made[what]} {what}, at most {ceiling[what]}"
            )
        assert made["mma"] >= ceiling["mma"], f"{name} on sm_{made['sm']} has lost its matrix instructions"
        assert made["asynchronous"] >= ceiling["asynchronous"], f"{name} on sm_{made['sm']} no longer loads ahead"


@pytest.mark.long
def test_is_no_larger_than_recorded() -> None:
    check("vector8", "kivi4")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("vector8", "kivi4")])
def test_is_no_larger_than_recorded_for_every_variant(name: str) -> None:
    check(name)


def test_every_variant_has_a_ceiling() -> None:
    from tests.ops.gpu import compiled as program

    assert sorted(program.VARIANTS) == VARIANTS
