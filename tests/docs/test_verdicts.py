"""`docs/verdicts.md`: a paragraph for each plan of the suite `field`, and numbers that only the script writes."""

from __future__ import annotations

import runpy

import pytest
from tests.docs.test_site import REPOSITORY
from tests.support.bench.equal_bytes import records_of, suite_in

from kvtailor.bench.report.suite.ranking import rank
from kvtailor.bench.suite.suite import read_suite

SCRIPT = runpy.run_path(str(REPOSITORY / "docs" / "write_verdicts.py"))
WRITTEN = SCRIPT["written"]


def test_every_plan_of_the_suite_has_its_paragraph_and_none_is_of_another():
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    rows = {row.labels[0] for table in read_suite("field").tables_for("demo") for row in table.rows}
    named = SCRIPT["names_in"](page)
    assert set(named) == rows - {"full"} and len(named) == len(set(named))
    for name in named:
        assert f"\n### {name}\n" in page, name


def test_numbers_are_those_of_the_records_and_prose_stays(tmp_path):
    suite = suite_in(tmp_path)
    page = "".join(
        f"Said of {name}.\n\n<!-- measured: {name} -->\nold 12.3\n<!-- /measured -->\n\n"
        for name in ("the run", "best", "never", "broken", "far / best", "best / never")
    )
    made = WRITTEN(page, rank(suite, records_of(suite)), "A line.", records_of(suite))
    assert "old 12.3" not in made and made.count("Said of ") == 6
    assert WRITTEN(made, rank(suite, records_of(suite)), "A line.", records_of(suite)) == made
    best = made[made.index("measured: best") :].split("<!-- /measured")[0]
    assert "; TPOT 1.50 of full's." in " ".join(best.split())
    assert "- 25.5 % of the bytes: text +0.0" in best and "easy 90 % right (-10:" in best and "hard" not in best
    pair = made[made.index("measured: far / best") :].split("<!-- /measured")[0]
    assert "- Over best at 25.0 and 25.5 % of the bytes: text +0." in pair and "easy -75 points (-89 to -43)" in pair
    assert "measured: best / never -->\nNot measured beside never.\n" in made
    assert "A line." in made and "says nothing here" in made
    assert "measured: never -->\nNot measured.\n" in made and "Not measured: It broke." in made
    assert max(map(len, made.splitlines())) <= 120
    with pytest.raises(ValueError, match="numbers of nobody"):
        WRITTEN(page.replace("best", "nobody"), rank(suite, records_of(suite)), "A line.", records_of(suite))
