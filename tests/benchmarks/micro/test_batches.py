"""`python -m benchmarks.micro batches`: rows, ragged heads and padding, timed beside what transformers has."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks.micro import batches, cases
from benchmarks.micro.__main__ import micro
from benchmarks.micro.timer import Measured, Side
from kvtailor.bench.measure.machine import Neighbours
from kvtailor.hf.model.config import RANDOM_SHAPES
from kvtailor.hf.run.stock import fill
from kvtailor.hf.versions import hand_cache

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the bench with fewer weights, where only what is done counts."""
    narrow = {"hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(RANDOM_SHAPES, cases.MODEL, {**RANDOM_SHAPES[cases.MODEL], **narrow})
    # Whatever else runs on this machine: a side without a sample has no row.
    monkeypatch.setattr(Neighbours, "disturbed", lambda self: False)


def test_it_runs_and_ends_with_json() -> None:
    words = ["--batches", "3", "--contexts", "320", "--rounds", "1", "--dtype", "float32"]
    found = CliRunner().invoke(micro, ["batches", *words])
    assert found.exit_code == 0, found.output
    rows = {row["name"]: row for row in json.loads(found.stdout.splitlines()[-1])["tables"]["decode 3 x 320"]}
    assert len(rows) == 9 and list(rows)[0] == "StaticCache + sdpa"
    # Keys and values of 3 rows, 8 heads of 128 and 4 layers, in float32.
    assert rows["full"]["cache_bytes"] >= 3 * 320 * 4 * 2 * 8 * 128 * 4 > rows["vector(bits=4)"]["cache_bytes"]
    assert rows["snapkv + adakv @ tokens=40"]["cache_bytes"] < rows["full"]["cache_bytes"] / 2
    full = rows["full"]
    if full["median_ms"]:
        rate = 3 / (full["median_ms"] / 1e3) / (full["cache_bytes"] / 2**30)
        assert full["tokens_per_second_per_gib"] == pytest.approx(rate)
        assert f"{rate:.0f} tokens/s a GiB" in found.stdout


def test_announced_samples_are_taken() -> None:
    (cell,) = batches.bench(batches=[2], contexts=[320], rounds=1, dtype="float32", device=CPU).cells
    said: list[str] = []
    cell.measure(said.append)
    assert len(said) == cell.samples


def test_caches_without_room_are_left_out_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_free", lambda device: 1 << 20)
    monkeypatch.setattr(batches, "decode_batches", lambda *_, **__: pytest.fail("memory was taken"))
    (cell,) = batches.bench(batches=[8], contexts=[4096], rounds=1, device=CPU).cells
    table = cell.measure(lambda name: None)
    (found,) = table.rows.values()
    assert "GiB and 0.0 are free" in found["not_measured"] and found["not_measured"] in table.lines[-1]


def test_no_side_takes_more_room_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches._Batch(2, 320, 1)
    held: list[int] = []

    def weighed(sides: list[Side], *_: object, **__: object) -> list[Measured]:
        held.extend(side.cache_bytes or 0 for side in sides)
        return []

    monkeypatch.setattr(batches, "time_in_turns", weighed)
    batches.decode_batches(batch, torch.bfloat16, device=CPU)
    assert len(held) == 9 and all(held) and sum(held) <= batches._needed(batch, torch.bfloat16)


def test_a_padded_row_gives_what_it_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a padded batch, whose first half is padding, over the same states without the padding."""
    batch = batches._Batch(3, 128, 1)
    model = cases.random_of(cases.MODEL, torch.float32, CPU)
    stock = cases.random_of(cases.MODEL, torch.float32, CPU)
    written = dict(cases.layer_states(model, 3, 128))
    alone = {layer: (keys[2:, :, 64:], values[2:, :, 64:]) for layer, (keys, values) in written.items()}
    ids = torch.randint(0, cases.VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(4))
    mask = batch.mask(padded=True)
    assert mask[0].all() and int((mask[2] == 0).sum()) == 64
    found = {}
    for name, on, cache in (
        ("ours", model, batches.cache_for(model, "full")),
        ("theirs", stock, batches.static_cache(stock, batch.slots)),
    ):
        fill(cache, written)
        found[name] = batches._step(on, cache, mask, 128, ids).logits[2]
    single = batches.static_cache(stock, 96)
    fill(single, alone)
    expected = stock(ids[2:], **hand_cache(single), use_cache=True).logits[0]
    assert torch.allclose(found["theirs"], expected, atol=1e-4)
    assert torch.allclose(found["ours"], expected, atol=1e-4)
