"""What the room `encode` promises, asked of every codec in its folder."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.discover import methods_of, sample_of
from tests.segments_of import states, uneven
from torch import Tensor

import kvtailor.encode
from kvtailor.encode.contract import Codec
from kvtailor.errors import CacheMisuse
from kvtailor.types import Layout, Segment

CODECS = methods_of(kvtailor.encode, Codec)
every_codec = pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.__name__)
LOSSY = [kind for kind in CODECS if not kind.exact]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# rows, heads, slots, d, dv
SHAPES = [(1, 1, 1, 16, 16), (3, 5, 63, 24, 20), (2, 3, 128, 64, 64), (1, 2, 257, 33, 7)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def uniform(shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Layout, Tensor, Tensor]:
    rows, heads, slots, size, value_size = shape
    layout = Layout(rows=rows, heads=heads, size=slots, start=7)
    lanes = rows * heads
    return layout, states((lanes, slots, size), seed, dtype), states((lanes, slots, value_size), seed + 1, dtype)


def ragged(kind: type[Codec], dtype: torch.dtype, seed: int = 0) -> tuple[Layout, Tensor, Tensor]:
    page = -(-16 // sample_of(kind).lane_multiple) * sample_of(kind).lane_multiple
    layout, owner, column = uneven(3, 5, page, most=90, columns=128, seed=seed)
    return layout, states((15, 128, 24), seed, dtype)[owner, column], states((15, 128, 20), seed, dtype)[owner, column]


def moved(layout: Layout, seed: int) -> tuple[Tensor, Tensor, Layout]:
    """Some tokens of a uniform layout, as many of each lane, in time order."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, layout.size // 3)
    draws = [torch.randperm(layout.size, generator=generator)[:count].sort().values for _ in range(layout.lanes)]
    slot = torch.stack(draws)
    positions = layout.columns(torch.device("cpu")).expand(layout.lanes, -1).gather(1, slot).to(torch.int32)
    lane = torch.arange(layout.lanes)[:, None].expand_as(slot)
    return lane, slot, Layout(rows=layout.rows, heads=layout.heads, size=count, positions=positions)


def unique_bytes(segment: Segment) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in segment.tensors().values()}
    return sum(storages.values())


def test_the_folder_holds_codecs() -> None:
    assert {"Plain", "Indexed", "Kivi"} <= {kind.__name__ for kind in CODECS}


@every_codec
def test_is_a_frozen_keyword_only_dataclass_with_defaults(kind: type[Codec]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    codec = sample_of(kind)
    assert codec == sample_of(kind) and hash(codec) == hash(sample_of(kind))
    assert codec.tail >= 0 and codec.block >= 0 and codec.lane_multiple >= 1
    assert codec.block % codec.lane_multiple == 0


@every_codec
@every_shape
@every_dtype
def test_decodes_to_the_same_shape_and_dtype(kind: type[Codec], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layout, keys, values = uniform(shape, dtype)
    before = keys.clone(), values.clone()
    segment = sample_of(kind).encode(layout, keys, values)
    assert isinstance(segment, sample_of(kind).segment_type()) and segment.codec == sample_of(kind).segment_type().codec
    decoded = segment.decode()
    for found, given, old in zip(decoded, (keys, values), before, strict=True):
        assert found.shape == given.shape and found.dtype == dtype and bool(found.isfinite().all())
        assert torch.equal(given, old)
        if kind.exact:
            assert torch.equal(found, given)
        else:
            assert (found.float() - given.float()).norm() <= 0.5 * given.float().norm()


@every_codec
@every_shape
@every_dtype
def test_bytes_are_those_of_the_storages(kind: type[Codec], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layout, keys, values = uniform(shape, dtype)
    segment = sample_of(kind).encode(layout, keys, values)
    assert unique_bytes(segment) == segment.closed_form_bytes()
    assert unique_bytes(segment.rows(torch.tensor([0, 0]))) == segment.rows(torch.tensor([0, 0])).closed_form_bytes()
    again = segment.regather(*moved(layout, 3))
    assert unique_bytes(again) == again.closed_form_bytes()


@every_codec
@every_dtype
def test_bytes_per_token_is_what_whole_blocks_cost(kind: type[Codec], dtype: torch.dtype) -> None:
    slots = max(sample_of(kind).block, 1) * 4
    layout, keys, values = uniform((2, 3, slots, 64, 32), dtype)
    expected = sample_of(kind).bytes_per_token(64, 32, keys.element_size()) * 6 * slots
    assert sample_of(kind).encode(layout, keys, values).closed_form_bytes() == expected


@every_codec
def test_a_block_cut_from_a_buffer_keeps_no_buffer_alive(kind: type[Codec]) -> None:
    if sample_of(kind).block == 0:
        return
    for lanes in (1, 6):
        slots = sample_of(kind).block
        buffer = states((lanes, slots + 40, 24), 5)
        layout = Layout(rows=1, heads=lanes, size=slots, start=0)
        segment = sample_of(kind).encode(layout, buffer[:, :slots], buffer[:, :slots])
        assert unique_bytes(segment) == segment.closed_form_bytes()
        before = [x.clone() for x in segment.decode()]
        buffer.fill_(float("nan"))
        assert all(torch.equal(a, b) for a, b in zip(segment.decode(), before, strict=True))


@every_codec
@every_dtype
def test_ragged_lanes(kind: type[Codec], dtype: torch.dtype) -> None:
    layout, keys, values = ragged(kind, dtype)
    segment = sample_of(kind).encode(layout, keys, values)
    assert unique_bytes(segment) == segment.closed_form_bytes()
    decoded = segment.decode()
    filled = layout.filled(torch.device("cpu"))
    assert filled is not None
    for found, given in zip(decoded, (keys, values), strict=True):
        assert bool(found.isfinite().all())
        error = (found.float() - given.float())[filled].norm() / given.float()[filled].norm()
        assert error == 0 if kind.exact else error <= 0.5


@every_codec
def test_filler_changes_no_code(kind: type[Codec]) -> None:
    """What a lane holds beyond its length repeats a filled slot, and so decodes as it and widens no group."""
    multiple = sample_of(kind).lane_multiple
    keys, values = states((2, 2 * multiple, 16), 1), states((2, 2 * multiple, 16), 2)
    length = multiple + 1
    for x in (keys, values):
        x[:, length:] = x[:, length - 1 : length]
    layout = Layout(rows=1, heads=2, size=2 * multiple, start=0, lengths=torch.full((2,), length, dtype=torch.int32))
    short = Layout(rows=1, heads=2, size=length, start=0)
    whole = sample_of(kind).encode(layout, keys, values).decode()
    cut = sample_of(kind).encode(short, keys[:, :length].clone(), values[:, :length].clone()).decode()
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a[:, :length], b)


@every_codec
@every_dtype
def test_regather_moves_codes_and_never_encodes_again(kind: type[Codec], dtype: torch.dtype) -> None:
    layout, keys, values = uniform((3, 5, 128, 24, 20), dtype)
    segment: Segment = sample_of(kind).encode(layout, keys, values)
    expected = segment.decode()
    for seed in range(3):
        lane, slot, after = moved(segment.layout, seed)
        segment = segment.regather(lane, slot, after)
        expected = tuple(x[lane, slot] for x in expected)
        found = segment.decode()
        assert segment.layout is after
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert unique_bytes(segment) == segment.closed_form_bytes()


@every_codec
def test_regather_into_ragged_lanes(kind: type[Codec]) -> None:
    layout, keys, values = uniform((3, 5, 128, 24, 20), torch.float32)
    segment = sample_of(kind).encode(layout, keys, values)
    decoded = segment.decode()
    after, owner, column = uneven(3, 5, 32, most=90, columns=128, seed=4)
    again = segment.regather(owner, column, after)
    for found, expected in zip(again.decode(), decoded, strict=True):
        assert torch.equal(found, expected[owner, column])
    assert unique_bytes(again) == again.closed_form_bytes()
    assert again.layout.counts().sum() == after.lengths.sum()  # type: ignore[union-attr]


@every_codec
def test_rows_is_decode_then_index(kind: type[Codec]) -> None:
    index = torch.tensor([2, 0, 2])
    layout, keys, values = uniform((3, 5, 63, 24, 20), torch.float32)
    for segment in (sample_of(kind).encode(layout, keys, values), sample_of(kind).encode(*ragged(kind, torch.float32))):
        for source in (segment, segment.regather(*everything(segment.layout))):
            picked = source.rows(index)
            lanes, expected_layout = source.layout.lanes_of_rows(index)
            for found, whole in zip(picked.decode(), source.decode(), strict=True):
                assert torch.equal(found, whole[lanes])
            assert torch.equal(picked.layout.counts(), expected_layout.counts())
            assert torch.equal(picked.layout.counts(), source.layout.counts()[index])
            assert unique_bytes(picked) == picked.closed_form_bytes()


def everything(layout: Layout) -> tuple[Tensor, Tensor, Layout]:
    lane = torch.arange(layout.lanes)[:, None].expand(-1, layout.size)
    return lane, torch.arange(layout.size)[None].expand_as(lane), layout


@every_codec
def test_a_segment_is_never_rewritten(kind: type[Codec]) -> None:
    layout, keys, values = uniform((3, 5, 63, 24, 20), torch.float32)
    segment = sample_of(kind).encode(layout, keys, values)
    before = {name: tensor.clone() for name, tensor in segment.tensors().items()}
    segment.decode()
    segment.rows(torch.tensor([1, 0, 2]))
    segment.regather(*moved(layout, 1)).decode()
    sample_of(kind).encode(layout, values.new_zeros(keys.shape), values)
    assert segment.tensors().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in segment.tensors().items())


@every_codec
@every_dtype
def test_state_makes_the_same_segment(kind: type[Codec], dtype: torch.dtype) -> None:
    layout, keys, values = uniform((3, 5, 63, 24, 20), dtype)
    first = sample_of(kind).encode(layout, keys, values)
    for segment in (first, first.regather(*moved(layout, 2))):
        fields, tensors = segment.state()
        assert all(isinstance(field, (int, float, str, bool, type(None))) for field in fields.values())
        again = sample_of(kind).segment_type().from_state(segment.layout, fields, tensors)
        assert all(torch.equal(a, b) for a, b in zip(again.decode(), segment.decode(), strict=True))
        assert again.tensors().keys() == segment.tensors().keys()
        assert again.closed_form_bytes() == segment.closed_form_bytes()


@every_codec
@pytest.mark.parametrize("value", [0.0, -3.5, 1e-30, 6e4], ids=str)
@every_dtype
def test_equal_values_stay_finite_and_what_they_were(kind: type[Codec], value: float, dtype: torch.dtype) -> None:
    x = torch.full((2, 63, 24), value).to(dtype)
    for found in sample_of(kind).encode(Layout(rows=1, heads=2, size=63, start=0), x, x).decode():
        assert torch.equal(found, x)


@pytest.mark.parametrize("kind", [k for k in CODECS if k.__name__ != "Plain"], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_no_code_can_hold_is_refused(kind: type[Codec], bad: float) -> None:
    layout, keys, values = uniform((3, 5, 63, 24, 20), torch.float32)
    for states_of in (keys, values):
        broken = states_of.clone()
        broken[7, 40, 3] = bad
        pair = (broken, values) if states_of is keys else (keys, broken)
        with pytest.raises(CacheMisuse, match=r"NaN or infinity.*check.*encode=plain"):
            sample_of(kind).encode(layout, *pair)
