"""What docs/reports.md says of real models is what the published records of the reports' suites say."""

from __future__ import annotations

import runpy
import sys

import pytest
from tests.docs.test_site import REPOSITORY
from tests.support.bench.equal_bytes import records_of, suite_in

from kvtailor.bench.suite.suite import read_suite


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(REPOSITORY / "docs"))
    try:
        return runpy.run_path(str(REPOSITORY / "docs" / "write_reports.py"))
    finally:
        sys.path.remove(str(REPOSITORY / "docs"))


def test_the_page_is_what_the_records_say(script):
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["written"](page, script["read"]()) == page
    for suite in script["SHOWN"]:
        assert page.count(f"<!-- on real models: {suite} -->\n") == 1, suite


def test_every_column_that_is_shown_is_one_of_the_suite(script):
    for name, tables in script["SHOWN"].items():
        suite = read_suite(name)
        there = {table.name: table.columns for table in suite.tables_for("demo")}
        for pattern, wanted in tables.items():
            found = [columns for each, columns in there.items() if script["fnmatch"](each, pattern)]
            assert found, f"{name} has no table {pattern}"
            assert all(set(wanted) <= set(columns) for columns in found), f"{name}, {pattern}: {found}"


def test_tables_have_what_was_measured_alone(script, tmp_path, monkeypatch):
    suite = suite_in(tmp_path)
    shown = {"equal": {"some": ("text", "hard"), "oth*": ("easy",)}}
    # `written` looks the columns up where it was defined.
    monkeypatch.setitem(script["written"].__globals__, "SHOWN", shown)
    page = "| R9 | it | m | w | `equal` | old |\n\n<!-- on real models: equal -->\nold\n<!-- /on real models -->\n"
    made = script["written"](page, {"equal": {"Made-up": (suite, records_of(suite))}})
    assert "old" not in made and "| R9 | it | m | w | `equal` | Made-up |" in made
    assert "**On Made-up.** Suite equal, made-up" in made and "*Some*\n\n| Plan | text | hard |\n|---|---|---|" in made
    assert "| best | +0.0" in made and " to +0.0" in made and "| never |" not in made and "*Times*" not in made
    assert script["written"](made, {"equal": {"Made-up": (suite, records_of(suite))}}) == made
    none = script["written"](page, {})
    assert "Not measured on a real model." in none and "| `equal` | not measured |" in none
