"""The comparison with transformers' own quantised caches runs, with and without their libraries."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from tests.support.seam.zoo import build

from benchmarks.micro import builtins
from benchmarks.micro.__main__ import micro
from kvtailor.hf.run.stock import quantized_cache


@pytest.mark.long
def test_it_runs_on_what_is_installed() -> None:
    sizes = ["--contexts", "200", "--packing", "200", "--context", "200", "--continuation", "40", "--windows", "3"]
    few = ["--backends", "", "--bits", "4", "--rounds", "1", "--packing-rounds", "1", "--dtype", "float32"]
    found = CliRunner().invoke(micro, ["builtins", *sizes, *few])
    assert found.exit_code == 0, found.output
    tables = json.loads(found.stdout.splitlines()[-1])["tables"]
    ours = "kivi(bits=4, group=64, recent=128)"
    assert set(tables["nats"]) == {"full", ours} and len(tables["nats"]["full"]) == 3
    assert all(mine != whole for mine, whole in zip(tables["nats"][ours], tables["nats"]["full"], strict=True))
    assert len(tables[f"packing 200 {ours}"]) == 1
    assert {row["name"] for row in tables["decode 200"]} == {"StaticCache + sdpa", "full", ours}


@torch.no_grad()
def test_a_library_that_is_missing_is_said() -> None:
    try:
        quantized_cache(build("llama"), "quanto", bits=4, group=16, tail=32)
    except ImportError:
        found, left_out = builtins._installed(["quanto"])
        assert found == [] and "quanto is left out" in left_out[0]
    else:
        assert builtins._installed(["quanto"]) == (["quanto"], [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bits", "3"], "--bits has 3: QuantizedCache has 4 and 2"),
        (["--backends", "quanta"], "'quanta' is none of quanto, hqq"),
        (["--contexts", "many"], "--contexts is 'many': give numbers"),
        (["--device", "tpu!"], "'tpu!'"),
        (["--batches", "2"], "--batches is not for builtins"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_runs(words: list[str], message: str) -> None:
    found = CliRunner().invoke(micro, ["builtins", *words])
    assert found.exit_code == 2 and message in found.output, found.output
