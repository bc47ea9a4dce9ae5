"""Writes `docs/methods/cost.md`: what choosing costs on one CPU, from the records of the suite `scoring` alone.

    make cost

or `kvtailor bench --suite scoring --model random-llama --out FOLDER` and then `python docs/write_cost.py FOLDER`. The
suite finds the methods by itself, so that a method that arrives later has a row after the next run.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kvtailor.bench.report.grid import as_markdown  # noqa: E402
from kvtailor.bench.report.suite_pages import suite_pages  # noqa: E402
from kvtailor.bench.schema import latest, read_records  # noqa: E402
from kvtailor.bench.suite import read_suite  # noqa: E402
from kvtailor.bench.tripwires import check_records  # noqa: E402

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "methods" / "cost.md"
SUITE = "scoring"
HEAD = """<!-- Made by `make cost` from records: run it again, do not change this page. -->
# What choosing costs on this CPU

How much longer a prefill takes when its tokens are chosen from, against `full` in the same interleaved rounds. The
model has random weights; what its heads cost stands to the rest of a layer as in Llama 3.2 1B (each query head has 1.9
million weights beside it; a kv head serves two of them, there four). A larger model spends more on the rest, so that
its shares are smaller. What a plan then saves while decoding is not in this table.
"""


def page(folder: Path) -> str:
    """The page of the records in a folder.

    Raises:
        RecordError: the folder holds no records.
        Fraud: the records cannot be what they say.
        ValueError: none is of the suite.
    """
    records = latest(read_records(folder))
    check_records(records)
    found = suite_pages(read_suite(SUITE), records)
    if found is None:
        raise ValueError(f"{folder} has no record of the suite {SUITE!r}: run `make cost`")
    parts = [f"## {grid.title}\n\n{as_markdown(grid)}\n\n{grid.note}".rstrip() for grid in found.grids]
    model = max(records, key=lambda record: record.started).model
    command = f"    kvtailor bench --suite {SUITE} --model {model} --out FOLDER\n    python docs/write_cost.py FOLDER"
    return "\n\n".join([HEAD.rstrip(), *parts, found.line, f"Made by\n\n{command}\n"])


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1])), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
