"""The one timer: turns, layers, warm-up, disturbed samples, and what a table makes of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro import timer
from benchmarks.micro.tables import compared
from benchmarks.micro.timer import Measured, Side, rounds_in_turns, time_in_turns


class Ticks:
    """A clock that a side moves by as many seconds as its turn takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer.Neighbours, "disturbed", lambda self: False)


def test_turns_begin_with_another_side_each_round() -> None:
    found = list(rounds_in_turns("abc", 3, warmup=1))
    assert found == [
        (-1, "c"),
        (-1, "a"),
        (-1, "b"),
        (0, "a"),
        (0, "b"),
        (0, "c"),
        (1, "b"),
        (1, "c"),
        (1, "a"),
        (2, "c"),
        (2, "a"),
        (2, "b"),
    ]


def test_rounds_are_added_until_all_have_enough_or_patience_ends() -> None:
    counts = {"a": 0, "b": 0}
    for index, side in rounds_in_turns("ab", 2, warmup=1, patience=5, enough=lambda side: counts[side] >= 2):
        # Every other sample of b is no good.
        counts[side] += index >= 0 and (side == "a" or index % 2 == 1)
    assert counts == {"a": 4, "b": 2}
    assert max(index for index, _ in rounds_in_turns("ab", 2, warmup=0, patience=3, enough=lambda side: False)) == 5


def test_a_sample_on_a_cpu_is_the_next_layer_and_warm_ups_do_not_count(undisturbed: None) -> None:
    seen: list[str] = []
    sides = [Side(name=name, run=lambda layer, name=name: seen.append(f"{name}{layer}")) for name in "ab"]
    said: list[str] = []
    found = time_in_turns(sides, 4, warmup=2, layers=3, advance=said.append)
    assert [len(each.seconds) for each in found] == [4, 4] and said == ["a", "b", "b", "a"] * 3
    assert seen == ["a1", "b1", "b2", "a2", "a0", "b0", "b1", "a1", "a2", "b2", "b0", "a0"]


def test_a_sweep_goes_over_all_layers_and_is_divided_by_them(undisturbed: None) -> None:
    clock, seen = Ticks(), []

    def run(layer: int) -> None:
        seen.append(layer)
        clock.now += 2.0 + layer

    (found,) = time_in_turns([Side(name="a", run=run)], 2, warmup=1, layers=3, clock=clock, sweep=True)
    assert seen == [0, 1, 2] * 3 and found.seconds == [3.0, 3.0]


def test_disturbed_samples_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, True, True, False, False])
    monkeypatch.setattr(timer.Neighbours, "disturbed", lambda self: next(answers))
    sides = [Side(name=name, run=lambda layer: None, bytes_read=7, cache_bytes=5) for name in "ab"]
    # The first round warms up: a True there counts nowhere.
    found = time_in_turns(sides, 2, warmup=1)
    assert [(each.name, len(each.seconds), each.disturbed) for each in found] == [("a", 1, 1), ("b", 1, 1)]
    assert all((each.bytes_read, each.cache_bytes) == (7, 5) for each in found)


def test_with_another_clock_no_sample_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer.Neighbours, "disturbed", lambda self: True)
    clock = Ticks()
    (found,) = time_in_turns([Side(name="a", run=lambda layer: None)], 3, clock=clock)
    assert found.seconds == [0.0] * 3 and found.disturbed == 0


def test_a_table_has_medians_ratios_and_floors_by_hand() -> None:
    results = [
        Measured("base", [0.010, 0.030, 0.020], bytes_read=10, cache_bytes=3),
        Measured("half", [0.010, 0.010], 2),
        # Read faster than memory gives: it came from a cache, and no floor stands beside it.
        Measured("cached", [0.001], bytes_read=10),
        Measured("none", [], 4),
    ]
    lines, rows = compared("title", results, "base", bandwidth=1000.0, notes=["a note"])
    assert lines[:3] == ["", "title", "a note"] and [row["name"] for row in rows] == ["base", "half", "cached", "none"]
    base, half, cached, none = rows
    assert (base["median_ms"], base["ratio"], base["floor_ms"], base["cache_bytes"]) == (20.0, 1.0, 10.0, 3)
    assert (base["q1_ms"], base["q3_ms"]) == pytest.approx((15.0, 25.0))
    assert (half["ratio"], half["floor_ms"], half["samples"], half["disturbed"]) == (0.5, None, 2, 2)
    assert cached["floor_ms"] is None and (none["median_ms"], none["ratio"], none["disturbed"]) == (None, None, 4)
    assert "floor 10.00 ms (3 samples, 0 disturbed)" in lines[3] and "no undisturbed sample (4 left out)" in lines[6]


def test_a_table_without_its_base_has_no_ratios() -> None:
    lines, rows = compared("title", [Measured("a", [0.5])], "b")
    assert rows[0]["median_ms"] == 500.0 and rows[0]["ratio"] is None and "–" in lines[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_on_a_gpu_a_graph_and_the_host_agree() -> None:
    device = torch.device("cuda")
    data = torch.randn((2, 1 << 26), device=device)
    sides = [Side(name=str(kind), run=lambda layer: data[layer].sum(), recorded=kind) for kind in (True, False)]
    graph, host = time_in_turns(sides, 5, layers=2, device=device)
    assert min(graph.seconds) > 0 and min(host.seconds) > 0.5 * min(graph.seconds)


def test_a_pause_comes_before_each_sample_and_is_no_part_of_it(
    undisturbed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, pauses = Ticks(), []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += seconds

    def run(_: int) -> None:
        clock.now += 3.0

    monkeypatch.setattr(timer.time, "sleep", sleep)
    sides = [Side(name=name, run=run) for name in "ab"]
    found = time_in_turns(sides, 2, warmup=1, clock=clock, pause=0.5)
    assert pauses == [0.5] * 6 and [each.seconds for each in found] == [[3.0, 3.0]] * 2
    time_in_turns(sides, 2, clock=clock)
    assert len(pauses) == 6
