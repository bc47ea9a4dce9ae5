"""`kvtailor bench kernels --device cuda`: everything that it would time runs, and what is wrong gets no time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.ops.gpu.exact_attention import DEVICE, needs_triton

from kvtailor.bench.micro.decode import Measured
from kvtailor.cli import main

pytestmark = needs_triton


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In Triton's interpreter: one layer, everything once, and no clock."""
    from kvtailor.bench.micro import gpu_kernels

    def once(work: Sequence[tuple[str, Any]], layers: int, rounds: int, device: torch.device) -> list[Measured]:
        for _, each in work:
            each(0)
        return [Measured(name, [1.0]) for name, _ in work]

    monkeypatch.setattr(gpu_kernels, "APART", 1)
    monkeypatch.setattr(gpu_kernels, "_BUDGET", 32)
    monkeypatch.setattr(gpu_kernels, "HEADS", (("grouped heads", 2, 4), ("single heads", 3, 1)))
    if DEVICE == "cpu":
        monkeypatch.setattr(gpu_kernels, "samples", once)
    return gpu_kernels


def test_all_of_it_runs(small: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = small.attend_coded

    def wrong(query: Any, keys: Any, values: Any, **how: Any) -> Any:
        out, lse = right(query, keys, values, **how)
        return (out * 1.05 if getattr(keys, "bits", None) == 8 else out), lse

    monkeypatch.setattr(small, "attend_coded", wrong)
    tables = small.measure(torch.device(DEVICE), [64], [1], 1)
    said = capsys.readouterr().out
    assert "kvtailor int8                      relative error 5.0e-02  RED: not timed" in said
    assert said.count("RED") == 2
    assert [title.split(",")[0] for title in tables] == [
        "grouped heads", "single heads", "Quest's pages", "ragged heads", "query blocks", "appending", "packing"
    ]  # fmt: skip
    grouped = {row["name"] for row in next(iter(tables.values()))}
    assert {
        "kvtailor bfloat16",
        "kvtailor kivi 2 bits",
        "sdpa as transformers calls it",
        "a copy of half of them",
    } <= grouped
    assert "kvtailor int8" not in grouped


def test_what_does_not_fit_is_named(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    assert not small._fits(torch.device("cuda"), 2 << 30, "there") and small._fits(
        torch.device("cuda"), 1 << 29, "there"
    )


def test_samples_are_of_one_layer_and_in_turns() -> None:
    from kvtailor.bench.micro import gpu_kernels

    seen: list[str] = []
    work = [(name, lambda layer, name=name: seen.append(f"{name}{layer}")) for name in "ab"]
    found = gpu_kernels.samples(work, 3, 4, torch.device("cpu"))
    assert [len(each.seconds) for each in found] == [4, 4]
    once = [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert seen[:12] == [*once[0], *once[1], *once[1], *once[0]]


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device is here")
def test_it_ends_with_json() -> None:
    found = CliRunner().invoke(main, ["bench", "kernels", "--device", "cuda", "--contexts", "512", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[-1])["variant"] == "Triton"
