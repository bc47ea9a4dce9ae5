"""What docs/peers/public-figures.md says of llama.cpp's cache types is what docs/peers/llama-cpp-types.json has."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from kvtailor.bench.schema import read_records

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "peers" / "public-figures.md").read_text(encoding="utf-8")
RECORDS = [
    json.loads((DOCS / "peers" / f"llama-cpp-types{of}.json").read_text(encoding="utf-8")) for of in ("", "-qwen")
]
RECORD = RECORDS[0]


@pytest.mark.parametrize(("number", "kind"), [(i, kind) for i, each in enumerate(RECORDS) for kind in each["nll"]])
def test_a_row_is_of_the_record(number: int, kind: str) -> None:
    record = RECORDS[number]
    share = record["allocated_bytes"][kind] / record["allocated_bytes"]["f16"]
    more = fmean(record["nll"][kind]) - fmean(record["nll"]["f16"])
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind}`")]
    # The second table has no row for what the first alone has.
    assert f"| {100 * share:.0f} % | {more:+.3f}" in rows[number if len(rows) > number else -1]


def test_the_texts_are_those_of_the_published_records() -> None:
    hashes = {r.text_hash for r in read_records(DOCS / "records" / "smollm2-135m") if r.task == "perplexity"}
    assert RECORD["texts"] in hashes
