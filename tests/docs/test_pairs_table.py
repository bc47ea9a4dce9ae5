"""What docs/measured.md says of pairs of a choosing method and a codec is what the records in docs/records say."""

from __future__ import annotations

import copy
import runpy

import pytest
from tests.docs.test_site import REPOSITORY

SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "write_pairs.py"))


def test_the_page_is_what_the_records_say():
    text = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert all(f"<!-- pairs: {name} -->" in text for name in ("how", "codecs", "above"))
    assert SCRIPT["written"](text, SCRIPT["read"]()) == text


@pytest.mark.parametrize("name", SCRIPT["RECORDS"])
def test_another_ratio_in_a_record_is_another_page(name):
    text, runs = SCRIPT["PAGE"].read_text(encoding="utf-8"), copy.deepcopy(SCRIPT["read"]())
    row = max((row for row in runs[name][1] if "ratio" in row), key=lambda row: row["ratio"])
    row["ratio"] += 0.02
    assert SCRIPT["written"](text, runs) != text


@pytest.mark.parametrize("name", SCRIPT["RECORDS"])
def test_a_ratio_is_that_of_its_times_and_every_pair_above_has_a_reason(name):
    for row in SCRIPT["read"]()[name][1]:
        if "ratio" not in row:
            assert row["left_out"]
            continue
        ms = row["ms"]
        assert row["ratio"] == pytest.approx(ms["pair"] / max(ms["method"], ms["codec"]), abs=2e-3)
        pair = f"{row['method']} + {row['codec']}"
        assert row["ratio"] <= SCRIPT["WIDEST"] or SCRIPT["WHY"].get(pair, SCRIPT["WHY"].get(row["codec"])), pair
