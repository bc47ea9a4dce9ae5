"""Residency: hits of each policy on a cyclic scan against arithmetic and a plain simulation."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvtailor.store.residency import Residency, spread


def hits_of(policy: str, units: int, most: int | None, most_bytes: int | None, sizes: list[int], cycles: int) -> int:
    """Hits of the last of so many cycles."""
    residency = Residency(policy, list(range(units)), most, most_bytes)
    seen: dict[int, int] = {}
    hits = 0
    for cycle in range(cycles):
        for unit in range(units):
            hits += cycle == cycles - 1 and unit in residency.staying
            seen[unit] = sizes[unit]
            residency.used(unit, seen)
            assert most is None or len(residency.staying) <= most
            assert most_bytes is None or sum(sizes[u] for u in residency.staying) <= most_bytes
    return hits


def plainly(policy: str, units: int, most: int, cycles: int) -> int:
    """The same by a list with time stamps, for units of one size."""
    stamps: dict[int, int] = {}
    time = hits = 0
    for cycle in range(cycles):
        for unit in range(units):
            time += 1
            hits += cycle == cycles - 1 and unit in stamps
            if unit not in stamps and len(stamps) == most:
                goes = (max if policy == "mru" else min)(stamps, key=stamps.__getitem__)
                del stamps[goes]
            stamps[unit] = time
    return hits


@pytest.mark.parametrize("units,most", [(4, 1), (6, 3), (12, 7), (16, 15), (5, 5), (5, 8)])
def test_hits_are_what_arithmetic_says(units: int, most: int) -> None:
    everything = most >= units
    assert hits_of("lru", units, most, None, [9] * units, 5) == (units if everything else 0)
    assert hits_of("fixed", units, most, None, [9] * units, 5) == min(most, units)
    assert hits_of("fixed", units, None, 9 * most + 4, [9] * units, 5) == min(most, units)
    assert hits_of("lru", units, None, 9 * most + 4, [9] * units, 5) == (units if everything else 0)
    cycles = 8 * units
    total = sum(hits_of("mru", units, most, None, [9] * units, n) for n in range(cycles - units + 2, cycles + 1))
    wanted = Fraction(units) if everything else Fraction(units * (most - 1), units - 1)
    assert Fraction(total, units - 1) == wanted


@pytest.mark.parametrize("policy", ["mru", "lru"])
@pytest.mark.parametrize("units,most", [(4, 1), (6, 3), (9, 8)])
def test_is_the_plain_simulation(policy: str, units: int, most: int) -> None:
    for cycles in (1, 2, 3, 7):
        assert hits_of(policy, units, most, None, [1] * units, cycles) == plainly(policy, units, most, cycles)


def test_without_limits_nothing_stays() -> None:
    for policy in ("fixed", "mru", "lru"):
        assert hits_of(policy, 4, None, None, [1] * 4, 3) == 0
        assert hits_of(policy, 4, 0, None, [1] * 4, 3) == 0
        assert hits_of(policy, 4, None, 0, [1] * 4, 3) == 0


def test_a_fixed_set_only_shrinks_where_it_no_longer_fits() -> None:
    residency = Residency("fixed", [0, 1, 2, 3], None, 100)
    kept = []
    for size in (10, 25, 26, 33, 34, 50, 51, 100, 101):
        for unit in range(4):
            residency.used(unit, dict.fromkeys(range(4), size))
        kept.append(len(residency.staying))
    assert kept == [4, 4, 3, 3, 2, 2, 1, 1, 0]


def test_a_unit_that_is_too_large_alone_is_never_taken_in() -> None:
    sizes = [1, 50, 1]
    assert hits_of("mru", 3, None, 10, sizes, 4) == hits_of("lru", 3, None, 10, sizes, 4) == 2


@pytest.mark.parametrize("count", [1, 2, 7, 12, 32])
def test_what_is_left_out_lies_evenly(count: int) -> None:
    for chosen in range(count + 1):
        members = spread(count, chosen)
        assert len(members) == chosen and members <= set(range(count))
        out = sorted(set(range(count)) - members)
        gaps = {(b - a) % count or count for a, b in zip(out, out[1:] + out[:1], strict=True)}
        assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("policy,hits", [("fixed", 3), ("mru", 2), ("lru", 0)])
def test_what_is_settled_has_as_many_hits_as_a_cycle(policy: str, hits: int) -> None:
    residency = Residency(policy, [1, 2, 3, 4, 5], 3, None)
    assert len(residency.settled(dict.fromkeys(range(1, 6), 7))) == hits
    assert len(Residency(policy, [1, 2], None, 14).settled({1: 7, 2: 7})) == 2
    assert Residency(policy, [1, 2], None, None).settled({1: 7, 2: 7}) == frozenset()
