"""The bench of tiers: what it counts, and what it makes of times."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks.micro import link
from benchmarks.micro.__main__ import micro
from benchmarks.micro.timer import Measured


@pytest.mark.long
def test_bytes_of_a_token_are_those_that_are_not_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "_CODECS", ("plain(block_size=512)",))
    monkeypatch.setattr("kvtailor.bench.measure.machine.Neighbours.disturbed", lambda self: False)
    words = ["link", "--contexts", "1030", "--rounds", "1", "--folder", str(tmp_path)]
    told = CliRunner().invoke(micro, words)
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout.splitlines()[-1])["tables"]["1030"]
    # Two blocks of 512 of four layers, 8 heads of 128, keys and values, bfloat16.
    layer = 1024 * 8 * 128 * 2 * 2
    assert [row["bytes_of_a_token"] for row in found] == [4 * layer, 2 * layer, 4 * layer]
    for row in found:
        assert row["left_out"] == [0, 0, 0]
        assert 0 < row["share_of_link"] <= row["share_of_floor"]
    assert told.stdout.count("of the link") == 3 and told.stderr.count("stays: ") == 3
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_refused(tmp_path):
    told = CliRunner().invoke(micro, ["link", "--folder", str(tmp_path / "absent")])
    assert told.exit_code == 2 and "which is no folder" in told.output


def test_shares_by_hand():
    sides = [Measured("bare", [0.5]), Measured("tier", [0.4]), Measured("resident", [0.3])]
    found = link._row("c", "", 50, 100, sides)
    assert found["bare_bytes_per_second"] == 200 and found["bare_seconds"] == pytest.approx(0.25)
    assert found["share_of_link"] == pytest.approx(0.625) and found["share_of_floor"] == pytest.approx(0.75)
    nobody = link._row("c", "", 50, 100, [Measured("bare", [], 3), *sides[1:]])
    assert nobody["share_of_link"] is None and nobody["share_of_floor"] is None and nobody["left_out"][0] == 3


def test_bare_reads_every_byte(tmp_path, monkeypatch):
    sizes = [5000, 70_000]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.kvseg").write_bytes(bytes(size))
    (tmp_path / "lock").write_bytes(b"")
    read, total = link._bare_files(tmp_path)
    real, seen = link.os.preadv, []
    monkeypatch.setattr(link.os, "preadv", lambda *args: (seen.append(real(*args)), seen[-1])[1])
    read()
    assert total == sum(sizes) == sum(seen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_a_copy_of_pinned_bytes(tmp_path):
    assert link.measure(1030, 1, tmp_path, torch.device("cuda"), "plain(block_size=512)")["seconds"] > 0
