"""What docs/measured.md says of a decoded token and of a prompt is what the records in docs/records say."""

from __future__ import annotations

import copy
import re
import runpy
from typing import Any

import pytest
from tests.docs.test_site import REPOSITORY

from benchmarks.plans import DYNAMIC, REST, WIDEST
from kvtailor.plan import registry

SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "write_decode.py"))
RECORDS = SCRIPT["read"]()
RUNS = [(kind, name) for kind, runs in RECORDS.items() for name in runs]
# Of pairs after few tokens it is told how many are above, and not why.
REASONED = [(kind, name) for kind, name in RUNS if kind != "short"]
# Contexts that the table of presets has.
CONTEXTS = {384, 8192, 32768}


def slowest(run: Any) -> dict[str, Any]:
    """The row of a run that takes most of what it is compared with, as it can be changed."""
    return max((row for row in run[1] if "ratio" in row and row["plan"] not in (DYNAMIC, REST)), key=_ratio)


def _ratio(row: dict[str, Any]) -> float:
    return float(row["ratio"])


def test_the_page_is_what_the_records_say():
    text = SCRIPT["PAGE"].read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- decode: ([\w ]+) -->", text)
    assert blocks == ["presets", "pairs", "parts", "parts by codec", "parts above", "prompts"]
    assert SCRIPT["written"](text, RECORDS) == text


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_another_ratio_in_a_record_is_another_page(kind, name):
    text, records = SCRIPT["PAGE"].read_text(encoding="utf-8"), copy.deepcopy(RECORDS)
    slowest(records[kind][name])["ratio"] -= 0.02
    assert SCRIPT["written"](text, records) != text


@pytest.mark.parametrize(("kind", "name"), REASONED)
def test_a_plan_above_without_a_reason_is_an_error(kind, name):
    text, records = SCRIPT["PAGE"].read_text(encoding="utf-8"), copy.deepcopy(RECORDS)
    slowest(records[kind][name]).update(ratio=50.0, plan="new", method="new", codec="new")
    with pytest.raises(ValueError, match=r"^new is above with 50, .* no reason"):
        SCRIPT["written"](text, records)


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_a_ratio_is_that_of_its_times(kind, name):
    for row in RECORDS[kind][name][1]:
        if "ratio" not in row:
            assert row["left_out"]
            continue
        ms = row["ms"]
        mine, other = (ms["pair"], max(ms["method"], ms["codec"])) if kind == "parts" else (ms, row["own_ms"])
        assert row["ratio"] == pytest.approx(mine / other, abs=2e-3)


def test_every_reason_is_of_a_plan_that_is_above():
    for kinds, reasons, bar in (
        (("presets", "pairs"), SCRIPT["WHY_OVER_OWN"], SCRIPT["OVER_OWN"]),
        (("prompts",), SCRIPT["WHY_OVER_PROMPT"], SCRIPT["OVER_OWN"]),
        (("parts",), SCRIPT["WHY_OVER_PARTS"], SCRIPT["OVER_PARTS"]),
    ):
        above = {
            SCRIPT["why"](row, reasons)[0]
            for kind in kinds
            for run in RECORDS[kind].values()
            for row in run[1]
            if "ratio" in row and row["ratio"] > bar and row["plan"] not in (DYNAMIC, REST)
        }
        assert above == set(reasons)


@pytest.mark.parametrize("name", RECORDS["presets"])
def test_the_table_of_presets_has_every_preset_and_says_which_was_not_run(name):
    assert SCRIPT["OVER_OWN"] == WIDEST and set(SCRIPT["SIDES"]) == {DYNAMIC, REST}
    rows = RECORDS["presets"][name][1]
    assert {row["plan"] for row in rows} <= {*registry.presets(), DYNAMIC, REST}
    assert {row["context"] for row in rows} == CONTEXTS
    records = copy.deepcopy(RECORDS)
    how, rows = records["presets"][name]
    records["presets"][name] = how, [row for row in rows if (row["plan"], row["context"]) != ("kivi4", 384)]
    block = "<!-- decode: presets -->\n<!-- /decode -->"
    assert f"Not run yet, {name}: `kivi4`." in SCRIPT["written"](block, records)


@pytest.mark.parametrize("name", RECORDS["prompts"])
def test_the_table_of_prompts_has_every_preset(name):
    assert {row["plan"] for row in RECORDS["prompts"][name][1]} == set(registry.presets())
