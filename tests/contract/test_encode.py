"""What the stage `encode` promises, tested on every codec in its folder."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from tests.support.discover import methods_of, samples_of
from tests.support.naming import named
from tests.support.segments_of import encoded, encoded_group, moved, states, uneven
from torch import Tensor

import kvtailor.encode
from kvtailor.encode.channels import Channels
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.encode.floats.mxfp4 import MxFp4
from kvtailor.encode.floats.mxfp8 import MxFp8
from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.ggml import Ggml
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.higgs import Higgs
from kvtailor.encode.plain import Plain
from kvtailor.encode.static_fp8 import StaticFp8
from kvtailor.encode.subspace.projecting import Projecting
from kvtailor.errors import CacheMisuse
from kvtailor.plan import Plan
from kvtailor.types import Layout, Rotation, Segment

KINDS = methods_of(kvtailor.encode, Codec)
# On a layer that is not the first, with a rotary embedding that turns a part of every state below.
FACTS = CodecContext(layer=1, layers=3, heads=3, rotation=Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1, 0.01])))
SAMPLES: list[Codec] = [sample for kind in KINDS for sample in samples_of(kind)]
CODECS = [sample.for_layer(FACTS) for sample in SAMPLES]
NAMES = [str(Plan(encode=sample)) for sample in SAMPLES]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=NAMES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# rows, heads, slots, d, dv
SHAPES = [(1, 1, 1, 16, 16), (3, 5, 63, 24, 20), (2, 3, 128, 64, 64), (1, 2, 257, 33, 7)]
# And a model in double precision, as tests of exactness have it.
EVERY = [*itertools.product(SHAPES, DTYPES), (SHAPES[1], torch.float64)]


def uniform(shape: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Layout, Tensor, Tensor]:
    rows, heads, slots, size, value_size = shape
    layout = Layout(rows=rows, heads=heads, size=slots, start=7)
    lanes = rows * heads
    return layout, states((lanes, slots, size), seed, dtype), states((lanes, slots, value_size), seed + 1, dtype)


def ragged(codec: Codec, dtype: torch.dtype, seed: int = 0) -> tuple[Layout, Tensor, Tensor]:
    page = -(-16 // codec.lane_multiple) * codec.lane_multiple
    layout, owner, column = uneven(3, 5, page, most=90, columns=128, seed=seed)
    return layout, states((15, 128, 24), seed, dtype)[owner, column], states((15, 128, 20), seed, dtype)[owner, column]


def unique_bytes(segment: Segment) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in segment.tensors().values()}
    return sum(storages.values())


def test_the_folder_holds_codecs() -> None:
    assert {"Plain", "Indexed", "Kivi"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_is_a_frozen_keyword_only_dataclass(kind: type[Codec]) -> None:
    assert dataclasses.is_dataclass(kind) and all(field.kw_only for field in dataclasses.fields(kind))
    for codec in samples_of(kind):
        assert isinstance(hash(codec), int) and codec in samples_of(kind)
        assert codec.tail >= 0 and codec.block >= 0 and codec.lane_multiple >= 1
        assert codec.block % codec.lane_multiple == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_is_on_every_layer_what_it_says_of_all(sample: Codec) -> None:
    for layer in range(3):
        codec = sample.for_layer(CodecContext(layer=layer, layers=3))
        if sample.across and codec == Plain():
            continue
        for name in ("tail", "block", "lane_multiple", "exact", "needs_rotation"):
            assert getattr(codec, name) == getattr(sample, name)
        assert codec.bytes_per_token(64, 32, 2) > 0
    each = [sample.for_layer(CodecContext(layer=i, layers=3)).bytes_per_token(64, 32, 2) for i in range(3)]
    assert sample.mean_bytes_per_token(3, 64, 32, 2) == pytest.approx(sum(each) / 3)


@every_codec
def test_decodes_to_the_same_shape_and_dtype(codec: Codec) -> None:
    for shape, dtype in EVERY:
        with named(shape, dtype):
            layout, keys, values = uniform(shape, dtype)
            before = keys.clone(), values.clone()
            segment = encoded(codec, layout, keys, values)
            assert isinstance(segment, codec.segment_type()) and segment.layout is layout and segment.codec
            decoded = segment.decode()
            for found, given, old in zip(decoded, (keys, values), before, strict=True):
                assert found.shape == given.shape and found.dtype == dtype and bool(found.isfinite().all())
                assert torch.equal(given, old)
                if codec.exact:
                    assert torch.equal(found, given)
                else:
                    assert (found.float() - given.float()).norm() <= 0.5 * given.float().norm()


@every_codec
def test_bytes_are_those_of_the_storages(codec: Codec) -> None:
    for shape, dtype in EVERY:
        with named(shape, dtype):
            layout, keys, values = uniform(shape, dtype)
            segment = encoded(codec, layout, keys, values)
            assert unique_bytes(segment) == segment.closed_form_bytes()
            twice = segment.rows(torch.tensor([0, 0]))
            assert unique_bytes(twice) == twice.closed_form_bytes()
            again = segment.regather(*moved(layout, 3))
            assert unique_bytes(again) == again.closed_form_bytes()


@every_codec
@every_dtype
def test_bytes_per_token_is_what_whole_blocks_cost(codec: Codec, dtype: torch.dtype) -> None:
    slots = max(codec.block, 1) * 4
    layout, keys, values = uniform((2, 3, slots, 64, 32), dtype)
    expected = codec.bytes_per_token(64, 32, keys.element_size()) * 6 * slots
    group = encoded_group(codec, layout, keys, values)
    assert sum(segment.closed_form_bytes() for segment in group) / len(group) == pytest.approx(expected, rel=1e-12)


@every_codec
def test_a_block_cut_from_a_buffer_keeps_no_buffer_alive(codec: Codec) -> None:
    if codec.block == 0:
        return
    for lanes in (1, 6):
        slots = codec.block
        buffer = states((lanes, slots + 40, 24), 5)
        layout = Layout(rows=1, heads=lanes, size=slots, start=0)
        segment = encoded(codec, layout, buffer[:, :slots], buffer[:, :slots])
        assert unique_bytes(segment) == segment.closed_form_bytes()
        before = [x.clone() for x in segment.decode()]
        buffer.fill_(float("nan"))
        assert all(torch.equal(a, b) for a, b in zip(segment.decode(), before, strict=True))


@every_codec
@every_dtype
def test_ragged_lanes(codec: Codec, dtype: torch.dtype) -> None:
    layout, keys, values = ragged(codec, dtype)
    segment = encoded(codec, layout, keys, values)
    assert unique_bytes(segment) == segment.closed_form_bytes()
    decoded = segment.decode()
    filled = layout.filled(torch.device("cpu"))
    assert filled is not None
    for found, given in zip(decoded, (keys, values), strict=True):
        assert bool(found.isfinite().all())
        error = (found.float() - given.float())[filled].norm() / given.float()[filled].norm()
        assert error == 0 if codec.exact else error <= 0.5


@every_codec
def test_filler_changes_no_code(codec: Codec) -> None:
    """What a lane holds beyond its length repeats a filled slot, and so decodes as it and widens no group."""
    multiple = codec.lane_multiple
    keys, values = states((2, 2 * multiple, 16), 1), states((2, 2 * multiple, 16), 2)
    length = multiple + 1
    for x in (keys, values):
        x[:, length:] = x[:, length - 1 : length]
    positions = torch.arange(2 * multiple, dtype=torch.int32).clamp(max=length - 1).repeat(2, 1)
    lengths = torch.full((2,), length, dtype=torch.int32)
    layout = Layout(rows=1, heads=2, size=2 * multiple, positions=positions, lengths=lengths)
    short = Layout(rows=1, heads=2, size=length, start=0)
    whole = encoded(codec, layout, keys, values).decode()
    cut = encoded(codec, short, keys[:, :length].clone(), values[:, :length].clone()).decode()
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(a[:, :length], b)


@every_codec
@every_dtype
def test_regather_moves_codes_and_never_encodes_again(codec: Codec, dtype: torch.dtype) -> None:
    layout, keys, values = uniform((3, 5, 128, 24, 20), dtype)
    segment: Segment = encoded(codec, layout, keys, values)
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
def test_regather_into_ragged_lanes(codec: Codec) -> None:
    _, keys, values = uniform((3, 5, 128, 24, 20), torch.float32)
    padding = torch.tensor([4, 0, 9])
    before = padding.repeat_interleave(5)[:, None].to(torch.int32)
    layout = Layout(rows=3, heads=5, size=128, positions=torch.arange(128, dtype=torch.int32) + before)
    segment = encoded(codec, layout, keys, values, padding)
    decoded = segment.decode()
    after, owner, column = uneven(3, 5, 32, most=90, columns=128, seed=4)
    assert after.positions is not None and after.owner is not None
    after = dataclasses.replace(after, positions=after.positions + before[after.owner])
    again = segment.regather(owner, column, after)
    for found, expected in zip(again.decode(), decoded, strict=True):
        assert torch.equal(found, expected[owner, column])
    assert unique_bytes(again) == again.closed_form_bytes()
    assert again.layout.counts().sum() == after.lengths.sum()  # type: ignore[union-attr]


@every_codec
def test_rows_is_decode_then_index(codec: Codec) -> None:
    index = torch.tensor([2, 0, 2])
    layout, keys, values = uniform((3, 5, 63, 24, 20), torch.float32)
    for segment in (encoded(codec, layout, keys, values), encoded(codec, *ragged(codec, torch.float32))):
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
def test_a_segment_is_never_rewritten(codec: Codec) -> None:
    layout, keys, values = uniform((3, 5, 63, 24, 20), torch.float32)
    segment = encoded(codec, layout, keys, values)
    before = {name: tensor.clone() for name, tensor in segment.tensors().items()}
    segment.decode()
    segment.rows(torch.tensor([1, 0, 2]))
    segment.regather(*moved(layout, 1)).decode()
    encoded(codec, layout, values.new_zeros(keys.shape), values)
    assert segment.tensors().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in segment.tensors().items())


@every_codec
@every_dtype
def test_state_makes_the_same_segment(codec: Codec, dtype: torch.dtype) -> None:
    layout, keys, values = uniform((3, 5, 63, 24, 20), dtype)
    first = encoded(codec, layout, keys, values)
    for segment in (first, first.regather(*moved(layout, 2))):
        fields, tensors = segment.state()
        assert all(isinstance(field, (int, float, str, bool, type(None))) for field in fields.values())
        again = codec.restore(segment.layout, fields, tensors)
        assert all(torch.equal(a, b) for a, b in zip(again.decode(), segment.decode(), strict=True))
        assert again.tensors().keys() == segment.tensors().keys()
        assert again.closed_form_bytes() == segment.closed_form_bytes()


@every_codec
def test_equal_values_stay_finite_and_what_they_were(codec: Codec) -> None:
    for value, dtype in itertools.product([0.0, -3.5, 1e-30, 2e4], DTYPES):
        with named(value, dtype):
            x = torch.full((2, 63, 24), value).to(dtype)
            # Turned by their positions or into other directions, they are not equal any more; dropped ones are 0. And
            # levels, or scales, that are fixed beforehand have none for them.
            inner = codec.of if isinstance(codec, Hadamard) else codec
            fixed = isinstance(inner, Gaussian | Higgs | MxFp4 | MxFp8)
            loses = codec.needs_rotation or isinstance(codec, Projecting) or fixed
            allowed = 0.5 if loses else 4 * torch.finfo(dtype).eps
            # Of 16 points none is near two equal channels whose length is not kept.
            allowed = 0.7 if isinstance(inner, Higgs) else allowed
            # What lies outside of calibrated scales, or of steps in float16, is cut or becomes 0.
            allowed = 1.0 if isinstance(codec, Channels | Ggml | StaticFp8) else allowed
            for found in encoded(codec, Layout(rows=1, heads=2, size=63, start=0), x, x).decode():
                assert bool(found.isfinite().all())
                assert bool(((found - x).double().abs() <= allowed * x.double().abs()).all())


@every_codec
def test_a_row_is_encoded_as_it_would_be_without_the_padding_before_it(codec: Codec) -> None:
    keys, values = states((6, 63, 24), 1), states((6, 63, 20), 2)
    alone = encoded(codec, Layout(rows=2, heads=3, size=63, start=0), keys, values)
    positions = (
        torch.arange(63, dtype=torch.int32) + torch.tensor([5, 11], dtype=torch.int32).repeat_interleave(3)[:, None]
    )
    later = Layout(rows=2, heads=3, size=63, positions=positions)
    padded = encoded(codec, later, keys, values, torch.tensor([5, 11]))
    again = codec.restore(later, *padded.state())
    swapped = padded.rows(torch.tensor([1, 0])).decode()
    lane, slot, after = moved(later, 3)
    gathered = padded.regather(lane, slot, after)
    for side, expected in enumerate(alone.decode()):
        assert torch.equal(padded.decode()[side], expected) and torch.equal(again.decode()[side], expected)
        assert torch.equal(swapped[side], expected[[3, 4, 5, 0, 1, 2]])
        assert torch.equal(gathered.decode()[side], expected[lane, slot])
    assert all(unique_bytes(each) == each.closed_form_bytes() for each in (padded, gathered))


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_no_code_can_hold_is_refused(codec: Codec, bad: float) -> None:
    if isinstance(codec, Plain):
        return
    layout, keys, values = uniform((3, 5, 63, 24, 20), torch.float32)
    for states_of in (keys, values):
        broken = states_of.clone()
        broken[7, 40, 3] = bad
        pair = (broken, values) if states_of is keys else (keys, broken)
        with pytest.raises(CacheMisuse, match=r"NaN or infinity.*check.*encode=plain"):
            encoded(codec, layout, *pair)
