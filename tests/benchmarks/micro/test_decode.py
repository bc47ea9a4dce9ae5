"""`python -m benchmarks.micro decode`: what it times, against what, and what it says."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks.micro import cases, decode
from benchmarks.micro.__main__ import micro
from benchmarks.micro.timer import Measured
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.hf.model.config import RANDOM_SHAPES

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the bench with fewer weights, where only what is done counts."""
    narrow = {"hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(RANDOM_SHAPES, cases.MODEL, {**RANDOM_SHAPES[cases.MODEL], **narrow})
    # Whatever else runs on this machine.
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: False)


def run(*words: str) -> tuple[dict, str, str]:
    found = CliRunner().invoke(micro, ["decode", *words])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.splitlines()[-1]), found.stdout, found.stderr


def test_it_runs_and_ends_with_json(small: None) -> None:
    sizes = ["--dtype", "float32", "--contexts", "320", "--prefill", "320", "--rounds", "1", "--prefill-rounds", "1"]
    told, said, progress = run(*sizes)
    assert list(told["tables"]) == ["decode float32 320", "prefill float32 320"]
    rows = {row["name"]: row for row in told["tables"]["decode float32 320"]}
    assert list(rows)[:3] == ["StaticCache + sdpa", "DynamicCache + sdpa", "full"] and len(rows) == 9
    assert "snapkv + adakv @ tokens=40" in rows and "full after one token" in rows
    # What is held is read from the caches: keys and values of 8 heads of 128 on 4 layers, in float32.
    assert rows["full"]["cache_bytes"] >= 320 * 4 * 2 * 8 * 128 * 4 > rows["vector(bits=4)"]["cache_bytes"]
    assert "an eighth" not in said and "StaticCache with sdpa, the fastest that transformers has" in said
    assert "[2 of 2, 0:" in progress and told["machine"]["threads"] == torch.get_num_threads()


@pytest.mark.long
def test_a_prompt_has_the_most_memory_that_it_took(small: None) -> None:
    words = ["--dtype", "float32", "--contexts", "", "--prefill", "2048", "--prefill-rounds", "1", "--layers", "1"]
    told, said, _ = run(*words)
    rows = {row["name"]: row for row in told["tables"]["prefill float32 2048"]}
    # Keys and values of one layer, 8 heads of 128, in float32: every side holds them at some time.
    cache = 2048 * 2 * 8 * 128 * 4
    assert all(cache < row["peak_bytes"] < 20 * cache for row in rows.values())
    assert f"peak {rows['full']['peak_bytes'] / 2**20:.0f} MiB" in said and "random-llama-gqa of 1 layer," in said


def test_a_hybrid_has_all_its_layers() -> None:
    words = ["decode", "--model", "random-qwen3-next", "--layers", "1"]
    found = CliRunner().invoke(micro, words)
    assert found.exit_code == 2 and "layers of random-qwen3-next are of several kinds" in found.output


def test_no_contexts_are_none(small: None) -> None:
    words = ["--dtype", "bfloat16", "--contexts", "", "--prefill", "320", "--prefill-rounds", "1"]
    assert list(run(*words)[0]["tables"]) == ["prefill bfloat16 320"]


def test_announced_samples_are_taken(small: None) -> None:
    made = decode.bench(
        dtypes=["float32"], contexts=[320], prefills=[320], rounds=1, prefill_rounds=1, device=torch.device("cpu")
    )
    for cell in made.cells:
        said: list[str] = []
        cell.measure(said.append)
        assert len(said) == cell.samples, cell.name


def test_the_model_has_the_shape_of_its_name_and_each_is_another_with_the_same_weights() -> None:
    one, two = (cases.random_llama(torch.bfloat16, CPU) for _ in range(2))
    config = one.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert config.hidden_size == RANDOM_SHAPES[cases.MODEL]["hidden_size"] and config.vocab_size == cases.VOCABULARY
    assert one is not two and one.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_floors_are_bytes_over_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(decode, "decode", lambda *a, **k: [Measured(decode._BASE, [2.0], bytes_read=10**9)])
    bench = decode.bench(dtypes=["float32"], contexts=[128], prefills=[], device=CPU)
    table = bench.cells[0].measure(lambda name: None)
    assert table.rows["decode float32 128"][0]["floor_ms"] == 1000.0 and "1.0 GB/s" in bench.machine


def test_the_part_of_a_cache_is_what_it_takes_above_the_rest_of_the_model() -> None:
    gigabyte = 10**9
    sides = [
        Measured("full", [0.9, 1.1, 1.3], cache_bytes=gigabyte),
        Measured("small", [0.2, 0.2, 0.2], cache_bytes=10**6),
        Measured("unread", [0.5, 0.5, 0.5]),
        Measured("left out", [], cache_bytes=gigabyte),
        Measured(decode._EMPTY, [0.0, 0.1, 0.2], cache_bytes=gigabyte),
    ]
    found = decode.caches_over_reads(sides, 2e9)
    assert list(found) == ["full"]
    # A gigabyte takes half a second; quartiles are 1.0 and 1.2, of the rest 0.05 and 0.15.
    assert found["full"] == pytest.approx((2.0, 1.7, 2.3))
    assert decode._told_over_reads(found) == [
        "  the cache's part of a token over a plain read of its bytes: full 2.0 [1.7, 2.3]"
    ]
    assert decode.caches_over_reads(sides[:-1], 2e9) == {} and decode._told_over_reads({}) == []


def test_a_hybrid_is_timed_beside_a_plain_model_of_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer in four attends; the last line compares what the context costs it with the same in a plain model."""
    narrow = {"hidden_size": 64, "intermediate_size": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
    for name in ("random-qwen3-next", "random-llama-256"):
        known = {key: value for key, value in narrow.items() if key in RANDOM_SHAPES[name]}
        monkeypatch.setitem(RANDOM_SHAPES, name, {**RANDOM_SHAPES[name], **known})
    sizes = ["--dtype", "float32", "--contexts", "320", "--prefill", "", "--rounds", "2"]
    told, said, _ = run("--model", "random-qwen3-next", *sizes)
    rows = {row["name"]: row for row in told["tables"]["decode float32 320"]}
    assert len(rows) == 11 and rows["plain model, full"]["cache_bytes"] >= 320 * 2 * 2 * 2 * 256 * 4
    # Six layers keep 2 x 128 x 128 numbers, and the newest inputs of a convolution.
    states = 6 * 4 * (2 * 128 * 128 + 4 * (2 * 128 + 2 * 128))
    assert rows["full"]["cache_bytes"] >= 320 * 2 * 2 * 2 * 256 * 4 + states
    assert "what the context costs a layer that attends:" in said


def test_the_cost_of_a_context_has_a_range() -> None:
    def measured(name: str, *seconds: float) -> Measured:
        return Measured(name=name, seconds=list(seconds), disturbed=0, bytes_read=None, cache_bytes=None)

    times = {"full": (0.3, 0.4, 0.5), "full after one token": (0.1, 0.1, 0.1), "plain model, full": (0.02, 0.02, 0.02)}
    plain = measured("plain model, after one token", 0.01, 0.01, 0.01)
    (line,) = decode._cost_of_context([*(measured(n, *s) for n, s in times.items()), plain], "random-qwen3-next")
    assert "150.00 ms [125.00, 175.00] in random-qwen3-next, 5.00 ms [5.00, 5.00]" in line and "told apart" not in line
