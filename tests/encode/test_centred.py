"""Centred: what is known to be in all keys is no matter of their codes, and comes back to each key as it was."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.seam.zoo import ROUNDING, VOCABULARY, build, error, prompts
from tests.support.segments_of import moved, uneven
from torch import Tensor

import kvtailor
from kvtailor.encode.centred import CentredSegment
from kvtailor.encode.contract import CodecContext
from kvtailor.engine.fast_path import FastPath, slow_path
from kvtailor.errors import PlanError
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.key_bias import key_offset_of
from kvtailor.hf.model.loading import new_model
from kvtailor.hf.model.modules import modules_by_layer
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.cpu.library import library
from kvtailor.ops.dispatch import using
from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.types import KeyOffset, Layout, Rotation

HEADS, SIZE = 3, 16
CODEC = "centred(of=vector(bits=2, block_size=1))"
ROTATIONS = {
    "halves": Rotation(frequencies=torch.logspace(0, -4, 8)),
    "interleaved": Rotation(frequencies=torch.logspace(0, -4, 8), interleaved=True),
    "partial": Rotation(frequencies=torch.tensor([1.0, 0.2, 0.01])),
    "none": None,
}


def codec_of(text: str) -> Any:
    return kvtailor.Plan.parse(text).encode


def vectors(heads: int = HEADS) -> Tensor:
    """Another constant in each head, a hundred times what keys differ by, with energy in every plane."""
    drawn = torch.randn(heads, SIZE, generator=torch.Generator().manual_seed(1))
    return 400 * drawn / drawn.norm(dim=-1, keepdim=True)


def bound(offset: KeyOffset, text: str = CODEC, **facts: Any) -> Any:
    return codec_of(text).for_layer(CodecContext(layer=0, layers=1, heads=HEADS, offset=offset, **facts))


def keys_of(layout: Layout, offset: KeyOffset, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What keys are beside the constant, and the keys."""
    drawn = torch.randn(layout.lanes, layout.size, SIZE, generator=torch.Generator().manual_seed(2))
    columns = layout.columns(torch.device("cpu"))
    if first is not None:
        columns = columns - first[:, None]
    constant = offset.vectors[layout.owners(torch.device("cpu")) % layout.heads][:, None]
    turned = constant if offset.rotation is None else turn(constant, columns, offset.rotation)
    return drawn, drawn + turned


def lost(codec: Any, layout: Layout, keys: Tensor, values: Tensor, first: Tensor | None = None) -> float:
    return float((codec.encode(layout, keys, values, first).decode()[0] - keys).norm() / values.norm())


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("first", [False, True])
def test_two_bits_lose_what_they_lose_without_the_constant(kind: str, first: bool) -> None:
    """A wrong sign, a position off by one or a neighbour's head loses ten times that, though 8 bits would hide it."""
    layout = Layout(rows=2, heads=HEADS, size=63, start=1000)
    offset = KeyOffset(vectors=vectors(), rotation=ROTATIONS[kind])
    begins = torch.tensor([0, 17]) if first else None
    of_lanes = None if begins is None else begins.repeat_interleave(HEADS)
    rest, keys = keys_of(layout, offset, of_lanes)
    alone = lost(codec_of("vector(bits=2, block_size=1)"), layout, rest, rest)
    assert lost(bound(offset), layout, keys, rest, begins) < 1.05 * alone + 1e-4
    wrong = [replace(offset, vectors=-offset.vectors), replace(offset, vectors=offset.vectors.roll(1, 0))]
    for each in wrong:
        assert lost(bound(each), layout, keys, rest, begins) > 10 * alone
    if offset.rotation is not None:
        late = replace(layout, start=1001)
        assert lost(bound(offset), late, keys, rest, begins) > 10 * alone


def test_a_wrong_constant_costs_precision_and_is_not_wrong() -> None:
    layout = Layout(rows=1, heads=HEADS, size=40, start=0)
    _, keys = keys_of(layout, KeyOffset(vectors=vectors()))
    wrong = KeyOffset(vectors=vectors().roll(1, 0), rotation=ROTATIONS["halves"])
    assert lost(bound(wrong, "centred(of=vector(bits=8, block_size=1))"), layout, keys, keys) < 0.02


def test_keys_before_their_rotation_have_the_constant_as_it_is() -> None:
    layout = Layout(rows=1, heads=HEADS, size=40, start=500)
    offset = KeyOffset(vectors=vectors(), rotation=ROTATIONS["halves"])
    rest, keys = keys_of(layout, offset)
    codec = bound(offset, f"unrotated(of={CODEC})", rotation=ROTATIONS["halves"])
    alone = lost(codec_of("vector(bits=2, block_size=1)"), layout, rest, rest)
    assert lost(codec, layout, keys, rest) < 1.5 * alone


def test_whatever_moves_lanes_moves_their_constants() -> None:
    """Heads, rows, kept slots, pages of unequal heads, and a saved segment."""
    offset = KeyOffset(vectors=vectors(), rotation=ROTATIONS["halves"])
    layout, begins = Layout(rows=2, heads=HEADS, size=60, start=0), torch.tensor([0, 5])
    _, keys = keys_of(layout, offset, begins.repeat_interleave(HEADS))
    segment = bound(offset).encode(layout, keys, keys, begins)
    whole = segment.decode()[0].view(2, HEADS, 60, SIZE)
    assert isinstance(segment, CentredSegment)
    for first in range(HEADS):
        part = segment.of_heads(first, 1)
        assert torch.equal(part.decode()[0].view(2, 1, 60, SIZE), whole[:, first : first + 1])
    order = torch.tensor([1, 1, 0])
    assert torch.equal(segment.rows(order).decode()[0].view(3, HEADS, 60, SIZE), whole[order])
    lane, slot, there = moved(layout, 4)
    kept = segment.regather(lane, slot, there)
    torch.testing.assert_close(kept.decode()[0], segment.decode()[0][lane, slot], rtol=0, atol=1e-3)
    fields, tensors = segment.state()
    assert torch.equal(bound(offset).restore(layout, fields, tensors).decode()[0], segment.decode()[0])
    paged, owner, column = uneven(2, HEADS, 16, most=40, columns=60, seed=3)
    found = bound(offset).encode(paged, keys[owner, column], keys[owner, column], begins).decode()[0]
    filled = paged.filled(torch.device("cpu"))
    near = (found - keys[owner, column]).abs().amax(-1)[filled]
    assert float(near.max()) < 5.0 < float(keys.abs().max())


def test_without_a_constant_it_is_the_inner_codec() -> None:
    inner = codec_of("vector(bits=4, block_size=32)")
    made = codec_of("centred(of=vector(bits=4, block_size=32))")
    assert made.for_layer(CodecContext(layer=0, layers=1)) == inner
    assert made.needs_offset and made.bears_offset and not inner.bears_offset
    model, (ids, mask) = build("llama"), prompts((40, 33))
    one, other = (kvtailor.prefill(model, ids, mask, plan=p) for p in (str(made_plan(True)), str(made_plan(False))))
    for mine, theirs in zip(one.engine.states, other.engine.states, strict=True):
        a, b = mine.stored.segments[0], theirs.stored.segments[0]
        assert type(a) is type(b) and all(map(torch.equal, a.decode(), b.decode()))
    assert one.ledger().total == other.ledger().total


@torch.no_grad()
@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("turboquant4", "hadamard(of=gaussian(bits=4), signs=0)"),
        ("turboquant3", "hadamard(of=gaussian(bits=3), signs=0)"),
        ("turboquant2", "hadamard(of=gaussian(bits=2), signs=0)"),
        ("quarot4", "hadamard(of=vector(bits=4, symmetric=false))"),
        (
            "sides(keys=turboquant4, values=quarot4)",
            "sides(keys=hadamard(of=gaussian(bits=4), signs=0), values=hadamard(of=vector(bits=4, symmetric=false)))",
        ),
    ],
)
def test_a_preset_is_what_was_published_where_keys_have_no_bias(preset: str, published: str) -> None:
    """The same segments, bytes, fast path and bits of logits."""
    model, (ids, mask) = build("llama"), prompts((150, 133))
    logits, kinds, fast_path = [], [], []
    for plan in (preset, published):
        answers, cache = decoded(model, ids, mask, plan)
        logits.append(answers)
        kinds.append([[type(each) for each in state.parts()] for state in cache.engine.states])
        fast_path.append([layer.fast_path is not None for layer in cache.layers])
    assert torch.equal(*logits) and kinds[0] == kinds[1] and fast_path[0] == fast_path[1]
    one, two = Plan.parse(preset).encode, Plan.parse(published).encode
    sizes = {"tokens": 100, "key_size": 64, "value_size": 64}
    assert one.bytes_per_token(64, 64, 2) == two.bytes_per_token(64, 64, 2)
    assert one.read_flops(queries=4, **sizes) == two.read_flops(queries=4, **sizes)
    assert one.encode_flops(**sizes) == two.encode_flops(**sizes)


def test_it_codes_one_side_and_of_values_is_the_inner_codec() -> None:
    layout = Layout(rows=1, heads=HEADS, size=40, start=500)
    offset = KeyOffset(vectors=vectors(), rotation=ROTATIONS["halves"])
    rest, keys = keys_of(layout, offset)
    coarse = "vector(bits=2, block_size=1)"
    made = bound(offset, f"sides(keys={CODEC}, values={CODEC})").encode(layout, keys, rest)
    alone = codec_of(coarse).encode(layout, rest, rest).decode()
    assert isinstance(made, CentredSegment) and torch.equal(made.decode()[1], alone[1])
    assert float((made.decode()[0] - keys).norm()) < 1.05 * float((alone[0] - rest).norm())


def made_plan(centred: bool) -> str:
    return "centred(of=vector(bits=4, block_size=16))" if centred else "vector(bits=4, block_size=16)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hadamard(of=centred(of=vector(bits=4)))", "write centred\\(of=hadamard"),
        ("minicache(of=centred(of=vector(bits=4)))", "leave centred out"),
        ("centred(of=indexed)", "as they are"),
        ("centred(of=unrotated(of=kivi(bits=4)))", "leave one of the two out"),
        ("centred(of=centred(of=vector(bits=4)))", "leave one of the two out"),
        ("centred(of=minicache)", "minicache"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        kvtailor.Plan.parse(text)


def biased(model: Any, times: float) -> Any:
    """The model, with a constant in its keys of so many times what a random projection gives."""
    for index, module in enumerate(modules_by_layer(model).values()):
        generator = torch.Generator().manual_seed(index)
        for name, parameter in module.named_parameters():
            if name in ("k_proj.bias", "query_key_value.bias"):
                parameter.data = times * torch.randn(parameter.shape, generator=generator)
    return model


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
# Halves, halves behind a norm with a bias, half of the channels interleaved, a quarter of them in a fused projection.
BIASED = {
    "qwen2": GROUPED,
    "starcoder2": {"use_bias": True, **GROUPED},
    "glm": {"attention_bias": True, "head_dim": 16, **GROUPED},
    "gpt_neox": {},
}


@torch.no_grad()
@pytest.mark.parametrize("family", BIASED)
def test_the_constant_of_a_model_is_what_twice_the_bias_adds_to_its_keys(family: str) -> None:
    """Independent of the probe: the first layer's cached keys differ by exactly that, at every position."""
    torch.manual_seed(0)
    model, (ids, _) = new_model(family, **SIZES, **BIASED[family]).eval(), prompts((50,))
    keys = []
    for times in (2.0, 1.0):
        cache = kvtailor.cache_for(biased(model, times), "full")
        model(ids, **hand_cache(cache))
        keys.insert(0, cache.engine.states[0].parts()[0].decode()[0])
    shape = Geometry.of(model.config).shapes[0]
    offset = key_offset_of(model, modules_by_layer(model)[0], shape.kind, shape.key_size, {})
    assert offset is not None and offset.rotation is not None
    expected = turn(offset.vectors[:, None].expand(-1, 50, -1), torch.arange(50), offset.rotation)
    assert error(keys[1] - keys[0], expected) < ROUNDING


@torch.no_grad()
def test_a_biased_model_loses_no_more_than_one_without(tmp_path: Path) -> None:
    """Logits of what was decoded under three bits, evicted, padded, saved, of a copy and after rows moved."""
    plan = "snapkv(window=8) + centred(of=vector(bits=4, block_size=4)) @ tokens=24"
    bare = plan.replace("centred(of=vector(bits=4, block_size=4))", "vector(bits=4, block_size=4)")
    ids, mask = prompts((60, 47))
    losses = {}
    for times in (0.0, 60.0):
        model = biased(build("qwen2"), times)
        for text in (bare, plan):
            whole, cut = (decoded(model, ids, mask, each) for each in (text.replace(codec(text), "plain"), text))
            losses[times, text] = float(
                (whole[0].log_softmax(-1).exp() * (whole[0].log_softmax(-1) - cut[0].log_softmax(-1))).sum(-1).mean()
            )
    assert losses[60.0, plan] < 2 * losses[0.0, plan] and losses[60.0, bare] > 3 * losses[60.0, plan]
    cache = decoded(model, ids, mask, plan)[1]
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvtailor.load_cache(model, tmp_path / "cache.safetensors")
    token, wide = prompts((1, 1), state=3)[0], torch.cat([mask, mask.new_ones(2, 9)], 1)
    expected = model(token, attention_mask=wide, **hand_cache(cache)).logits
    assert torch.equal(model(token, attention_mask=wide, **hand_cache(loaded)).logits, expected)
    other = decoded(model, ids, mask, plan)[1]
    other.reorder_cache(torch.tensor([1, 0]))
    swapped = model(token.flip(0), attention_mask=wide.flip(0), **hand_cache(other)).logits
    assert error(swapped.flip(0), expected) < ROUNDING


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the C++ kernels were not built: no compiler")
@pytest.mark.parametrize("family", BIASED)
@pytest.mark.parametrize(
    "plan",
    [
        "centred(of=vector(bits=4, block_size=16))",
        "centred(of=hadamard(of=gaussian(bits=4, block_size=16), signs=0))",
        "snapkv(window=8) + centred(of=vector(bits=4, block_size=16)) @ tokens=30",
        "snapkv(window=8) + adakv + centred(of=kivi(bits=4, group=8, recent=8)) @ tokens=30",
    ],
)
def test_the_short_way_and_the_general_way_read_codes_as_they_lie(
    family: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows, evicted and ragged too: both give the same bits, and what decoded keys give up to rounding."""
    torch.manual_seed(0)
    model, (ids, mask) = new_model(family, **SIZES, **BIASED[family]).eval(), prompts((60, 47))
    biased(model, 30.0)
    taken, take = [], FastPath.take
    monkeypatch.setattr(FastPath, "take", lambda *given, **named: taken.append(take(*given, **named)) or taken[-1])
    short, cache = decoded(model, ids, mask, plan)
    assert len(taken) >= len(cache.layers)
    assert any(isinstance(part, CentredSegment) for state in cache.engine.states for part in state.parts())
    with slow_path():
        general = decoded(model, ids, mask, plan)[0]
    assert torch.equal(short, general)
    with using("reference"):
        plain = decoded(model, ids, mask, plan)[0]
    assert error(short, plain) < 1e-3


def codec(plan: str) -> str:
    return plan.partition(" + ")[2].partition(" @")[0]


def decoded(model: Any, ids: Tensor, mask: Tensor, plan: str) -> tuple[Tensor, Any]:
    """Logits of eight tokens that come one by one after a prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache, logits = kvtailor.prefill(model, ids, mask, plan=plan), []
        for step in range(8):
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            token = prompts((1,) * len(mask), state=step)[0]
            logits.append(model(token, attention_mask=mask, **hand_cache(cache)).logits)
    return torch.cat(logits, 1), cache


def test_the_caches_of_a_model_share_its_constants_until_the_bias_changes() -> None:
    """The bench found a copy in each cache, which no ledger had."""
    model = biased(build("qwen2"), 1.0)

    def offsets() -> list[Any]:
        return [state.model.offset for state in kvtailor.cache_for(model, CODEC).engine.states]

    first, second = offsets(), offsets()
    assert all(one is two for one, two in zip(first, second, strict=True))
    assert all(each.vectors.untyped_storage().nbytes() == each.vectors.numel() * 4 for each in first)
    next(iter(modules_by_layer(model).values())).k_proj.bias.data.mul_(2)
    torch.testing.assert_close(offsets()[0].vectors, 2 * first[0].vectors)


@torch.no_grad()
def test_a_padded_forward_without_positions_codes_as_one_with_them() -> None:
    """Such a model counts padding, so that its keys are turned by other positions than real tokens have."""
    model, (ids, mask) = biased(build("qwen2"), 60.0), prompts((60, 21))
    token, wide = prompts((1, 1), state=4)[0], torch.cat([mask, mask.new_ones(2, 1)], 1)
    lost_by = {}
    for told in (True, False):
        logits = []
        for plan in ("full", "centred(of=vector(bits=8, block_size=4))"):
            cache = kvtailor.cache_for(model, plan)
            positions = (mask.cumsum(1) - 1).clamp(min=0) if told else torch.arange(60).expand(2, -1)
            model(ids, attention_mask=mask, position_ids=positions, **hand_cache(cache))
            last = positions[:, -1:] + 1
            logits.append(model(token, attention_mask=wide, position_ids=last, **hand_cache(cache)).logits)
        lost_by[told] = error(logits[1], logits[0])
    assert lost_by[False] < 3 * lost_by[True] < 0.3
