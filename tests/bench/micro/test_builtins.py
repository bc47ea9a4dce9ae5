"""The comparison with transformers' own quantised caches runs, with and without their libraries."""

from __future__ import annotations

import json

import pytest
import torch
from tests.support.seam.zoo import build

from kvtailor.bench.micro import builtins
from kvtailor.hf.run.stock import quantized_cache


def test_it_runs_on_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts", "200", "--packing", "200", "--context", "200", "--continuation", "40", "--windows", "3"]
    builtins.main([*sizes, "--backends", "--bits", "4", "--rounds", "1", "--packing-rounds", "1", "--dtype", "float32"])
    out = capsys.readouterr().out
    tables = json.loads(out.splitlines()[-1])["tables"]
    ours = "kivi(bits=4, group=64, recent=128)"
    assert set(tables["nats"]) == {"full", ours} and len(tables["nats"]["full"]) == 3
    assert all(mine != whole for mine, whole in zip(tables["nats"][ours], tables["nats"]["full"], strict=True))
    assert len(tables[f"packing 200 {ours}"]) == 1


@torch.no_grad()
def test_a_library_that_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        quantized_cache(build("llama"), "quanto", bits=4, group=16, tail=32)
    except ImportError:
        assert builtins._installed(["quanto"]) == []
        assert "quanto is left out" in capsys.readouterr().out
    else:
        assert builtins._installed(["quanto"]) == ["quanto"]
