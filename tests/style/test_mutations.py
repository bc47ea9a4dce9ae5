"""The listed faults can be put into today's sources: `tests/mutations/run.py` would end at one that cannot."""

from __future__ import annotations

from pathlib import Path

from tests.mutations.listed import MUTATIONS

ROOT = Path(__file__).parents[2]


def test_each_fault_has_its_place_and_its_tests() -> None:
    wrong = []
    for each in MUTATIONS:
        source = ROOT / "src" / "kvtailor" / each.path
        times = source.read_text(encoding="utf-8").count(each.old) if source.exists() else 0
        missing = [name for name in each.tests if not (ROOT / "tests" / name).exists()]
        if times != 1 or missing:
            wrong.append(f"{each.path}: {each.old!r} {times} times; no tests {missing}")
    assert not wrong
