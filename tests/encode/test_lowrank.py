"""Low rank as a codec: exactness, groups of heads, bytes, the words that are made of it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.encode.contract import CodecContext
from kvtailor.encode.subspace.kvplugin import KvPlugin
from kvtailor.encode.subspace.lowrank import LowRank
from kvtailor.encode.subspace.orthogonal import Orthogonal
from kvtailor.encode.unrotated import Unrotated
from kvtailor.encode.vector import Vector
from kvtailor.errors import PlanError
from kvtailor.ops.codes.subspace import StateMoments
from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.types import Layout, Rotation

ROTATION = Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1, 0.01]))


def told(heads: int = 4, size: int = 8, layers: int = 3, **facts: Any) -> CodecContext:
    """The facts of layer 1, with random moments."""
    generator = torch.Generator().manual_seed(4)
    tensors = LowRank.example_calibration(layers=layers, heads=heads, group=2, size=size, generator=generator)
    return CodecContext(layer=1, layers=layers, heads=heads, calibration=tensors, rotation=ROTATION, **facts)


def side_by_side(states: Tensor, heads: int) -> Tensor:
    """(b * h, s, c) as (b, s, h * c)."""
    return states.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads", [0, 1, 2, 3])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rank", [0.5, 5])
def test_is_project_then_reconstruct(heads: int, centred: bool, rank: float) -> None:
    """Against the definition with the moments of the file, head group by head group."""
    facts = told()
    codec = LowRank(rank=rank, heads=heads, centred=centred).for_layer(facts)
    keys, values = states((8, 21, 8), 1), states((8, 21, 8), 2)
    found = codec.encode(Layout(rows=2, heads=4, size=21, start=3), keys, values).decode()
    joined = {0: 4, 1: 1, 2: 2, 3: 2}[heads]
    width = joined * 8
    count = width // 2 if rank == 0.5 else 5
    assert facts.calibration is not None
    for name, given, got in (("keys", keys, found[0]), ("values", values, found[1])):
        parts = {part: facts.calibration[f"{name}_{part}"][1] for part in ("mean", "deviation", "correlation")}
        mean = parts["mean"].double().flatten()
        second = StateMoments(**parts).covariance() + mean[:, None] * mean
        wide = side_by_side(given, 4).double()
        for start in range(0, 32, width):
            own = slice(start, start + width)
            off = mean[own] if centred else torch.zeros(width, dtype=torch.float64)
            block = second[own, own] - mean[own, None] * mean[own] * centred
            directions = torch.linalg.eigh(block).eigenvectors[:, -count:]
            expected = (wide[..., own] - off) @ directions @ directions.mT + off
            assert torch.allclose(side_by_side(got, 4)[..., own].double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "codec",
    [LowRank(rank=1.0), LowRank(rank=1.0, heads=0, centred=True), LowRank(rank=999), KvPlugin(rank=8), Orthogonal()],
    ids=str,
)
def test_full_rank_is_exact(codec: LowRank) -> None:
    keys, values = states((8, 21, 8), 3), states((8, 21, 8), 4)
    segment = codec.for_layer(told()).encode(Layout(rows=2, heads=4, size=21, start=0), keys, values)
    for found, given in zip(segment.decode(), (keys, values), strict=True):
        assert torch.allclose(found, given, atol=1e-5)


def test_keys_before_the_rotary_embedding_have_directions_of_their_own() -> None:
    facts = told()
    plain, turned = LowRank(rank=0.5, only="keys"), Unrotated(of=LowRank(rank=0.5, only="keys"))
    layout = Layout(rows=2, heads=4, size=21, start=5)
    back, values = states((8, 21, 8), 5), states((8, 21, 8), 6)
    keys = turn(back, torch.arange(5, 26), ROTATION)
    found = turned.for_layer(facts).encode(layout, keys, values).decode()[0]
    assert facts.calibration is not None
    swapped = {**facts.calibration} | {
        f"keys_{part}": facts.calibration[f"unrotated_{part}"] for part in ("mean", "deviation", "correlation")
    }
    own = plain.for_layer(CodecContext(layer=1, layers=3, heads=4, calibration=swapped))
    expected = turn(own.encode(layout, back, values).decode()[0], torch.arange(5, 26), ROTATION)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, plain.for_layer(facts).encode(layout, keys, values).decode()[0], atol=0.1)


def test_only_leaves_the_other_side_as_it_is() -> None:
    keys, values = states((4, 21, 8), 7), states((4, 21, 8), 8)
    layout = Layout(rows=1, heads=4, size=21, start=0)
    for only, same in (("keys", 1), ("values", 0)):
        codec = LowRank(rank=0.25, only=only, heads=0, of=Vector(bits=8)).for_layer(told())  # type: ignore[arg-type]
        decoded = codec.encode(layout, keys, values).decode()
        assert torch.equal(decoded[same], (keys, values)[same])
        assert not torch.allclose(decoded[1 - same], (keys, values)[1 - same], atol=0.1)


def test_a_plan_that_evicts_projects_each_head_alone_at_the_same_share() -> None:
    keys, values = states((4, 21, 8), 9), states((4, 21, 8), 10)
    layout = Layout(rows=1, heads=4, size=21, start=0)
    together, apart = (LowRank(rank=16, heads=0).for_layer(told(evicts=evicts)) for evicts in (False, True))
    alone = LowRank(rank=4).for_layer(told())
    one, other = apart.encode(layout, keys, values), alone.encode(layout, keys, values)
    assert all(torch.equal(a, b) for a, b in zip(one.decode(), other.decode(), strict=True))
    assert apart.bytes_per_token(8, 8, 4) == together.bytes_per_token(8, 8, 4) == alone.bytes_per_token(8, 8, 4) == 32
    assert not torch.allclose(together.encode(layout, keys, values).decode()[0], one.decode()[0], atol=1e-3)


def test_heads_that_move_together_stay_joined() -> None:
    codec = LowRank(rank=0.5, heads=2).for_layer(told())
    layout = Layout(rows=2, heads=4, size=21, start=0)
    segment = codec.encode(layout, states((8, 21, 8), 11), states((8, 21, 8), 12))
    slot = torch.tensor([0, 3, 4, 20]).expand(8, -1)
    lane = torch.arange(8)[:, None].expand(-1, 4)
    after = Layout(rows=2, heads=4, size=4, positions=slot.to(torch.int32))
    moved = segment.regather(lane, slot, after)
    assert moved.joined == 2 and moved.closed_form_bytes() < segment.closed_form_bytes()
    own = slot.clone()
    own[3] = torch.tensor([1, 3, 4, 20])
    split = segment.regather(lane, own, Layout(rows=2, heads=4, size=4, positions=own.to(torch.int32)))
    assert split.joined == 1
    for found, each, at in ((moved, segment, slot), (split, segment, own)):
        for got, expected in zip(found.decode(), each.decode(), strict=True):
            assert torch.allclose(got, expected[lane, at], atol=1e-6)


def test_ranks_follow_the_weights_of_the_file() -> None:
    base = told()
    assert base.calibration is not None
    weights = {"fisher_keys": torch.tensor([1.0, 2.0, 3.0]), "fisher_values": torch.tensor([4.0, 5.0, 6.0])}
    codec = LowRank(rank=0.5, heads=0, allocation="fisher")
    ranks = []
    for layer in range(3):
        facts = CodecContext(layer=layer, layers=3, heads=4, calibration={**base.calibration, **weights})
        made = codec.for_layer(facts)
        segment = made.encode(Layout(rows=1, heads=4, size=5, start=0), states((4, 5, 8), 1), states((4, 5, 8), 2))
        assert segment.keys_basis is not None and segment.values_basis is not None
        ranks.append((segment.keys_basis.rank, segment.values_basis.rank))
        assert made.bytes_per_token(8, 8, 2) == sum(ranks[-1]) * 2 / 4
    # 96 in all, in twos: shares 4.57, 9.14, 13.71, 18.29, 22.86, 27.43.
    assert ranks == [(4, 18), (10, 22), (14, 28)]
    assert codec.mean_bytes_per_token(3, 8, 8, 2, heads=4) == 96 * 2 / 4 / 3


@pytest.mark.parametrize(
    ("codec", "size", "heads", "expected"),
    [
        (KvPlugin(rank=96, bits=8, only="values"), 128, 8, 256 + 96 + 2),
        (KvPlugin(rank=80, bits=8, only="values"), 128, 8, 256 + 80 + 2),
        (KvPlugin(rank=56, bits=8, only="values"), 64, 2, 128 + 56 + 2),
        (KvPlugin(rank=96, only="values"), 128, 8, 256 + 192),
        (LowRank(rank=0.5, heads=4), 128, 8, 256),
        (LowRank(rank=0.5, heads=4, of=Vector(bits=4)), 128, 8, 2 * (256 / 2 + 2) / 4),
        (Orthogonal(), 64, 12, 2 * 128 * 2 / 12),
        (Orthogonal(of=Vector(bits=8, only="values")), 64, 12, (128 * 2 + 128 + 2) / 12),
        (Orthogonal(), 64, 2, 256),
    ],
    ids=str,
)
def test_bytes_of_a_token_and_head_in_sixteen_bits(codec: LowRank, size: int, heads: int, expected: float) -> None:
    made = codec.for_layer(CodecContext(layer=0, layers=1, heads=heads))
    assert made.bytes_per_token(size, size, 2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("lowrank(rank=0)", "lowrank: rank must be 1 direction or more"),
        ("lowrank(rank=1.5)", "at most 1.0, found 1.5"),
        ("lowrank(heads=-1)", "lowrank: heads must be 1 or more, or 0"),
        ("lowrank(heads=2, shared=true)", "directions are those of single heads, found heads=2"),
        ("lowrank(basis=random, centred=true)", "basis=random has none"),
        ("lowrank(block_size=0)", "block_size 1 or more, found 0 and 0"),
        ("lowrank(of=unrotated(of=vector))", r"write unrotated\(of=lowrank\(...\)\)"),
        ("lowrank(only=values, of=vector(only=keys))", "only=values leaves Vector in `of` nothing to code"),
        ("kvplugin(bits=8, of=vector)", "bits and of both set"),
        ("kvplugin(bits=9)", "vector: bits must be 2 to 8, found 9"),
    ],
)
def test_refuses(text: str, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        Plan.parse(text)


def test_without_a_calibration_nothing_is_encoded() -> None:
    with pytest.raises(ValueError, match="lowrank: no calibration was given"):
        LowRank().encode(Layout(rows=1, heads=1, size=3, start=0), states((1, 3, 8), 1), states((1, 3, 8), 2))
