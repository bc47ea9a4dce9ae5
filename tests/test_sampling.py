"""The sample of `make test`: what it leaves out, what it never does, and that its seed gives it again."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

from tests.support import sampling
from tests.support.sampling import SHARE, choose, few, sample


class Item:
    """As much of pytest's item as the sampler reads."""

    def __init__(self, nodeid: str, *marks: str, **params: object) -> None:
        self.nodeid, self.marks = nodeid, marks
        if params:
            self.callspec = SimpleNamespace(params=params, indices=dict.fromkeys(params, 0))

    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None


def cases(name: str, count: int, *marks: str) -> list[Any]:
    return [Item(f"{name}[{i}]", *marks, value=i) for i in range(count)]


def ids(items: list[Any], seed: int, seconds: dict[str, float]) -> set[str]:
    return {item.nodeid for item in sample(items, seed, seconds)}


def test_what_is_cheap_or_new_runs_whole_and_what_is_long_never() -> None:
    items = [*cases("a.py::new", 50), *cases("a.py::cheap", 50), *cases("a.py::slow", 5, "long")]
    assert ids(items, 1, {"a.py::cheap": SHARE}) == {item.nodeid for item in items[:100]}


def test_what_is_dear_runs_in_part_and_another_part_on_another_day() -> None:
    items, seconds = cases("a.py::dear", 50), {"a.py::dear": 10 * SHARE}
    days = [ids(items, seed, seconds) for seed in range(100)]
    assert {len(day) for day in days} == {5}
    assert days[3] == ids(items, 3, seconds) and len({frozenset(day) for day in days}) > 90
    assert len(set().union(*days)) == 50


def test_at_least_one_case_runs_and_a_test_without_cases_on_some_days() -> None:
    seconds = {"a.py::dear": 100 * SHARE, "a.py::one": 4 * SHARE}
    assert {len(ids(cases("a.py::dear", 3), seed, seconds)) for seed in range(20)} == {1}
    days = sum(len(ids([Item("a.py::one")], seed, seconds)) for seed in range(400))
    # A quarter of 400 days, within four standard deviations.
    assert 65 < days < 135


def test_what_a_sample_must_have_is_in_all_of_them() -> None:
    items = [*cases("a.py::dear", 30), Item("a.py::dear[ray]", "always", value=30)]
    assert all("a.py::dear[ray]" in ids(items, seed, {"a.py::dear": 50 * SHARE}) for seed in range(20))


def test_tests_that_share_a_fixture_run_on_the_same_days() -> None:
    items: list[Any] = [Item(f"a.py::t{i}", "together") for i in range(3)]
    days = [len(ids(items, seed, {"a.py::t0": 3 * SHARE})) for seed in range(100)]
    assert set(days) == {0, 3}


def test_every_value_occurs_before_any_pair_and_pairs_before_anything_twice() -> None:
    """4 x 3 x 2 cases have 26 pairs; the 12 of the two long axes need 12 cases."""
    product = [dict(zip("abc", each, strict=True)) for each in itertools.product(range(4), range(3), range(2))]
    for seed in range(20):
        draw = random.Random(seed)
        places = choose(product, 4, draw)
        assert len(set(places)) == 4
        assert {(k, v) for i in places for k, v in product[i].items()} == {
            (k, v) for c in product for k, v in c.items()
        }
        more = [product[i] for i in choose(product, 14, draw)]
        for one, other in itertools.combinations("abc", 2):
            assert len({(c[one], c[other]) for c in more}) == len({(c[one], c[other]) for c in product}), seed


def test_a_loop_inside_a_test_is_whole_without_a_sample(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "_ACTIVE", {})
    assert few(range(10), 3) == list(range(10))
    monkeypatch.setattr(sampling, "_ACTIVE", {"seed": 5})
    assert len(few(range(10), 3)) == 3 and few(range(10), 3) == sorted(few(range(10), 3)) and few("ab", 3) == ["a", "b"]


def test_a_samples_report_adds_what_the_table_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "SECONDS", tmp_path / "seconds.json")
    sampling.SECONDS.write_text('{"tests/a/test_b.py": {"test_old": 90.0}}')
    cases = ["test_old", "test_new[1]", "test_new[2]", "test_quick"]
    times = [1.0, 2.0, 3.0, 0.1]
    lines = (f'<testcase classname="tests.a.test_b" name="{n}" time="{t}"/>' for n, t in zip(cases, times, strict=True))
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites>{''.join(lines)}</testsuites>")
    sampling.write_seconds(report, add=True)
    assert sampling.read_seconds() == {"tests/a/test_b.py::test_old": 90.0, "tests/a/test_b.py::test_new": 5.0}
    sampling.write_seconds(report)
    assert sampling.read_seconds() == {"tests/a/test_b.py::test_old": 1.0, "tests/a/test_b.py::test_new": 5.0}
