"""`python -m benchmarks.micro kernels`: what it prints, and that a wrong kernel gets no time."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.micro import cases, kernels
from benchmarks.micro.__main__ import micro
from kvtailor.errors import KvtailorError
from kvtailor.ops.cpu.library import built
from kvtailor.ops.segments.attention_inputs import AttentionInputs

needs_cpu_kernels = pytest.mark.skipif(not built(), reason="the C++ kernels were not built: no compiler")


@needs_cpu_kernels
def test_it_runs_and_ends_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "APART", 1)
    found = CliRunner().invoke(micro, ["kernels", "--contexts", "512", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout.splitlines()[-1])
    assert {title.split(",")[0] for title in told["tables"]} == {
        "grouped heads",
        "single heads",
        "ragged heads",
        "Quest's pages",
        "query blocks",
        "levels and small floats",
        "appending",
        "packing",
    }
    (grouped,) = [rows for title, rows in told["tables"].items() if title.startswith("grouped")]
    assert {"kvtailor int8", "kvtailor kivi 2 bits", "DynamicCache + sdpa"} <= {row["name"] for row in grouped}
    assert "RED" not in found.stdout
    assert told["read_bandwidth"] > 0 and told["variant"] in built()
    assert "[1 of 8, 0:0" in found.stderr and found.stderr.count(": done") == 8


@needs_cpu_kernels
def test_a_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "APART", 1)
    words = ["kernels", "--contexts", "512", "--rounds", "1", "--cases", "ragged"]
    found = CliRunner().invoke(micro, words)
    assert found.exit_code == 0, found.output
    assert "transformers' caches. Divided by: our own bfloat16 kernel" in found.stdout
    assert "ragged heads, bfloat16" in found.stdout.splitlines()[-2] and "grouped" not in found.stdout
    assert found.stderr.count(": done") == 1


@needs_cpu_kernels
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.attend_coded

    def wrong(inputs: AttentionInputs) -> Any:
        out, lse = right(inputs)
        return (out * 1.05 if getattr(inputs.keys, "bits", None) == 8 else out), lse

    monkeypatch.setattr(cases, "APART", 1)
    monkeypatch.setattr(cases, "attend_coded", wrong)
    bench = kernels.bench(contexts=[512], rounds=1, device=torch.device("cpu"))
    tables = [cell.measure(lambda name: None) for cell in bench.cells]
    said = "\n".join(line for table in tables for line in table.lines)
    assert "kvtailor int8                      relative error 5.0e-02  RED: not timed" in said
    for table in tables:
        for title, rows in table.rows.items():
            assert "kvtailor int8" not in {row["name"] for row in rows}, title


def test_an_answer_that_is_not_a_number_is_wrong() -> None:
    query, keys = torch.randn(2, 1, 1, 8), torch.randn(2, 5, 8)
    right, line = cases.verdict("a", query, torch.full((2, 1, 1, 8), torch.nan), keys, keys)
    assert not right and "RED: not timed" in line


@needs_cpu_kernels
def test_announced_samples_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "APART", 1)
    for cell in kernels.bench(contexts=[512], rounds=1, device=torch.device("cpu")).cells:
        said: list[str] = []
        cell.measure(said.append)
        assert len(said) == cell.samples, cell.name


def test_without_kernels_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "library", lambda: None)
    with pytest.raises(KvtailorError, match="and this bench is about its kernels"):
        cases.kernels_of(torch.device("cpu"))


def test_options_of_plans_are_refused() -> None:
    found = CliRunner().invoke(micro, ["kernels", "--windows", "3"])
    assert found.exit_code == 2 and "--windows is not for kernels: --contexts, --batches, --cases" in found.output


def test_exact_sides_are_not_rounded() -> None:
    states = torch.randn((2, 64, 128)).bfloat16()
    keys, _ = cases.coded("int4", [(states, states)])[0]
    exact = cases.exact_side(keys)
    assert exact.dtype == torch.float64 and not torch.equal(exact, keys.decode().double())
    assert cases.bytes_of([(keys, keys)]) == 2 * sum(tensor.nbytes for tensor in keys.tensors().values())
    assert dataclasses.is_dataclass(keys)
