"""What docs/peers/public-figures.md says of llama.cpp's cache types is what docs/peers/llama-cpp-types.json has."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from kvtailor.bench.schema import read_records

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "peers" / "public-figures.md").read_text(encoding="utf-8")
RECORD = json.loads((DOCS / "peers" / "llama-cpp-types.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", RECORD["nll"])
def test_a_row_is_of_the_record(kind: str) -> None:
    share = RECORD["allocated_bytes"][kind] / RECORD["allocated_bytes"]["f16"]
    more = fmean(RECORD["nll"][kind]) - fmean(RECORD["nll"]["f16"])
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{kind}`"))
    assert f"| {100 * share:.0f} % | {more:+.3f}" in row


def test_the_texts_are_those_of_the_published_records() -> None:
    hashes = {r.text_hash for r in read_records(DOCS / "records" / "smollm2-135m") if r.task == "perplexity"}
    assert RECORD["texts"] in hashes
