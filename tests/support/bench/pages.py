"""The page of a run for tests of pages: as text, and what its scripts read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kvtailor.bench.report import summarise
from kvtailor.bench.report.run_page import run_page
from kvtailor.bench.schema import Record

__all__ = ["charts_of", "data_of", "page"]


def page(records: Sequence[Record]) -> str:
    """The page of some records."""
    return run_page(summarise(records))


def data_of(text: str) -> dict[str, Any]:
    """What the scripts of a page read."""
    found = re.search(r'id="page-data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def charts_of(text: str) -> dict[str, dict[str, Any]]:
    """The small charts of a page by their titles and notes."""
    return {f"{each['title']}, {each['note']}".removesuffix(", "): each for each in data_of(text)["charts"]}
