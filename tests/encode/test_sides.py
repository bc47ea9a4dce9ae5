"""Keys by one codec and values by another: each side is bit for bit what its codec makes of it alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.segments_of import states, uneven
from torch import Tensor

from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.encode.sides import SidesCodec, SidesSegment
from kvtailor.errors import PlanError
from kvtailor.plan import Plan, parse
from kvtailor.types import Layout, Rotation, Segment

FACTS = CodecContext(layer=1, layers=3, heads=3, rotation=Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1])))
KEYS = (
    "plain",
    "kivi(bits=3, group=16, recent=16)",
    "vector(bits=5)",
    "fp8(group=8, block_size=8)",
    "nuq(group=16, block_size=16)",
    "hadamard(of=kivi(group=16, recent=16))",
    "unrotated(of=hadamard(of=vector(bits=4, symmetric=false)))",
    "hadamard(of=unrotated(of=nuq(group=16, block_size=16)))",
)
VALUES = tuple(each for each in KEYS if "unrotated" not in each)
PAIRS = [(key, value) for key in KEYS for value in VALUES if (key, value) != ("plain", "plain")]


def codec_of(text: str) -> Codec:
    return Plan.parse(text).encode


def inmost(segment: Segment) -> Segment:
    while not isinstance(segment, SidesSegment):
        segment = segment.inner  # type: ignore[attr-defined]
    return segment


def layouts() -> Iterator[tuple[Layout, Tensor, Tensor, Tensor | None]]:
    """63 tokens of odd sizes; 63 tokens; a padded batch of 3; ragged heads; one token.

    Keys have 24 channels, values 20. Those of odd sizes have 33 and 7, which hadamard leaves as they are.
    """
    odd = Layout(rows=1, heads=3, size=63, start=4)
    yield odd, states((3, 63, 33), 4), states((3, 63, 7), 5), None
    keys, values = states((9, 128, 24), 1), states((9, 128, 20), 2)
    yield Layout(rows=3, heads=3, size=63, start=4), keys[:, :63], values[:, :63], None
    first = torch.tensor([4, 0, 9])
    positions = torch.arange(64, dtype=torch.int32) + first.repeat_interleave(3)[:, None].to(torch.int32)
    yield Layout(rows=3, heads=3, size=64, positions=positions), keys[:, :64], values[:, :64], first
    layout, owner, column = uneven(3, 3, 16, most=90, columns=128, seed=3)
    yield layout, keys[owner, column], values[owner, column], None
    yield Layout(rows=1, heads=1, size=1, start=0), keys[:1, :1], values[:1, :1], None


@pytest.mark.parametrize(("key", "value"), PAIRS)
def test_each_side_is_what_its_codec_makes_of_it_alone(key: str, value: str) -> None:
    both = SidesCodec(keys=codec_of(key), values=codec_of(value)).for_layer(FACTS)
    of_keys, of_values = codec_of(key).for_layer(FACTS), codec_of(value).for_layer(FACTS)
    for layout, keys, values, first in layouts():
        segment = both.encode(layout, keys, values, first)
        assert isinstance(segment, both.segment_type())
        alone = of_keys.encode(layout, keys, values, first), of_values.encode(layout, keys, values, first)
        for side, (found, expected) in enumerate(zip(segment.decode(), alone, strict=True)):
            assert torch.equal(found, expected.decode()[side])
        # The codes as well, and not only what they decode to.
        stored = inmost(segment).state()[1]
        for name, of in (("keys", alone[0]), ("values", alone[1])):
            its = {n: t for n, t in of.state()[1].items() if n.startswith(f"{name}.")}
            mine = {n: t for n, t in stored.items() if n.startswith(f"{name}.")}
            if its:
                assert mine.keys() == its.keys() and all(torch.equal(t, its[n]) for n, t in mine.items())
        again = both.restore(layout, *segment.state())
        assert all(torch.equal(a, b) for a, b in zip(again.decode(), segment.decode(), strict=True))


def test_windows_blocks_and_groups_are_those_of_both() -> None:
    codec = codec_of("sides(keys=kivi(bits=4, group=24, recent=48), values=fp8(group=16, recent=20, block_size=160))")
    assert (codec.tail, codec.lane_multiple, codec.block) == (48, 48, 192)
    alone = codec_of("sides(keys=plain, values=kivi(bits=4))")
    assert (alone.tail, alone.lane_multiple, alone.block) == (128, 1, 128)
    assert codec_of("sides(keys=unrotated(of=vector), values=plain)").needs_rotation


def test_bytes_and_work_are_those_of_each_side() -> None:
    """4-bit keys with 2 scales in 32 tokens, 3-bit values with a scale each; 16-bit states."""
    codec = codec_of("sides(keys=kivi(bits=4), values=vector(bits=3))")
    assert codec.bytes_per_token(64, 32, 2) == 64 * (0.5 + 4 / 32) + 32 * 3 / 8 + 2
    assert codec_of("sides(keys=plain, values=vector(bits=3))").bytes_per_token(64, 32, 2) == 128 + 32 * 3 / 8 + 2
    sizes = {"tokens": 96, "key_size": 64, "value_size": 32}
    keys, values = codec_of("kivi(bits=4, only=keys)"), codec_of("vector(bits=3, only=values)")
    for name in ("encode_flops", "decode_flops"):
        assert getattr(codec, name)(**sizes) == getattr(keys, name)(**sizes) + getattr(values, name)(**sizes)
    mixed = codec_of("sides(keys=hadamard(of=vector), values=kivi)")
    outside = codec_of("hadamard(of=sides(keys=vector, values=kivi), only=keys)")
    assert mixed.encode_flops(**sizes) == outside.encode_flops(**sizes)
    assert mixed.for_layer(FACTS) == outside.for_layer(FACTS)


@pytest.mark.parametrize(
    "text",
    [
        "sides(keys=kivi(bits=4), values=vector(bits=3))",
        "sides(keys=hadamard(of=vector(bits=4, symmetric=false)), values=plain)",
    ],
)
def test_the_three_forms(text: str) -> None:
    plan = parse(text)
    assert str(plan) == text and Plan.from_toml(plan.to_toml()) == plan
    assert Plan.from_toml(plan.to_toml()).hash == plan.hash
    assert plan.hash != parse(text.replace("bits=4", "bits=5")).hash


def test_one_side_of_two() -> None:
    codec = codec_of("sides(keys=kivi(bits=4), values=fp8)")
    assert codec.one_sided("keys", "outer") == codec_of("sides(keys=kivi(bits=4), values=plain)")
    assert codec.one_sided("values", "outer") == codec_of("sides(keys=plain, values=fp8)")
    with pytest.raises(ValueError, match="outer: only=keys leaves SidesCodec in `of` nothing to code"):
        codec_of("sides(keys=plain, values=fp8)").one_sided("keys", "outer")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sides(keys=plain, values=plain)", "sides: keys and values are both plain, so nothing would be encoded"),
        ("sides(keys=kivi)", "sides needs values: write for example sides(keys=kivi(bits=4), values=vector(bits=3))"),
        ("sides(keys=plain(block_size=8), values=fp8)", "sides: keys is Plain(block_size=8), and the blocks are the"),
        ("sides(keys=minicache, values=fp8)", "sides: keys has MiniCache, which stores two layers' tokens together"),
        ("sides(keys=fp8, values=lowrank(basis=random))", "sides: values has LowRank, and each side must have a codec"),
        ("sides(keys=fp8, values=kvplugin)", "sides: values has KvPlugin, and each side must have a codec"),
        ("sides(keys=indexed, values=fp8)", "sides: keys has Indexed, and each side must have a codec"),
        ("sides(keys=channels, values=fp8)", "sides: keys has Channels, and each side must have a codec"),
        ("sides(keys=hadamard(of=plain), values=fp8)", "sides: keys has Plain, and each side must have a codec"),
        ("sides(keys=bit_table(of=kivi), values=fp8)", "sides: keys has BitTable, and each side must have a codec"),
        ("sides(keys=sides(keys=fp8, values=fp8), values=fp8)", "sides: keys has SidesCodec, and each side must have"),
        ("sides(keys=fp8, values=unrotated(of=fp8))", "sides: values have no rotary embedding that could be turned"),
        (
            "sides(keys=kivi(only=keys), values=fp8)",
            "sides: keys has Kivi(only=keys), and gets keys alone by its place",
        ),
        ("sides(keys=fp8, values=hadamard(of=fp8, only=keys))", "sides: values has Hadamard(only=keys), and gets"),
        ("sides(keys=kivi(value_bits=2), values=fp8)", "sides: keys has Kivi(value_bits=2), and it codes no values"),
        ("sides(keys=fp8, values=nuq(key_bits=2))", "sides: values has Nuq(key_bits=2), and it codes no keys"),
        ("sides(keys=by_layer(of=[kivi]), values=fp8)", "sides: keys has ByLayer, and each side must have a codec"),
    ],
)
def test_what_cannot_code_one_side_is_said(text: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    (found,) = caught.value.faults
    assert found.startswith(fault)


def test_what_is_no_codec_is_said_in_python() -> None:
    with pytest.raises(ValueError, match="sides: keys must be a codec such as kivi, found 3"):
        SidesCodec(keys=3, values=codec_of("fp8"))  # type: ignore[arg-type]


def test_nothing_is_encoded_before_the_layer_is_known_where_a_side_is_changed_first() -> None:
    codec = codec_of("sides(keys=hadamard(of=fp8), values=plain)")
    x = states((1, 8, 16), 1)
    with pytest.raises(ValueError, match="sides: keys are changed before they are coded; call for_layer first"):
        codec.encode(Layout(rows=1, heads=1, size=8, start=0), x, x)
