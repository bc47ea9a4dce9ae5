"""Record files that were edited by hand, cut or overwritten: each is read, or refused in a sentence that names it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.bench.frauds import task

from kvtailor.bench.runner import finished, run
from kvtailor.bench.schema import NoRecords, Record, RecordError, read_records
from kvtailor.bench.subject import Subject
from kvtailor.cli.report import write
from kvtailor.errors import KvtailorError

ODD = [
    None,
    True,
    0,
    -1,
    2**70,
    1e300,
    -1.5,
    "",
    "x",
    "\u2028",
    [],
    {},
    [[1]],
    [None],
    {"a": None},
    {"a": [1]},
    {"a": "b"},
    ["x"],
]
RAW = ["NaN", "Infinity", "1e999", "9" * 5000, "[" * 5000, '"\\ud800"', "tru", "0x1", "{", '"']


@pytest.fixture(scope="module")
def records() -> list[Record]:
    given = subject(CountingModel(), one=DummyCache(keep=20))
    return run(given, [FULL, contestant("one")], [task()], bandwidth=False)


def edited(line: str, draw: random.Random) -> str:
    how, found = draw.random(), json.loads(line)
    if how < 0.55:
        where = found
        while True:
            name = draw.choice(sorted(where)) if where else "new"
            if isinstance(where.get(name), dict) and where[name] and draw.random() < 0.5:
                where = where[name]
                continue
            break
        if draw.random() < 0.2:
            where.pop(name, None)
        else:
            where[name] = draw.choice(ODD)
        return json.dumps(found, ensure_ascii=False)
    if how < 0.7:
        name = draw.choice(sorted(found))
        return line.replace(f'"{name}": {json.dumps(found[name], ensure_ascii=False)}', f'"{name}": {draw.choice(RAW)}')
    at = draw.randrange(len(line))
    if how < 0.85:
        return line[:at] + draw.choice(["\n", "\u2028", "\x00", '"', "}", ",", "é", "9" * 400]) + line[at:]
    return line[:at]


def read_whole(folder: Path) -> None:
    write([folder], folder / "pages")


def fuzz(records: list[Record], folder: Path, count: int, state: int) -> dict[str, int]:
    draw, lines = random.Random(state), [record.to_json() for record in records]
    came = {"read": 0, "refused": 0}
    for _ in range(count):
        which = draw.randrange(len(lines))
        changed = [edited(line, draw) if i == which else line for i, line in enumerate(lines)]
        (folder / "records-1.jsonl").write_text("".join(f"{line}\n" for line in changed), encoding="utf-8")
        try:
            read_whole(folder)
            came["read"] += 1
        except KvtailorError as error:
            assert 10 < len(str(error)) < 5000
            came["refused"] += 1
    return came


def test_some_edited_records(records, tmp_path) -> None:
    came = fuzz(records, tmp_path, 40, state=1)
    assert came["read"] > 2 and came["refused"] > 10


@pytest.mark.long
def test_many_edited_records(records, tmp_path) -> None:
    came = fuzz(records, tmp_path, 300, state=2)
    assert came["read"] > 30 and came["refused"] > 100


def test_a_name_with_a_line_separator_is_read_again(records, tmp_path) -> None:
    odd = [replace(each, text="a\u2028b\u2029c\x85d\x0b\x0ce.txt") for each in records]
    (tmp_path / "records-1.jsonl").write_text("".join(f"{each.to_json()}\n" for each in odd), encoding="utf-8")
    assert read_records(tmp_path) == odd


def test_the_folder_of_a_fit_says_where_its_records_are(tmp_path) -> None:
    (tmp_path / "records").mkdir()
    with pytest.raises(NoRecords, match="give .*records, those of a fit"):
        read_records(tmp_path)


@pytest.mark.parametrize("first", ["", "\n", '{"schema": 1, "run": "r', " \n\n"])
def test_a_run_killed_before_its_first_record_is_resumed(first, records, tmp_path) -> None:
    (tmp_path / "records-1.jsonl").write_text(first, encoding="utf-8")
    with pytest.raises(NoRecords, match="found none: run `kvtailor bench"):
        read_records(tmp_path)
    assert finished(tmp_path) == {}
    given = subject(CountingModel(), one=DummyCache(keep=20))
    again = run(given, [FULL, contestant("one")], [task()], bandwidth=False, out=tmp_path)
    assert [each.values for each in again] == [each.values for each in records]
    assert read_records(tmp_path) == again


def test_what_cannot_be_read_names_its_file_and_line(records, tmp_path) -> None:
    file = tmp_path / "records-1.jsonl"
    with pytest.raises(NoRecords, match="nowhere, which is not there"):
        read_records(tmp_path / "nowhere")
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecordError, match="records-1.jsonl, which is no text in UTF-8: 'utf-8'"):
        read_records(tmp_path)
    line = records[0].to_json()
    for broken, message in (
        (line.replace('"samples": 8', '"samples": "eight"'), "samples is 'eight', but it must be a int"),
        (line.replace('"metrics": {', '"metrics": {"more": "x", '), "metrics.more is 'x', but it must be a float"),
        (line.replace('"notes": []', '"notes": "said"'), "notes is 'said', but it must be a list"),
        (line.replace('"samples": 8', '"samples": NaN'), "NaN is no number"),
        (line.replace('"samples": 8', f'"samples": {"9" * 5000}'), "expected one JSON object"),
        (line.replace('"samples": 8', f'"samples": {"[" * 100_000}'), "expected one JSON object"),
    ):
        assert broken != line
        file.write_text(f"{line}\n{broken}\n", encoding="utf-8")
        with pytest.raises(RecordError, match=f"records-1.jsonl, line 2: .*{message}"):
            read_records(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "'cuda', but torch .* finds 0 CUDA devices here: give cpu"),
        ("cuda:7", "'cuda:7', but"),
        ("gpu", "'gpu', which torch does not have"),
    ],
)
def test_a_device_that_is_not_there_is_a_sentence_before_anything_is_loaded(device, message) -> None:
    for name in ("demo", "random-llama", "no/such-model"):
        with pytest.raises(KvtailorError, match=message):
            Subject.load(name, device=device)
