"""`micro pages`: every cache in small pages and in huge ones, and when there is nothing to compare."""

from __future__ import annotations

import json
import mmap

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks.micro import cases, decode, pages
from benchmarks.micro.__main__ import micro
from benchmarks.micro.timer import Measured
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.hf.run.stock import fill, into_huge_pages, static_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import huge_pages

CPU = torch.device("cpu")
PAGE = 1 << 12


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A small model, and a system with huge pages of 4 KiB that leaves them to programs."""
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setitem(RANDOM_SHAPES, cases.MODEL, {**RANDOM_SHAPES[cases.MODEL], **narrow})
    seen: list[int] = []

    def advise(mapping: mmap.mmap, first: int, size: int) -> None:
        seen.append(huge_pages._address(mapping) + first)

    monkeypatch.delenv("KVTAILOR_HUGE_PAGES", raising=False)
    monkeypatch.setattr(huge_pages, "_LEAST", PAGE)
    monkeypatch.setattr(huge_pages, "_setting", lambda: "madvise")
    monkeypatch.setattr(huge_pages, "_page_bytes", lambda: PAGE)
    monkeypatch.setattr(huge_pages, "_advise", advise)
    monkeypatch.setattr(pages, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(decode, "read_bandwidth", lambda device: 1e9)
    # One round is all there is, whatever else the machine does.
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: False)
    monkeypatch.setattr(pages, "_in_huge_pages", lambda: len(seen) * PAGE)
    return seen


def run(*words: str) -> Result:
    return CliRunner().invoke(micro, [*words])


def test_every_cache_is_there_in_both(asked: list[int]) -> None:
    found = run("pages", "--contexts", "320", "--rounds", "1")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in told["tables"]["pages bfloat16 320"]}
    plans = ["StaticCache + sdpa", "full", *(line.format(budget=40) for line in decode.SMALLER)]
    assert set(rows) == {"DynamicCache + sdpa", *plans, *(f"{plan}, huge pages" for plan in plans)}
    for plan in plans:
        small, large = rows[plan], rows[f"{plan}, huge pages"]
        assert small["cache_bytes"] == large["cache_bytes"]
        assert small["bytes_in_huge_pages"] == 0 < large["bytes_in_huge_pages"], plan
    assert rows["StaticCache + sdpa, huge pages"]["ratio"] in (1.0, None)
    assert "time in huge pages over time in small ones" in found.stdout
    assert told["machine"]["huge_pages"] == PAGE


def test_announced_samples_are_taken(asked: list[int]) -> None:
    (cell,) = pages.bench(dtypes=["float32"], contexts=[320], rounds=1, device=CPU).cells
    said: list[str] = []
    cell.measure(said.append)
    assert len(said) == cell.samples


def test_what_is_left_of_the_time(asked: list[int]) -> None:
    times = {"full": 4.0, "full, huge pages": 3.0, "DynamicCache + sdpa": 9.0}
    results = [Measured(name, [seconds], cache_bytes=1000) for name, seconds in times.items()]
    _, line = pages._brought(results, {"full": 0, "full, huge pages": 900})
    assert line.split() == ["full", "0.75", "90%"]


def test_where_none_are_asked_for_there_is_nothing_to_compare(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTAILOR_HUGE_PAGES", "0")
    found = run("pages", "--contexts", "320")
    assert found.exit_code != 0 and "not asked for: KVTAILOR_HUGE_PAGES is 0" in found.output
    assert "nothing to compare" in found.output and asked == []


def test_decode_shows_the_stock_cache_in_both(asked: list[int]) -> None:
    """And announces as many samples as it takes."""
    made = decode.bench(dtypes=["float32"], contexts=[320], prefills=[], rounds=1, device=CPU)
    said: list[str] = []
    table = made.cells[0].measure(said.append)
    assert len(said) == made.cells[0].samples
    names = [row["name"] for row in table.rows["decode float32 320"]]
    assert len(names) == 10 and "StaticCache + sdpa, huge pages" in names
    assert table.lines[-1].startswith("  of StaticCache + sdpa, huge pages: StaticCache + sdpa ")


def test_ratios_to_the_stock_cache_in_huge_pages() -> None:
    times = {"StaticCache + sdpa": 3.0, "StaticCache + sdpa, huge pages": 2.0, "full": 1.0}
    results = [Measured(name, [seconds]) for name, seconds in times.items()]
    (line,) = decode._over_huge_pages(results)
    assert line == "  of StaticCache + sdpa, huge pages: StaticCache + sdpa 1.50; full 0.50"
    assert decode._over_huge_pages(results[:1]) == []


@torch.no_grad()
def test_a_stock_cache_in_huge_pages_holds_and_answers_the_same(asked: list[int]) -> None:
    model = cases.random_llama(torch.float32, CPU)
    caches = [static_cache(model, 200) for _ in range(2)]
    for cache in caches:
        fill(cache, cases.model_states(model, 150))
    into_huge_pages(caches[1])
    assert all(each.data_ptr() in asked for layer in caches[1].layers for each in (layer.keys, layer.values))
    for _ in range(3):
        one, other = (model(torch.tensor([[7]]), **hand_cache(cache)).logits for cache in caches)
        assert torch.equal(one, other)
