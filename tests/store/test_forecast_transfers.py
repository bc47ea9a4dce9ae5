"""The predicted step against a plain simulation of one link and one processor, and the set that it chooses."""

from __future__ import annotations

import itertools
import random

import pytest

from kvtailor.store.residency import forecast_transfers, step_seconds


def simulated(sizes: list[int], resident: set[int], rate: float, compute: list[float], steps: int = 40) -> float:
    """One event after the other: a unit starts once it is there, and its start sends for the next that is not."""
    count, here = len(sizes), set(resident)
    coming: dict[int, float] = {}
    now, starts = 0.0, []
    for turn in range(steps * count):
        unit = turn % count
        if unit not in here:
            now = max(now, coming.pop(unit, now + sizes[unit] / rate))
        if unit == 0:
            starts.append(now)
        following = [(unit + i) % count for i in range(1, count)]
        absent = next((each for each in following if each not in here), None)
        if absent is not None and absent not in coming:
            coming[absent] = now + sizes[absent] / rate
        now += compute[unit]
    return (starts[-1] - starts[len(starts) // 2]) / (len(starts) - 1 - len(starts) // 2)


@pytest.mark.parametrize("seed", range(60))
def test_is_what_a_simulation_gives(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    sizes = [draw.randint(1, 100) for _ in range(count)]
    compute = [draw.uniform(0.1, 3) for _ in range(count)]
    resident = {unit for unit in range(count) if draw.random() < 0.5}
    found = step_seconds(sizes, resident, rate=40.0, compute=compute)
    assert found == pytest.approx(simulated(sizes, resident, 40.0, compute), rel=1e-9)


def test_report_r4_is_bound_by_its_link() -> None:
    """16 of 32 layers of Llama-2-7B in float16 at 8,192 tokens over 25 GB/s: 86 ms, where the bytes alone say so."""
    layer = 8192 * 2 * 32 * 128 * 2
    found = forecast_transfers([layer] * 32, rate=25e9, compute=[10e-3 / 32] * 32, most_bytes=16 * layer)
    assert found.bytes_moved == 16 * layer and found.link_seconds == pytest.approx(0.0859, rel=1e-3)
    assert found.step_seconds == pytest.approx(found.link_seconds) and found.stall > 0.85


@pytest.mark.parametrize("most", [0, 3, 6, 12])
def test_no_even_set_that_fits_is_faster_and_none_as_fast_is_smaller(most: int) -> None:
    sizes, compute = [10] * 12, [1.0] * 12
    for rate in (2.0, 5.0, 11.0, 100.0):
        found = forecast_transfers(sizes, rate=rate, compute=compute, most_bytes=10 * most)
        assert 10 * len(found.resident) <= 10 * most
        every = (set(each) for chosen in range(most + 1) for each in itertools.combinations(range(12), chosen))
        best = min((step_seconds(sizes, each, rate=rate, compute=compute), len(each)) for each in every)
        assert found.step_seconds == pytest.approx(best[0]) and len(found.resident) == best[1]


def test_everything_resident_is_computing_alone() -> None:
    found = forecast_transfers([5, 5], rate=1.0, compute=[1.0, 2.0], most_bytes=10)
    assert (found.step_seconds, found.stall, found.bytes_moved) == (3.0, 0.0, 0)
