"""Writes into docs/reports.md what the suites of the reports gave on real models, from docs/records alone.

    kvtailor bench --suite rankkv --model FOLDER --data DATA --out results/rankkv
    python docs/publish_records.py results/rankkv smollm2-135m-rankkv HuggingFaceTB/SmolLM2-135M-Instruct
    python docs/write_reports.py

What stands between `<!-- on real models: SUITE -->` and `<!-- /on real models -->` is made anew: the tables of the
suite with the columns of `SHOWN`, and of each what was measured. A folder of records belongs to a suite by the end of
its name. Times are left out: they are of whatever else the machine did.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from write_real_models import MODELS

from kvtailor.bench.report.suite.tables import provenance, suite_grids
from kvtailor.bench.report.tables.grid import Grid, whole
from kvtailor.bench.schema import Record, latest, read_records
from kvtailor.bench.suite.cells import SuiteTable
from kvtailor.bench.suite.suite import Suite, read_suite

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reports.md"
SHOWN: Mapping[str, Mapping[str, Sequence[str]]] = {
    "rankkv": {
        "budget-*": ("ΔNLL to full (95 %)", "KV Cache (MiB)"),
        "ablation-*": ("ΔNLL to original (95 %)",),
    },
    "kv-plugin": {
        "tier-1": ("Compression (x)", "ΔNLL (95 %)", "GSM8K (%)", "Winogrande (%)", "PIQA (%)"),
        "tier-2": ("ΔNLL (95 %)", "ARC-C (%)", "HellaSwag (%)"),
        "ranks": ("Compression (x)", "ΔNLL (95 %)"),
        "bits": ("Compression (x)", "ΔNLL (95 %)"),
        "keys-values": ("Compression (x)", "ΔNLL (95 %)", "key error", "value error", "output error"),
        "section-5b": ("Compression (x)", "ΔNLL (95 %)"),
        "retrieval": ("Needle (%)",),
    },
    "atskv": {
        "longbench": ("Memory Reduction (%)", "ΔScore of the examples (95 %)"),
        "zeroscrolls": ("Memory Reduction (%)", "ΔScore of the examples (95 %)"),
        "synthetic": ("Memory Reduction (%)", "Avg. Accuracy (%)"),
    },
    "pyramidkv": {"loss": ("WikiText", "PG-19")},
    "mspeckv": {
        "methods": ("acceptance (95 %)", "emitted per verification (95 %)", "rounds with the same text (%)"),
    },
}
"""The columns that a page shows, by the suite and its table."""
_BLOCK = re.compile(r"(<!-- on real models: (\S+) -->\n).*?(<!-- /on real models -->)", re.DOTALL)
_ROW = re.compile(r"^(\| R\d \|.*\| `([\w-]+)` \|) .* \|$", re.MULTILINE)


def written(page: str, measured: Mapping[str, Mapping[str, tuple[Suite, Sequence[Record]]]]) -> str:
    """Return the page with all of its blocks, and the last column of its first table, made anew.

    Args:
        page: as it is.
        measured: by suite and model, the suite as it was run and its records.
    """

    def block(hit: re.Match[str]) -> str:
        found = measured.get(hit[2], {})
        lines = ["Not measured on a real model."]
        if found:
            each = (_tables(model, suite, records, SHOWN[hit[2]]) for model, (suite, records) in found.items())
            lines = "\n\n".join("\n".join(lines) for lines in each).split("\n")
        return f"{hit[1]}{chr(10).join(lines)}\n{hit[3]}"

    def row(hit: re.Match[str]) -> str:
        return f"{hit[1]} {', '.join(measured.get(hit[2], ())) or 'not measured'} |"

    return _ROW.sub(row, _BLOCK.sub(block, page))


def read(records: Path = ROOT / "docs" / "records") -> dict[str, dict[str, tuple[Suite, list[Record]]]]:
    """Return what is published of the reports' suites, by suite and model."""
    found: dict[str, dict[str, tuple[Suite, list[Record]]]] = {}
    for suite in SHOWN:
        for model, folder in MODELS.items():
            where = records / f"{folder}-{suite}"
            if where.is_dir():
                of = read_suite(where / "suites" / f"{suite}.toml"), latest(read_records(where))
                found.setdefault(suite, {})[model] = of
    return found


def _tables(model: str, suite: Suite, records: Sequence[Record], shown: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield from textwrap.wrap(f"**On {model}.** {provenance(suite, records)}", width=120)
    tables = suite.tables_for(max(records, key=lambda record: record.started).model)
    for table, grid in zip(tables, suite_grids(suite, records), strict=True):
        wanted = next((columns for name, columns in shown.items() if fnmatch(table.name, name)), ())
        lines = list(_table(table, grid, wanted))
        if lines:
            yield from ("", f"*{grid.title}*", "", *lines)


def _table(table: SuiteTable, grid: Grid, wanted: Sequence[str]) -> Iterator[str]:
    """The rows and columns of a table in which something was measured, each label in a column of its own."""
    at = [
        place
        for place, column in enumerate(table.columns, 1)
        if column in wanted and any(row[place].keys for row in grid.rows)
    ]
    rows = [each for each in zip(table.rows, grid.rows, strict=True) if any(each[1][place].keys for place in at)]
    if not rows:
        return
    yield f"| {' | '.join([*table.labels, *(grid.heads[place] for place in at)])} |"
    yield "|" + "---|" * (len(table.labels) + len(at))
    for written, cells in rows:
        texts = (whole(cells[place], "-") for place in at)
        yield f"| {' | '.join([*written.labels, *texts])} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
