import gzip
import json
import re
from dataclasses import fields, replace

import pytest

from kvtailor.bench.schema import Record, RecordError, damaged_ends, read_records

RECORD = Record(
    run="r",
    started="2026-01-01T00:00:00+00:00",
    model="dummy",
    label="snapkv @ tokens=4",
    plan="snapkv @ tokens=4",
    plan_hash="h",
    task="perplexity",
    task_version=1,
    point={"context": 8},
    bytes_by_layer=(3, 4),
    bytes_by_stage={"encode": 7},
    values={"nll": (1.5, 2.5)},
    notes=("said",),
)


def test_every_field_is_documented():
    documented = set(re.findall(r"^ {8}(\w+): ", Record.__doc__, flags=re.MULTILINE))
    assert documented == {field.name for field in fields(Record)}


def test_round_trip():
    assert Record.from_json(RECORD.to_json()) == RECORD


def test_what_was_not_measured_is_null():
    found = json.loads(RECORD.to_json())
    for name in ("bytes_held", "bytes_resident", "tokens_held", "floor_seconds", "wall_seconds", "error", "state"):
        assert found[name] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_never_written(bad):
    with pytest.raises(RecordError, match="snapkv @ tokens=4.*NaN"):
        replace(RECORD, metrics={"nll": bad}).to_json()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "one JSON object"),
        ("[]", "schema 1"),
        ('{"schema": 99}', "found 99"),
        ('{"schema": 1, "colour": 3}', "colour"),
        ('{"schema": 1}', "lacks"),
    ],
)
def test_other_lines_are_refused(line, message):
    with pytest.raises(RecordError, match=message):
        Record.from_json(line)


def test_a_folder_is_read_and_an_unfinished_line_is_not(tmp_path):
    (tmp_path / "records-a.jsonl").write_text(RECORD.to_json() + "\n" + RECORD.to_json()[:50])
    assert read_records(tmp_path) == [RECORD]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="found none"):
        read_records(tmp_path / "empty")


def test_packed_records_are_read_like_others_and_damage_is_told(tmp_path):
    """Published records are packed: docs/records."""
    packed = gzip.compress((RECORD.to_line() + "\n").encode())
    (tmp_path / "records-a.jsonl.gz").write_bytes(packed)
    (tmp_path / "records-b.jsonl").write_text(replace(RECORD, run="b").to_line() + "\n")
    assert read_records(tmp_path) == [RECORD, replace(RECORD, run="b")] and damaged_ends(tmp_path) == []
    for damaged in (packed[:-9], packed[:20] + b"xx" + packed[22:], b"no gzip"):
        (tmp_path / "records-a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(RecordError, match="records-a.jsonl.gz, which cannot be unpacked"):
            read_records(tmp_path)


def test_the_key_names_what_was_measured_and_not_what_came_out():
    assert replace(RECORD, metrics={"nll": 1.0}, run="other").key == RECORD.key
    for change in ({"plan_hash": "x"}, {"point": {"context": 9}}, {"text_hash": "t"}, {"task_version": 2}):
        assert replace(RECORD, **change).key != RECORD.key


def test_tuples_come_back_as_tuples():
    record = replace(RECORD, tokens_by_head=((1.0, 2.5), (3.0, 4.0)), missing=("there is no method",), notes=("a",))
    assert Record.from_json(record.to_json()) == record
