"""Records in a folder: what is damaged is refused, what has no checksum is said, and what stands in the way can go."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.bench.frauds import task

from kvtailor.bench.checks import Fraud
from kvtailor.bench.evaluation.result import Evaluation
from kvtailor.bench.measure import machine
from kvtailor.bench.runner import finished, run
from kvtailor.bench.schema import Record, RecordError, leave_out, read_records
from kvtailor.bench.subject import Subject
from kvtailor.cli import main
from kvtailor.cli.report import write
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.hf.model.fingerprint import remembered_fingerprint, weight_fingerprint
from kvtailor.hf.model.loading import new_model


@pytest.fixture(scope="module")
def records() -> list[Record]:
    given = subject(CountingModel(), one=DummyCache(keep=20))
    return run(given, [FULL, contestant("one")], [task()], bandwidth=False)


@pytest.fixture(autouse=True)
def same_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout with changed files is dirty, and then nothing is reused."""
    said = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}
    monkeypatch.setattr(machine, "versions", lambda: dict(said))


def kept(records: list[Record], folder: Path) -> Path:
    path = folder / "records-1.jsonl"
    path.write_text("".join(record.to_line() + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.filterwarnings("error")
def test_no_flip_in_a_record_is_read(records: list[Record], tmp_path: Path) -> None:
    path = kept(records, tmp_path)
    data, draw, came = path.read_bytes(), random.Random(7), {"refused": 0, "the end was cut": 0}
    for at in [len(data) - 1, *(draw.randrange(len(data)) for _ in range(400))]:
        changed = bytearray(data)
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            found = read_records(tmp_path)
        except RecordError as error:
            assert "records-1.jsonl" in str(error)
            came["refused"] += 1
        else:
            # The line break at the very end: the last record is passed over, and `damaged_ends` says so.
            assert at == len(data) - 1 and found == records[:-1]
            came["the end was cut"] += 1
    assert came["refused"] >= 400 - came["the end was cut"] + 1


def test_records_without_a_checksum_are_read_and_said(records: list[Record], tmp_path: Path) -> None:
    path = kept(records, tmp_path)
    lines = [records[0].to_json(), *(record.to_line() for record in records[1:])]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.warns(UserWarning, match="1 record has no checksum, so damage there would not be noticed"):
        assert read_records(tmp_path) == records
    with pytest.warns(UserWarning):
        pages = write([tmp_path], tmp_path / "pages")
    assert "1 record has no checksum" in pages[0].read_text()


def test_one_text_under_two_names_can_be_left_out(records: list[Record], tmp_path: Path) -> None:
    """The folder was closed for good before."""
    later = [replace(records[0], text="other name.txt", run="later", started="2999-01-01")]
    kept([*records, *later], tmp_path)
    with pytest.raises(Fraud, match=r"one text under two names: .*--leave-out 'text=other name.txt'"):
        write([tmp_path], tmp_path)
    write([tmp_path], tmp_path / "pages", without=["text=other name.txt"])
    page = (tmp_path / "pages" / "report.html").read_text()
    assert "records were left out as asked: text=other" in page
    assert Evaluation.load(tmp_path, leave_out=["text=other name.txt"]).records == tuple(records)
    told = CliRunner().invoke(main, ["report", str(tmp_path), "--leave-out", "run=later"])
    assert told.exit_code == 0, told.output
    with pytest.raises(RecordError, match="text=nothing', which no record is; text is .*other name.txt"):
        leave_out(records + later, ["text=nothing"])
    with pytest.raises(UnknownName, match="did you mean 'text'"):
        leave_out(records, ["txt=a"])
    with pytest.raises(RecordError, match="write FIELD=VALUE"):
        leave_out(records, ["text"])


def test_what_is_left_out_is_measured_again(records: list[Record], tmp_path: Path) -> None:
    given = subject(CountingModel(), one=DummyCache(keep=20))
    plans = [FULL, contestant("one")]
    first = run(given, plans, [task()], bandwidth=False, out=tmp_path)
    again = run(given, plans, [task()], bandwidth=False, out=tmp_path, without=[f"label={first[-1].label}"])
    assert [each.run == first[0].run for each in again] == [each.label != first[-1].label for each in again]
    assert finished(tmp_path, without=[f"run={first[0].run}", f"run={again[-1].run}"]) == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_ends_a_run_in_a_sentence(
    number: int,
    records: list[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, real = subject(CountingModel(), one=DummyCache(keep=20)), os.write

    def full(file: int, data: bytes) -> int:
        if os.fstat(file).st_size > 0 and "records" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(number, os.strerror(number))
        return real(file, data)

    monkeypatch.setattr(os, "write", full)
    plans = [FULL, contestant("one")]
    with pytest.raises(KvtailorError, match=rf"records-.*{os.strerror(number)}.*The lines before it are there"):
        run(given, plans, [task()], bandwidth=False, out=tmp_path)
    monkeypatch.undo()
    assert len(read_records(tmp_path)) == 1
    assert len(run(given, plans, [task()], bandwidth=False, out=tmp_path)) == len(records)


def _tiny_llama() -> Any:
    return new_model(
        "llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    """Wherever it lies, and however it was changed: 64 values of a parameter were looked at before."""
    model = _tiny_llama()
    weight = model.model.layers[0].mlp.down_proj.weight
    seen = {Subject(name="m", model=model).fingerprint()}
    for number in range(weight.numel()):
        with torch.no_grad():
            weight.data.view(-1)[number] += 1e-3
        found = Subject(name="m", model=model).fingerprint()
        assert found not in seen, number
        seen.add(found)


def test_what_is_remembered_of_weights_is_that_of_the_weights() -> None:
    model = _tiny_llama()
    weight = model.model.layers[0].mlp.down_proj.weight
    assert remembered_fingerprint(model) == weight_fingerprint(model) == remembered_fingerprint(model)
    with torch.no_grad():
        weight[3] *= 50
    assert remembered_fingerprint(model) == weight_fingerprint(model)
    weight.requires_grad_(False).data = weight.data.clone()
    weight.data[2, 5] = 4.0
    assert remembered_fingerprint(model) == weight_fingerprint(model)
    half = _tiny_llama().bfloat16()
    half.load_state_dict(model.state_dict())
    assert weight_fingerprint(model, torch.bfloat16) == weight_fingerprint(half) != weight_fingerprint(model)
