"""The sample of `make test`: what takes long runs in part, another part each day.

Every test function gets about 0.2 seconds. A function that takes less runs whole, and so does one that nobody has
timed. One that takes more runs as many of its cases as fit, at least one. They are chosen so that every value of every
parameter occurs, then every pair of values, as far as the number allows; ties fall by the seed and the function's name.
A test without cases runs on as many days as its seconds allow: one of 4 seconds about every twentieth.
Tests marked `together` share a costly fixture: all of a file run, or none. What is marked `long` is left out,
and what is marked `always` is in every sample.

The seed is the date (UTC), printed in the header; `--sample-seed` gives another. It is drawn once, and pytest-xdist
hands it to its workers, so that all collect the same. Without `--sample` nothing is left out.

The seconds are in `seconds.json`, from a run of everything that left a report; how fast its machine was does not
matter, since only the share of a function counts:

    OMP_NUM_THREADS=1 .venv/bin/pytest -q -n 2 -m "not long" --junit-xml=build/tests.xml
    .venv/bin/python -m tests.support.sampling build/tests.xml

A sample's report has all cases of the functions that the table lacks: `--add` adds these and leaves the others.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

SECONDS = Path(__file__).with_name("seconds.json")
SHARE = 0.2  # seconds of one function, on the machine of the table
T = TypeVar("T")
_ACTIVE: dict[str, int] = {}  # the seed, while a sample runs


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample", "a sample of the tests")
    group.addoption("--sample", action="store_true", help="run a sample that changes daily, without what is long")
    group.addoption("--sample-seed", type=int, help="the sample of another day: 20261127, say")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.sample:
        if config.option.sample_seed is None:
            config.option.sample_seed = int(datetime.now(UTC).strftime("%Y%m%d"))
        _ACTIVE["seed"] = config.option.sample_seed


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.option.sample:
        return None
    return f"a sample of the tests; the same again: --sample --sample-seed {config.option.sample_seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, obj: object) -> list[pytest.Item] | None:
    """What is marked `long` is left out before its cases are made: half of all cases are of it."""
    if not _ACTIVE or not callable(obj):
        return None
    marks = getattr(obj, "pytestmark", [])
    names = {mark.name for mark in (marks if isinstance(marks, list) else [marks])}
    return [] if "long" in names or collector.get_closest_marker("long") is not None else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.sample:
        return
    chosen = sample(items, config.option.sample_seed, read_seconds())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def read_seconds() -> dict[str, float]:
    """Seconds of each function that takes more than its share, by `path::name`."""
    table = json.loads(SECONDS.read_text(encoding="utf-8"))
    return {f"{path}::{name}": seconds for path, names in table.items() for name, seconds in names.items()}


def sample(items: Iterable[pytest.Item], seed: int, seconds: dict[str, float]) -> set[pytest.Item]:
    """The items of the seed's sample; what is left of one file does not depend on the others."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("long") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    files: dict[str, float] = defaultdict(float)
    for name, cases in functions.items():
        if cases[0].get_closest_marker("together") is not None:
            files[name.partition("::")[0]] += seconds.get(name, 0.0)
    chosen: set[pytest.Item] = set()
    for name, cases in functions.items():
        if cases[0].get_closest_marker("together") is not None:
            file = name.partition("::")[0]
            if random.Random(f"{seed} {file}").random() < SHARE / max(SHARE, files[file]):
                chosen.update(cases)
        else:
            draw = random.Random(f"{seed} {name}")
            part = SHARE / max(SHARE, seconds.get(name, 0.0))
            count = max(1, round(len(cases) * part)) if len(cases) > 1 else int(draw.random() < part)
            chosen.update(cases[place] for place in choose([axes_of(case) for case in cases], count, draw))
        chosen.update(case for case in cases if case.get_closest_marker("always") is not None)
    return chosen


def choose(cases: Sequence[dict[str, object]], count: int, draw: random.Random) -> list[int]:
    """Places of `count` cases that have as many values of their axes, and then pairs of values, as can be."""
    if count >= len(cases):
        return list(range(len(cases)))
    values = [frozenset(case.items()) for case in cases]
    pairs = [frozenset(itertools.combinations(sorted(case.items(), key=repr), 2)) for case in cases]
    order = draw.sample(range(len(cases)), len(cases))
    chosen: list[int] = []
    seen: set[object] = set()
    while len(chosen) < count:
        best = max(order, key=lambda place: (len(values[place] - seen), len(pairs[place] - seen)))
        order.remove(best)
        chosen.append(best)
        seen |= values[best] | pairs[best]
    return chosen


def axes_of(item: pytest.Item) -> dict[str, object]:
    """What each parameter is in this case: its text where that is the same in every process, its place else."""
    call = getattr(item, "callspec", None)
    if call is None:
        return {}
    plain = (str, int, float, bool, type(None))
    return {name: repr(v) if isinstance(v, plain) else call.indices[name] for name, v in call.params.items()}


def few(values: Iterable[T], count: int) -> list[T]:
    """`count` of the values in a sample, others each day, and all of them in a whole run; for loops inside one test."""
    every = list(values)
    if not _ACTIVE or count >= len(every):
        return every
    places = random.Random(f"{_ACTIVE['seed']} {len(every)}").sample(range(len(every)), count)
    return [every[place] for place in sorted(places)]


def write_seconds(report: Path, *, add: bool = False) -> None:
    """Write the table from pytest's `--junit-xml`; functions within their share are left out, and so run whole.

    Args:
        report: of a run of everything, or of a sample.
        add: functions that the table has keep their seconds, as a sample ran few of their cases.
    """
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        # A class is the last part, and has a capital: tests.seam.model.test_long_rope.TestLongRope.
        parts = case.get("classname", "").split(".")
        inside = [part for part in parts if part[:1].isupper()]
        module = "/".join(parts[: len(parts) - len(inside)]) + ".py"
        name = "::".join([*inside, case.get("name", "").partition("[")[0]])
        totals[module][name] += float(case.get("time", 0))
    for module, names in (json.loads(SECONDS.read_text(encoding="utf-8")) if add else {}).items():
        totals[module] |= names
    table = {
        module: {name: round(seconds, 1) for name, seconds in sorted(names.items()) if seconds > SHARE}
        for module, names in sorted(totals.items())
    }
    text = json.dumps({module: names for module, names in table.items() if names}, indent=1)
    SECONDS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_seconds(Path(sys.argv[1]), add="--add" in sys.argv[2:])
