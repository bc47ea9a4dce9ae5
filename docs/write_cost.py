"""Writes `docs/methods/cost.md`: what choosing costs on one CPU, from the records of the suite `scoring` alone.

    make cost

or `kvtailor bench --suite scoring --model random-llama --out FOLDER` and then `python docs/write_cost.py FOLDER`. The
suite finds the methods by itself, so that a method that arrives later has a row after the next run. All of it takes
more than half an hour; `python docs/write_cost.py FOLDER TABLE` writes one table of the page anew, from a folder of
`kvtailor bench --suite scoring --table TABLE ...`, and leaves the others as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kvtailor.bench.checks import check_records  # noqa: E402
from kvtailor.bench.report.suite.tables import suite_pages  # noqa: E402
from kvtailor.bench.report.tables.grid import as_markdown  # noqa: E402
from kvtailor.bench.schema import latest, read_records  # noqa: E402
from kvtailor.bench.suite.suite import read_suite  # noqa: E402

__all__ = ["PAGE", "page", "with_table"]

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
    parts, line, model = _parts(folder, ())
    command = f"    kvtailor bench --suite {SUITE} --model {model} --out FOLDER\n    python docs/write_cost.py FOLDER"
    return "\n\n".join([HEAD.rstrip(), *parts, line, f"Made by\n\n{command}\n"])


def with_table(written: str, folder: Path, table: str) -> str:
    """A page with one of its tables from the records in another folder, which the table then says.

    It takes the place of the table with its title, or goes before the last one.

    Raises:
        RecordError, Fraud, ValueError: see `page`; or the suite has no such table.
    """
    [part], line, model = _parts(folder, (table,))
    commands = (
        f"kvtailor bench --suite {SUITE} --table {table} --model {model} --out FOLDER",
        (f"python docs/write_cost.py FOLDER {table}"),
    )
    new = f"{part}\n\n{line}\n\nMade by `{commands[0]}` and `{commands[1]}`.\n\n"
    head, *sections = re.split(r"^(?=## )", written, flags=re.MULTILINE)
    title = part.split("\n", 1)[0]
    at = next((i for i, each in enumerate(sections) if each.split("\n", 1)[0] == title), None)
    if at is None:
        at = max(0, len(sections) - 1)
        sections.insert(at, "")
    sections[at] = new if at < len(sections) - 1 else f"{new.rstrip()}\n"
    return head + "".join(sections)


def _parts(folder: Path, only: tuple[str, ...]) -> tuple[list[str], str, str]:
    """The sections of the tables, the line on what they were measured on, and the model."""
    records = latest(read_records(folder))
    check_records(records)
    found = suite_pages(read_suite(SUITE), records, only=only)
    if found is None or not found.grids:
        what = f"the table {only[0]!r} of the suite {SUITE!r}" if only else f"the suite {SUITE!r}"
        raise ValueError(f"{folder} has no record of {what}: run `make cost`")
    parts = [f"## {grid.title}\n\n{as_markdown(grid)}\n\n{grid.note}".rstrip() for grid in found.grids]
    return parts, found.line, max(records, key=lambda record: record.started).model


if __name__ == "__main__":
    _folder, *_tables = sys.argv[1:]
    made = PAGE.read_text(encoding="utf-8") if _tables else page(Path(_folder))
    for each in _tables:
        made = with_table(made, Path(_folder), each)
    PAGE.write_text(made, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
