"""`python -m benchmarks.micro whole`: every plan under every implementation, launched and replayed, in turns."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner, Result
from tests.ops.gpu.exact_attention import needs_triton
from tests.support.seam.tape import recorder

from benchmarks.micro import whole
from benchmarks.micro.__main__ import micro
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.errors import KvtailorError, PlanError
from kvtailor.hf.graphs import replay
from kvtailor.hf.model.config import RANDOM_SHAPES

CPU = torch.device("cpu")
MODEL = "random-llama-narrow"


@pytest.fixture(autouse=True)
def shallow_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANDOM_SHAPES, MODEL, {**RANDOM_SHAPES[MODEL], "num_hidden_layers": 2})
    # Whatever else runs on this machine.
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: False)


def run(*words: str) -> Result:
    return CliRunner().invoke(micro, ["whole", "--model", MODEL, *words])


def test_it_runs_and_ends_with_json() -> None:
    found = run(
        "--contexts",
        "96",
        "--batches",
        "1,2",
        "--prefill",
        "64",
        "--plans",
        "vector(bits=4)",
        "--tokens",
        "2",
        "--rounds",
        "2",
        "--prefill-rounds",
        "1",
    )
    assert found.exit_code == 0, found.output
    tables = json.loads(found.stdout.splitlines()[-1])["tables"]
    one, two = (tables[f"decode {MODEL} 96 tokens {rows} rows"] for rows in (1, 2))
    assert [row["name"] for row in one] == ["full, auto", "vector(bits=4), auto", whole.OWN]
    assert one[0]["ratio"] == 1 and one[1]["cache_bytes"] < one[0]["cache_bytes"] < two[0]["cache_bytes"]
    assert all(row["median_ms"] > 0 for row in (*one, *two))
    prompt = tables[f"prompt {MODEL} 64 tokens"]
    # Where the device does not count them there is no number.
    assert [row["peak_bytes"] for row in prompt] == [None] * 3 and prompt[0]["ratio"] == 1


def test_replayed_sides_make_as_many_tokens_and_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the tape stands for a graph."""
    record, tapes = recorder(monkeypatch)
    monkeypatch.setattr(replay, "recorder_of", lambda device: record)
    made = []
    right = whole._replayed

    def kept(*given: object) -> object:
        step, cache = right(*given)
        made.append((cache, int(cache.seen)))
        return step, cache

    monkeypatch.setattr(whole, "_replayed", kept)
    bench = whole.bench(
        model=MODEL,
        dtype="float32",
        contexts=[64],
        plans=["vector(bits=4)"],
        implementations=["reference"],
        graphs="both",
        tokens=3,
        rounds=2,
        device=CPU,
    )
    (cell,) = bench.cells
    counted = []
    table = cell.measure(counted.append)
    names = [row["name"] for row in table.rows[f"decode {MODEL} 64 tokens 1 rows"]]
    both = [f"{plan}, reference{graphs}" for plan in ("full", "vector(bits=4)") for graphs in ("", ", graphs")]
    assert names == [*both, whole.OWN] and len(counted) == cell.samples
    assert next(row for row in table.rows[f"decode {MODEL} 64 tokens 1 rows"] if row["ratio"] == 1)["name"] == both[1]
    # 3 tokens of each of 3 rounds, one of which warms up.
    assert [cache.seen - before for cache, before in made] == [9, 9] and len(tapes) >= 2


def test_what_cannot_be_replayed_or_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = whole.bench(
        model=MODEL,
        dtype="float32",
        contexts=[64],
        plans=[],
        implementations=["auto"],
        graphs="both",
        tokens=1,
        rounds=1,
        device=CPU,
    )

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(whole, "_stock", full)
    table = bench.cells[0].measure(lambda name: None)
    first, second = table.rows[f"decode {MODEL} 64 tokens 1 rows, left out"]
    assert "full, auto, graphs" in first and "graphs are CUDA's" in first
    assert whole.OWN in second and "no room" in second
    assert [row["name"] for row in table.rows[f"decode {MODEL} 64 tokens 1 rows"]] == ["full, auto"]


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.micro.whole import bench

    with pytest.raises(PlanError):
        bench(model=MODEL, dtype="float32", contexts=[8], plans=["snapkw"], device=CPU)
    monkeypatch.setattr(whole, "missing", lambda: "triton is not installed")
    with pytest.raises(KvtailorError, match="triton is not installed; leave out triton"):
        bench(model=MODEL, dtype="float32", contexts=[8], implementations=["triton"], device=CPU)
    assert "none of auto, reference, triton" in run("--implementations", "fast").output
    assert "nothing is left to measure" in run("--contexts", "").output


@needs_triton
def test_the_kernels_are_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtailor.ops.attention.triton import attend

    calls = []
    right = attend.attend_parts
    monkeypatch.setattr(attend, "attend_parts", lambda *given, **more: calls.append(1) or right(*given, **more))
    bench = whole.bench(
        model=MODEL,
        dtype="float32",
        contexts=[32],
        plans=[],
        implementations=["reference", "triton"],
        tokens=1,
        rounds=1,
        own=False,
        device=CPU,
    )
    table = bench.cells[0].measure(lambda name: None)
    rows = table.rows[f"decode {MODEL} 32 tokens 1 rows"]
    assert [row["name"] for row in rows] == ["full, reference", "full, triton"]
    # Once in each of two layers, for the token that fills the cache and for those of two rounds.
    assert len(calls) == 6
