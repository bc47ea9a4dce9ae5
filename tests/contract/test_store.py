"""What the stage `store` promises, tested on every placement in its folder and with segments of every codec."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.support.discover import methods_of, samples_of
from tests.support.segments_of import group_of, states, uneven
from torch import Tensor

import kvtailor.encode
import kvtailor.store
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.errors import CacheMisuse
from kvtailor.ledger import Ledger
from kvtailor.ops.segments.around import Weighted
from kvtailor.plan import Plan
from kvtailor.plan.arguments import word_of
from kvtailor.store.contract import OffloadStore, Placed, Placement
from kvtailor.store.disk import Disk
from kvtailor.types import Layout, PlainSegment, Rotation, Segment

CPU = torch.device("cpu")
KINDS = methods_of(kvtailor.store, Placement)
SERVING = [each for kind in KINDS for each in samples_of(kind) if each.refusal(CPU) is None]
every_placement = pytest.mark.parametrize("placement", SERVING, ids=lambda each: str(Plan(store=each)))
FACTS = CodecContext(layer=1, layers=3, heads=3, rotation=Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1, 0.01])))
SAMPLES = [sample for kind in methods_of(kvtailor.encode, Codec) for sample in samples_of(kind)]
CODECS = [sample.for_layer(FACTS) for sample in SAMPLES]
NAMES = [str(Plan(encode=sample)) for sample in SAMPLES]
# Every codec on one placement, and every placement with some codecs.
FEW = [CODECS[NAMES.index(name)] for name in ("plain(block_size=40)", "indexed", "minicache(block_size=100)")]
PAIRS = [(Disk(), codec) for codec in CODECS] + [(placement, codec) for placement in SERVING for codec in FEW]
UNITS = 2


def encoded(codec: Codec, layout: Layout, keys: Tensor, values: Tensor) -> list[Segment]:
    """The segments of a group's layers, each with states of its own."""
    each = [(keys.clone() + layer, values.clone() - layer) for layer in range(len(group_of(codec)))]
    return list(codec.encode_group(layout, each))


def made(codec: Codec, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[list[Segment]]:
    """Two segments, one of them ragged, for each layer of the codec's group."""
    layout = Layout(rows=3, heads=5, size=codec.lane_multiple * 8 - 1, start=7)
    shape = (15, layout.size, 24)
    whole = encoded(codec, layout, states(shape, seed, dtype), states((*shape[:2], 20), seed + 1, dtype))
    page = -(-16 // codec.lane_multiple) * codec.lane_multiple
    ragged, owner, column = uneven(3, 5, page, most=90, columns=128, seed=seed)
    keys, values = states((15, 128, 24), seed, dtype), states((15, 128, 20), seed + 2, dtype)
    parts = encoded(codec, ragged, keys[owner, column], values[owner, column])
    return [list(pair) for pair in zip(whole, parts, strict=True)]


def opened(placement: Placement, root: Path, group: tuple[int, ...] = (0,)) -> OffloadStore:
    """OffloadStore for units as large as the group, each layer after the other."""
    if hasattr(placement, "folder"):
        placement = dataclasses.replace(placement, folder=str(root / "tier"))
    size = len(group)
    return placement.open([tuple(range(unit * size, unit * size + size)) for unit in range(UNITS)])


def restoring(codec: Codec):
    def restore(name: str, layout: Layout, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Segment:
        if name == PlainSegment.codec:
            return PlainSegment.from_state(layout, fields, tensors)
        return codec.restore(layout, fields, tensors)

    return restore


def same(one: Segment, other: Segment) -> bool:
    mine, its = one.state(), other.state()
    equal = mine[0] == its[0] and mine[1].keys() == its[1].keys()
    for name in mine[1]:
        left, right = mine[1][name], its[1][name]
        equal = equal and left.dtype == right.dtype and left.shape == right.shape
        equal = equal and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    return equal and all(torch.equal(a, b) for a, b in zip(one.decode(), other.decode(), strict=True))


def test_the_folder_holds_placements() -> None:
    assert {"Device", "Disk"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("placement,codec", PAIRS, ids=lambda each: str(word_of(each)))
def test_any_codec_comes_back_bit_for_bit(placement: Placement, codec: Codec, tmp_path: Path) -> None:
    group = group_of(codec)
    size, restore, offload = len(group), restoring(codec), opened(placement, tmp_path, group)
    given = [made(codec, seed=10 * unit) for unit in range(UNITS)]
    layers = [tuple(range(unit * size, unit * size + size)) for unit in range(UNITS)]
    held = [offload.put(layers[unit], [list(own) for own in given[unit]]) for unit in range(UNITS)]
    for _ in range(2):
        for unit in range(UNITS):
            for row, layer in enumerate(layers[unit]):
                found = offload.get(layer, held[unit][row], restore)
                offload.prefetch(layer)
                assert all(same(a, b) for a, b in zip(found, given[unit][row], strict=True))
                assert all(a.layout is b.layout for a, b in zip(found, given[unit][row], strict=True))
        offload.rest()
    entries = [entry for layer in range(UNITS * size) for entry in offload.entries(layer)]
    kept = [s for unit in held for own in unit for s in own]
    placed = [s for s in kept if isinstance(s, Placed)]
    assert len(placed) in (0, len(kept)) or "on_device_layers" in str(Plan(store=placement))
    ledger = Ledger.of(entries, layers=UNITS * size, full=0, seen=0, held=None)
    assert ledger.total == ledger.closed_form and (ledger.total > 0) == bool(placed)


@every_placement
def test_what_is_no_longer_held_is_forgotten(placement: Placement, tmp_path: Path) -> None:
    offload, codec = opened(placement, tmp_path), samples_of(kvtailor.encode.plain.Plain)[0]
    held = [offload.put((unit,), made(codec, seed=unit)) for unit in range(UNITS)]
    files = len(list(tmp_path.rglob("*.segment")))
    held[1] = offload.put((1,), [held[1][0][:1]])
    assert len(list(tmp_path.rglob("*.segment"))) == files
    held[1] = offload.put((1,), [[]])
    assert offload.entries(1) == []
    assert len(list(tmp_path.rglob("*.segment"))) == max(0, files - 1)
    offload.put((0,), [[]])
    assert offload.device_bytes() == 0
    offload.reset()
    assert all(offload.entries(layer) == [] for layer in range(UNITS))
    del held
    gc.collect()
    assert list(tmp_path.rglob("*.segment")) == []


@every_placement
def test_a_copy_and_its_original_outlive_each_other(placement: Placement, tmp_path: Path) -> None:
    offload, codec = opened(placement, tmp_path), samples_of(kvtailor.encode.plain.Plain)[0]
    given = [made(codec, seed=unit)[0] for unit in range(UNITS)]
    held = [offload.put((unit,), [list(given[unit])])[0] for unit in range(UNITS)]
    second = copy.deepcopy((offload, held))
    offload.put((1,), [[]])
    offload.reset()
    del offload, held
    gc.collect()
    for unit in range(UNITS):
        found = second[0].get(unit, second[1][unit], restoring(codec))
        assert all(same(a, b) for a, b in zip(found, given[unit], strict=True))


def test_a_placed_segment_is_not_read_by_mistake() -> None:
    placed = Placed(Layout(rows=1, heads=1, size=3, start=0), "kivi")
    for read in (placed.decode, placed.state, placed.view, lambda: placed.rows(torch.tensor([0]))):
        with pytest.raises(CacheMisuse, match="kivi segment is on a tier"):
            read()
    assert placed.closed_form_bytes() == 0 and Weighted.codec != "kivi"
