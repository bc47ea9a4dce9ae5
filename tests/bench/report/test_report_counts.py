"""What a reader is told where records are missing, cut, too few, or of a plan that did nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.bench.report.test_report import needles, scored

from kvtailor.bench.report import summarise
from kvtailor.bench.schema import Record
from kvtailor.cli import main

HARD = [2.0 + 0.01 * (i % 7) for i in range(50)]
FULL = scored("full", HARD, held=100, size=1000)
ONE = scored("one", [x + 0.1 + 0.01 * (i % 3) for i, x in enumerate(HARD)], size=300)


def at(record: Record, depth: float) -> Record:
    return replace(record, point={**record.point, "depth": depth})


def noted(records: list[Record], words: str) -> list[str]:
    return [note for note in summarise(records).footnotes if words in note]


def report(folder: Path, *options: str):
    return CliRunner().invoke(main, ["report", str(folder), *options])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    deep = [at(needles(label, [1] * 4), depth) for depth in (0.1, 0.9) for label in ("full", "one")]
    lines = [record.to_json() + "\n" for record in [FULL, ONE, *deep]]
    (tmp_path / "records-1.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_a_cut_last_line_is_said(folder) -> None:
    whole = report(folder)
    assert whole.exit_code == 0 and whole.stderr == ""
    file = folder / "records-1.jsonl"
    file.write_bytes(file.read_bytes()[:-50])
    cut = report(folder)
    assert cut.exit_code == 0 and cut.stderr.count("\n") == 1
    for text in (cut.stderr, (folder / "report.md").read_text(), (folder / "report.html").read_text()):
        assert "damaged last line of records-1.jsonl was left out" in text
    assert "one 4 samples at 1 point, where full has 8 samples at 2 points" in (folder / "report.md").read_text()


def test_unequal_samples_are_said_once() -> None:
    few = scored("few", [x + 0.1 for x in HARD[:40]], size=250)
    [note] = noted([FULL, ONE, few], "not every plan has the same samples")
    assert "few 40 samples at 1 point, where full has 50 samples at 1 point" in note and "one" not in note.split(":")[2]
    assert not noted([FULL, ONE], "same samples")
    failed = replace(few, values={}, metrics={}, samples=None, error="out of memory")
    assert not noted([FULL, ONE, failed], "same samples")


@pytest.mark.parametrize(("count", "given"), [(2, False), (4, False), (5, True), (50, True)])
def test_an_interval_is_only_spoken_of_where_there_is_one(count, given) -> None:
    few = [scored("full", HARD[:count], held=100, size=1000), scored("one", ONE.values["nll"][:count], size=300)]
    [note] = noted(few, "ΔNLL:")
    assert ("95 % bootstrap interval" in note) == given and ("none is given below 5 windows" in note) != given
    assert (summarise(few).rows[1].loss.low is not None) == given


def test_a_plan_that_did_nothing_is_named() -> None:
    idle = scored("kivi(bits=4)", HARD, held=100, size=1000)
    [note] = noted([FULL, ONE, idle], "did nothing here")
    assert note.startswith("kivi(bits=4) did nothing here: each of its 50 samples")
    other = replace(idle, values={"nll": (HARD[0] + 1e-9, *HARD[1:])})
    moved = replace(idle, bytes_by_tier={"device": 10, "host": 990})
    skips = replace(idle, tokens_read=10.0)
    smaller = replace(idle, bytes_held=900)
    for each in (other, moved, skips, smaller):
        assert not noted([FULL, each], "did nothing here")


def test_shares_say_of_which_dtype_they_are_also_where_a_cache_is_in_another_than_its_model() -> None:
    def told(**dtypes: str) -> str:
        (note,) = noted([replace(each, bytes_full=2000, **dtypes) for each in (FULL, ONE)], "Shares of bytes")
        return note

    assert told(dtype="bfloat16").endswith(", in bfloat16 as this model.")
    assert told(dtype="float32").endswith(", in float32 as this model; of one in 16 bits they are twice as large.")
    half = told(dtype="float32", cache_dtype="bfloat16")
    assert half.endswith(", in bfloat16, where this model computes in float32.")


def test_numbers_of_a_cache_in_another_dtype_stand_apart() -> None:
    half = replace(FULL, cache_dtype="bfloat16", started="2030-01-01T00:00:00.000+00:00")
    assert half.key != FULL.key and FULL.key == replace(FULL, cache_dtype=None).key
    assert len(noted([FULL, ONE, half], "Left out: ")) == 1 and not noted([FULL, ONE], "Left out: ")
