"""Packs the records of a bench into a folder that is committed, so that anyone can make its tables again.

    python docs/publish_records.py FOLDER NAME HUB_NAME

Writes `docs/records/NAME`: of records with the same key only the latest, one file packed with gzip, and the suites as
they were run. A model stands there under the name that the hub has for it, in place of a folder of the machine that
measured, and a method that read a file of `kvtailor calibrate` under its name alone. Nothing else is changed.
`kvtailor report docs/records/NAME` reads it.
"""

from __future__ import annotations

import gzip
import re
import sys
from dataclasses import replace
from pathlib import Path

from kvtailor.bench.checks import check_records
from kvtailor.bench.schema import Record, latest, read_records
from kvtailor.ops.files import read_toml, seal_toml
from kvtailor.plan import Plan

RECORDS = Path(__file__).parent / "records"
_FOLDER = re.compile(r"((?:^Examples| was read) from )/.*/")
_FILE = re.compile(r"\(file=[^,()]+\)|file=[^,()]+, |, file=[^,()]+")


def publish(folder: Path, name: str, hub_name: str, into: Path = RECORDS) -> Path:
    """Pack the records of a folder and return where they lie.

    Args:
        folder: of one model's records.
        name: of the folder that is made.
        hub_name: of the model.
        into: where it is made.

    Raises:
        ValueError: the records are of several models, or of none.
        RecordError: a line is no record, or damaged.
    """
    records = latest(read_records(folder))
    check_records(records)
    models = {record.model for record in records}
    if len(models) != 1:
        raise ValueError(f"asked for the records of one model, found {len(models)}: {', '.join(sorted(models))}")
    lines = "".join(_public(record, hub_name).to_line() + "\n" for record in records)
    where = into / name
    where.mkdir(parents=True, exist_ok=True)
    # Neither a time nor a name in the packed file: the same records give the same bytes.
    (where / "records.jsonl.gz").write_bytes(gzip.compress(lines.encode("utf-8"), 9, mtime=0))
    [model] = models
    for suite in sorted(folder.glob("suites/*.toml")):
        (where / "suites").mkdir(exist_ok=True)
        named = _FILE.sub("", read_toml(suite).replace(f'"{model}"', f'"{hub_name}"'))
        (where / "suites" / suite.name).write_text(seal_toml(named), encoding="utf-8")
    return where


def _public(record: Record, hub_name: str) -> Record:
    """The record without the names of folders and files that only the machine that measured has."""
    point = {name: hub_name if value == record.model else value for name, value in record.point.items()}
    asked = None if record.asked is None else record.asked.replace(record.model, hub_name)
    notes = tuple(_FOLDER.sub(r"\1", note) for note in record.notes)
    record = replace(record, model=hub_name, point=point, asked=asked, notes=notes)
    plan = _FILE.sub("", record.plan)
    if plan == record.plan:
        return record
    return replace(record, plan=plan, label=_FILE.sub("", record.label), plan_hash=Plan.parse(plan).hash)


if __name__ == "__main__":
    _where = publish(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    print(f"{_where}: {sum(each.stat().st_size for each in _where.rglob('*') if each.is_file()) // 1024} KiB")
