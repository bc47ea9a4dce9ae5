"""Records whose numbers are not those of their samples are refused by file, line and field."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.support.bench.made_records import whole_run

from kvtailor.bench.schema import Record, RecordError, check_sums, read_records
from kvtailor.cli.report import write


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return whole_run()


def changed(records: list[Record], folder: Path, task: str, **fields: object) -> int:
    """Writes the records with fields of the first one of a task replaced, in `metrics` and `values` by name.

    Returns:
        its line.
    """
    lines = [json.loads(record.to_json()) for record in records]
    at = next(i for i, line in enumerate(lines) if line["task"] == task and line["error"] is None)
    for name, value in fields.items():
        field, _, inner = name.partition("__")
        if inner:
            lines[at][field][inner] = value
        else:
            lines[at][field] = value
    (folder / "records-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return at + 1


def first(records: list[Record], task: str) -> Record:
    return next(record for record in records if record.task == task)


@pytest.mark.parametrize(
    ("task", "fields", "field"),
    [
        ("perplexity", {"samples": 400}, "samples is 400"),
        ("perplexity", {"metrics__nll": 1.0}, "metrics.nll is 1.0"),
        ("perplexity", {"metrics__perplexity": 5.0}, "metrics.perplexity is 5.0"),
        ("perplexity", {"metrics__perplexity": -5.0}, "metrics.perplexity is -5.0"),
        ("needle", {"samples": 5}, "samples is 5"),
        ("needle", {"metrics__accuracy": 0.123}, "metrics.accuracy is 0.123"),
        ("needle", {"metrics__answer_nll": 9.0}, "metrics.answer_nll is 9.0"),
        ("fidelity", {"metrics__kl": 0.5}, "metrics.kl is 0.5"),
        ("fidelity", {"metrics__top1": 0.5}, "metrics.top1 is 0.5"),
        ("longcontext", {"metrics__score": 99.0}, "metrics.score is 99.0"),
        ("harness", {"samples": 41}, "samples is 41"),
    ],
)
def test_an_edited_number_is_refused(records, tmp_path, task, fields, field) -> None:
    line = changed(records, tmp_path, task, **fields)
    with pytest.raises(RecordError) as caught:
        read_records(tmp_path)
    said = str(caught.value)
    assert f"records-1.jsonl, line {line}: " in said and field in said and "edited or damaged" in said


def test_a_removed_value_is_refused(records, tmp_path) -> None:
    values = first(records, "perplexity").values["nll"]
    changed(records, tmp_path, "perplexity", values__nll=values[1:])
    with pytest.raises(RecordError, match=r"values.nll has 11 numbers, but samples is 12"):
        write([tmp_path], tmp_path / "pages")


def test_a_record_with_fewer_samples_than_full_is_not_paired(records, tmp_path) -> None:
    values = first(records, "perplexity").values["nll"][1:]
    nll = sum(values) / len(values)
    fields = {"samples": 11, "values__nll": values, "metrics__nll": nll, "metrics__perplexity": math.exp(nll)}
    place = first(records, "perplexity").text_hash
    changed([record for record in records if record.text_hash == place], tmp_path, "perplexity", **fields)
    write([tmp_path], tmp_path / "pages")


def test_records_as_they_are_stay_readable(records, tmp_path) -> None:
    changed(records, tmp_path, "perplexity")
    assert len(read_records(tmp_path)) == len(records)
    rouge = {"rouge1": 0.2, "rouge2": 0.1, "rougeL": 0.3, "score": 0.18}
    check_sums("longcontext", 1, rouge, {name: (value,) for name, value in (rouge | {"score": 0.2}).items()})
    check_sums("speed", 5, {"ttft": 1.0}, {"ttft": (1.0, 2.0)})
    check_sums("perplexity", None, {}, {})
