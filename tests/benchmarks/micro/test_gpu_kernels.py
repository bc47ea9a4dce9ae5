"""`micro kernels --device cuda`: everything that it would time runs, and what is wrong gets no time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.ops.gpu.exact_attention import DEVICE, needs_triton

from benchmarks.micro import cases, kernels
from benchmarks.micro.__main__ import micro
from benchmarks.micro.timer import Measured, Side
from kvtailor.ops.dispatch import using
from kvtailor.ops.segments.attention_inputs import AttentionInputs

pytestmark = needs_triton


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: one layer, everything once, and no clock."""

    def once(sides: Sequence[Side], rounds: int, **how: Any) -> list[Measured]:
        for side in sides:
            side.run(0)
        return [Measured(side.name, [1.0]) for side in sides]

    monkeypatch.setattr(cases, "APART", 1)
    monkeypatch.setattr(kernels, "_BUDGET", 32)
    monkeypatch.setattr(cases, "HEADS", (("grouped heads", 2, 4), ("single heads", 3, 1)))
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "time_in_turns", once)


def measured(*only: str) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """All tables, by name, and what a reader sees."""
    tables, lines = {}, []
    with using("triton"):
        for cell in kernels.bench(contexts=[64], rounds=1, only=only, device=torch.device(DEVICE)).cells:
            table = cell.measure(lambda name: None)
            tables |= table.rows
            lines += table.lines
    return tables, "\n".join(lines)


@pytest.mark.long
def test_all_of_it_runs(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtailor.ops.attention.triton import attend

    right = attend.attend_coded

    def wrong(inputs: AttentionInputs) -> Any:
        out, lse = right(inputs)
        return (out * 1.05 if getattr(inputs.keys, "bits", None) == 8 else out), lse

    monkeypatch.setattr(attend, "attend_coded", wrong)
    tables, said = measured()
    assert "kvtailor int8                      relative error 5.0e-02  RED: not timed" in said
    assert said.count("RED") == 2
    assert [title.split(",")[0] for title in tables] == [
        "grouped heads",
        "single heads",
        "Quest's pages",
        "ragged heads",
        "query blocks",
        "levels and small floats",
        "appending",
        "packing",
    ]
    grouped = {row["name"] for row in next(iter(tables.values()))}
    assert {
        "kvtailor bfloat16",
        "kvtailor kivi 2 bits",
        "sdpa as transformers calls it",
        "a plain read of the bfloat16 bytes",
    } <= grouped
    assert "kvtailor int8" not in grouped
    assert "32 tokens of pages" in {row["name"] for row in tables["Quest's pages, 64 tokens"]}


def test_what_does_not_fit_is_named(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    assert kernels._no_room(torch.device("cuda"), 2 << 30) == "its layers take 2 GiB and less is free"
    assert kernels._no_room(torch.device("cuda"), 1 << 29) is None
    monkeypatch.setattr(kernels, "_no_room", lambda device, size: "there is no room")
    tables, said = measured("attention")
    assert said.count("left out, there is no room") == 2 and tables == {}


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device is here")
def test_it_ends_with_json() -> None:
    found = CliRunner().invoke(micro, ["kernels", "--device", "cuda", "--contexts", "512", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[-1])["variant"] == "Triton"
