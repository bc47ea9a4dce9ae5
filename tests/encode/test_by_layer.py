"""A codec for each layer: which layer has which, one plan for each table, and what cannot be in one."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.by_layer import ByLayer
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.plain import Plain
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.errors import PlanError
from kvtailor.plan import Plan, parse
from kvtailor.plan.arguments import with_nested
from kvtailor.types import Layout, Rotation

FACTS = {"heads": 2, "rotation": Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1]))}
MIXED = (
    "kivi(bits=4, group=16, recent=32)",
    "plain",
    "vector(bits=3, recent=32, block_size=32)",
    "unrotated(of=kivi(group=16, recent=32))",
    "sides(keys=kivi(bits=4, group=16, recent=32), values=vector(bits=3, block_size=32))",
    "kivi(bits=4, group=16, recent=32)",
)


def codec_of(text: str) -> Codec:
    return Plan.parse(text).encode


def table(*texts: str) -> ByLayer:
    return ByLayer(of=tuple(codec_of(text) for text in texts))


def test_each_layer_has_its_own_codec_and_encodes_bit_for_bit_as_it_does() -> None:
    mixed = table(*MIXED)
    keys, values = states((6, 63, 24), 1), states((6, 63, 20), 2)
    layout = Layout(rows=3, heads=2, size=63, start=5)
    for layer, text in enumerate(MIXED):
        context = CodecContext(layer=layer, layers=6, **FACTS)  # type: ignore[arg-type]
        found, alone = mixed.for_layer(context), codec_of(text).for_layer(context)
        assert found == alone and type(found) is type(alone)
        mine, expected = found.encode(layout, keys, values), alone.encode(layout, keys, values)
        assert mine.codec == expected.codec and mine.state()[0] == expected.state()[0]
        tensors = expected.state()[1]
        assert mine.state()[1].keys() == tensors.keys()
        assert all(torch.equal(each, tensors[name]) for name, each in mine.state()[1].items())


def test_one_layer() -> None:
    one = ByLayer(of=(Kivi(bits=4),), layers=(0,))
    assert one.layers is None and one.for_layer(CodecContext(layer=0, layers=1)) == Kivi(bits=4)
    assert one.misfit(layers=1, heads=1, size=8) is None


@pytest.mark.parametrize(
    "text",
    [
        "by_layer(of=[kivi(bits=4), kivi, kivi(bits=4), plain])",
        "by_layer(of=[kivi(bits=4), kivi, plain], layers=[0, 1, 0, 2])",
        "by_layer(of=[plain, kivi, kivi(bits=4)], layers=[2, 1, 2, 0])",
        "by_layer(of=[kivi(bits=4), kivi(bits=2), kivi(bits=4), plain()], layers=[2, 1, 0, 3])",
        'encode = { method = "by_layer", of = [{ method = "kivi", bits = 4 }, "kivi", "plain"], '
        "layers = [0, 1, 0, 2] }\n",
        '[encode]\nmethod = "by_layer"\nlayers = [1, 2, 1, 0]\n[[encode.of]]\nmethod = "plain"\n'
        '[[encode.of]]\nmethod = "kivi"\nbits = 4\n[[encode.of]]\nmethod = "kivi"\n',
    ],
)
def test_a_table_is_one_plan_however_it_is_written(text: str) -> None:
    plan = Plan.from_toml(text) if "\n" in text else parse(text)
    line = "by_layer(of=[kivi(bits=4), kivi, plain], layers=[0, 1, 0, 2])"
    assert str(plan) == line and plan == parse(line) and plan.hash == parse(line).hash
    assert repr(plan) == "Plan(encode=ByLayer(of=(Kivi(bits=4), Kivi(), Plain()), layers=(0, 1, 0, 2)))"
    again = Plan.from_toml(plan.to_toml())
    assert again == plan and again.hash == plan.hash and hash(again.encode) == hash(plan.encode)


def test_other_tables_are_other_plans() -> None:
    texts = [
        "by_layer(of=[kivi(bits=4), kivi])",
        "by_layer(of=[kivi, kivi(bits=4)])",
        "by_layer(of=[kivi, kivi(bits=4), kivi])",
        "by_layer(of=[kivi, plain])",
    ]
    assert len({parse(text).hash for text in texts}) == 4


def test_codecs_that_python_takes_for_equal_stay_apart() -> None:
    """One direction and all of them: 1 == 1.0."""
    one, all_of_them = LowRank(rank=1, basis="random"), LowRank(rank=1.0, basis="random")
    made = ByLayer(of=(one, all_of_them, one))
    each = [made.for_layer(CodecContext(layer=layer, layers=3)) for layer in range(3)]
    assert [repr(codec.rank) for codec in each if isinstance(codec, LowRank)] == ["1", "1.0", "1"]


def test_a_list_in_python_is_a_plan_as_well() -> None:
    made = Plan(encode=ByLayer(of=[Kivi(bits=4), Kivi()], layers=[1, 0]))  # type: ignore[arg-type]
    assert made == parse("by_layer(of=[kivi, kivi(bits=4)])") and isinstance(hash(made.encode), int)


def test_methods_inside_of_the_list_are_seen() -> None:
    plan = parse("by_layer(of=[unrotated(of=kivi), bit_table(of=kivi, keys=[4, 2], high=4, low=2)])")
    names = [type(each).__name__ for each in with_nested(plan.encode)]
    assert names == ["ByLayer", "Unrotated", "Kivi", "BitTable", "Kivi"]
    assert plan.needs.rotation
    (why,) = parse("by_layer(of=[kivi(recent=0), fp8(block_size=32)])").misfits(layers=3, heads=2, size=16)
    assert why == "by_layer: it has codecs for 2 layers; the plan compresses 3 of this model"
    assert "bit_table: keys has bits for 2 layers" in plan.misfits(layers=4, heads=2, size=16)[1]
    assert any("unrotated" in each for each in plan.latent_misfits())


def test_what_a_plan_has_one_of_is_that_of_the_layers_that_are_encoded() -> None:
    mixed = table(*MIXED)
    assert (mixed.tail, mixed.block, mixed.lane_multiple, mixed.needs_rotation) == (32, 32, 16, True)
    assert table("kivi(group=24, recent=48)", "plain", "fp8(group=16, recent=48, block_size=48)").lane_multiple == 48
    blocks = mixed.in_blocks(7)
    assert blocks.for_layer(CodecContext(layer=1, layers=6)) == Plain(block_size=32)
    assert blocks.for_layer(CodecContext(layer=0, layers=6)) == codec_of(MIXED[0])


def test_bytes_are_the_mean_over_layers() -> None:
    """4 bits and no code of 16-bit states; 2 scales of 16 bits for 32 elements."""
    codec = codec_of("by_layer(of=[kivi(bits=4), plain], layers=[0, 1, 1, 0])")
    assert codec.mean_bytes_per_token(4, 64, 64, 2) == 128 * (0.5 + 4 / 32 + 2) / 2
    with pytest.raises(ValueError, match="by_layer: the codec depends on the layer; call for_layer first"):
        codec.bytes_per_token(64, 64, 2)
    with pytest.raises(ValueError, match="by_layer: it has codecs for 4 layers; the plan compresses 3"):
        codec.mean_bytes_per_token(3, 64, 64, 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("by_layer(of=[])", "by_layer: of must be a list of codecs, one or more, found ()"),
        ("by_layer(of=kivi)", "by_layer: of is kivi, but it must be a list of methods of encode, in [ ]"),
        ("by_layer(of=[kivi, snapkv])", "by_layer: of is snapkv, a method of score, but it must be a method of encode"),
        ("by_layer(of=[kivi, kiwi])", "there is no method of encode named 'kiwi'; did you mean 'kivi'"),
        ("by_layer(of=[kivi(bits=9)])", "kivi: bits must be 1 to 8, found 9"),
        ("by_layer(of=[plain, plain])", "by_layer: all layers have plain, so nothing would be encoded: write plain"),
        ("by_layer(of=[kivi], layers=[0, 1])", "by_layer: layers[1] is 1, and the places in `of` go from 0 to 0"),
        ("by_layer(of=[kivi], layers=[-1])", "by_layer: layers[0] is -1, and the places in `of` go from 0 to 0"),
        ("by_layer(of=[kivi], layers=[0.0])", "by_layer: layers is (0.0,), but it must be"),
        ("by_layer(of=[kivi, fp8], layers=[0, 0])", "by_layer: no layer has of[1], Fp8("),
        ("by_layer(of=[kivi], layers=[])", "by_layer: no layer has of[0], Kivi("),
        (
            "by_layer(of=[kivi, vector])",
            "by_layer: the layers must agree in the recent window and in the block, and Kivi has 128 and 128 tokens "
            "where Vector has 0 and 128",
        ),
        ("by_layer(of=[kivi, minicache])", "by_layer: of[1] is MiniCache, which stores two layers' tokens together"),
        ("by_layer(of=[hadamard(of=minicache)])", "minicache stores two layers' tokens together, and by_layer encodes"),
        ("by_layer(of=[by_layer(of=[kivi])])", "by_layer: of[0] is another table of layers"),
        ("by_layer(of=[indexed])", "by_layer: of[0] is Indexed, which keeps its tokens as they are"),
        ("by_layer(of=[channels])", "channels ranks what it stores by the queries, and inside by_layer"),
        (
            "hadamard(of=by_layer(of=[kivi]))",
            "by_layer gives each layer a codec of its own, and hadamard around it would be one for all layers: write "
            "by_layer outside, as in by_layer(of=[hadamard(...), ...])",
        ),
        (
            "snapkv + pyramid + by_layer(of=[plain, kivi]) @ bytes=1MiB",
            "bytes= buys tokens at the mean price of the layers, and pyramid gives layers other numbers of tokens, "
            "which do not cost the same in each under by_layer: give the budget as tokens= or keep=",
        ),
        ("minicache(of=by_layer(of=[kivi]))", "by_layer gives each layer a codec of its own, and minicache around it"),
        ("minicache(of=by_layer(of=[kivi]), only=keys)", "minicache: by_layer is the outermost codec"),
    ],
)
def test_what_cannot_be_a_table_is_said(text: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    (found,) = caught.value.faults
    assert found.startswith(fault)


@pytest.mark.parametrize("budget", ["pyramid + {} @ tokens=64", "adakv + {} @ bytes=1MiB", "{} @ bytes=1MiB"])
def test_budgets_that_hold_are_allowed(budget: str) -> None:
    parse(f"snapkv + {budget.format('by_layer(of=[plain, kivi])')}")


@pytest.mark.parametrize("of", [3, (3,), None, "kivi", ("kivi",)])
def test_what_is_no_list_of_codecs_is_said_in_python(of: object) -> None:
    with pytest.raises(ValueError, match=r"by_layer: of(\[0\])? must be a (list of codecs|codec such as kivi)"):
        ByLayer(of=of)  # type: ignore[arg-type]
