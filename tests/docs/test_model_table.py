"""docs/models.md and README are what the recorded verdicts say, and every pair of transformers has one."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
import transformers

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def writer() -> dict:
    return runpy.run_path(str(REPOSITORY / "docs" / "write_models.py"))


def test_the_page_and_readme_are_what_was_judged(writer: dict) -> None:
    assert writer["stale"]() == [], "run `make docs` (or: python docs/write_models.py --page) and commit what it writes"


def test_every_pair_of_the_installed_transformers_has_a_verdict(writer: dict) -> None:
    column = writer["column_of"](transformers.__version__)
    missing = writer["unjudged"](column)
    if column not in writer["recorded"]()["versions"]:
        new = set(missing) - {str_of(row) for row in writer["recorded"]()["pairs"]}
        pytest.skip(f"transformers {column} is not yet judged, and has these new pairs: {', '.join(sorted(new))}")
    assert missing == [], "not yet judged: run `python docs/write_models.py`"


def test_nothing_crashes_or_differs(writer: dict) -> None:
    data = writer["recorded"]()
    for version in data["versions"]:
        found = Counter(row[version][0] for row in data["pairs"] if version in row)
        assert not found["crash"] and not found["differs"], f"transformers {version}: {found}"
        assert set(found) <= set(writer["VERDICTS"])


def test_a_pair_without_a_verdict_is_told(writer: dict) -> None:
    assert len(writer["unjudged"]("4.0")) > 200


def test_families_that_share_a_reason_stand_together(writer: dict) -> None:
    page, general = writer["page"](writer["recorded"]()), writer["_general"]
    row = {"mapping": "causal", "type": "bloom", "class": "BloomForCausalLM"}
    assert general(row, "BloomForCausalLM computes it (BloomAttention) and more") == "… computes it and more"
    assert "| llama | `LlamaForCausalLM` | works |" in page


def test_what_changed_between_two_versions_is_named_and_what_broke_stands_apart(writer: dict) -> None:
    def row(name: str, *said: str) -> dict:
        return {"mapping": "causal", "type": name, "class": "A", "5.9": ["works"], "5.24": list(said)}

    data = {
        "versions": {"5.9": {}, "5.24": {}},
        "pairs": [row("a", "works"), row("b", "refused", "why"), row("c", "works")],
    }
    same = {("causal", "a", "A"): ["works"], ("causal", "b", "A"): ["refused", "why"], ("causal", "c", "A"): ["works"]}
    assert writer["changes"](same, data) == ([], [])
    now = {
        ("causal", "a", "A"): ["refused", "since"],
        ("causal", "b", "A"): ["works"],
        ("causal", "d", "A"): ["crash", "hard"],
        ("causal", "e", "A"): ["refused", "new"],
    }
    faults, others = writer["changes"](now, data)
    assert faults == [
        "causal a A: refused: since (5.24 has works)",
        "causal d A: crash: hard (was not there in 5.24)",
    ]
    assert others == [
        "causal b A: works (5.24 has refused: why)",
        "causal c A: is gone (5.24 has works)",
        "causal e A: refused: new (was not there in 5.24)",
    ]


def str_of(row: dict) -> str:
    return f"{row['mapping']} {row['type']} {row['class']}"
