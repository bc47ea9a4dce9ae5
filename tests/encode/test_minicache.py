"""Two layers on one direction: the arc worked by hand and by loops, what stays exact, and what a pair costs."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.crossed import crossed
from tests.support.segments_of import states, uneven
from torch import Tensor

from kvtailor.encode.contract import CodecContext
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.minicache import MiniCache, MiniCacheSegment
from kvtailor.encode.plain import Plain
from kvtailor.encode.vector import Vector
from kvtailor.errors import CacheMisuse, PlanError
from kvtailor.ledger import storage_bytes
from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.types import Layout, Rotation

Pair = list[tuple[Tensor, Tensor]]


def naive(lower: Tensor, upper: Tensor, t: float, retained: float) -> tuple[Tensor, Tensor]:
    """The paper's formulas on (m, s, c), a token at a time in float64; no zeros, no opposite vectors."""
    restored = lower.clone(), upper.clone()
    for lane in range(lower.shape[0]):
        angles = []
        for slot in range(lower.shape[1]):
            x, y = lower[lane, slot].double(), upper[lane, slot].double()
            u, v = x / x.norm(), y / y.norm()
            omega = math.acos(float(u @ v))
            e = (math.sin((1 - t) * omega) * u + math.sin(t * omega) * v) / math.sin(omega)
            restored[0][lane, slot], restored[1][lane, slot] = e * x.norm(), e * y.norm()
            angles.append(omega)
        for slot in sorted(range(len(angles)), key=lambda i: -angles[i])[: math.ceil(retained * len(angles))]:
            restored[0][lane, slot], restored[1][lane, slot] = lower[lane, slot], upper[lane, slot]
    return restored


def near_pair(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Keys (m, s, d) and values (m, s, dv) of two layers whose vectors are alike, as those of deep layers are."""
    lanes, slots, size, value_size = shape
    lower = states((lanes, slots, size), seed), states((lanes, slots, value_size), seed + 1)
    upper = [1.7 * x + 0.4 * states(tuple(x.shape), seed + 2 + i) for i, x in enumerate(lower)]
    return [(lower[0].to(dtype), lower[1].to(dtype)), (upper[0].to(dtype), upper[1].to(dtype))]


def pair_of(codec: MiniCache, layout: Layout, pair: Pair) -> list[MiniCacheSegment]:
    bound = codec.for_layer(CodecContext(layer=2, layers=4))
    assert isinstance(bound, MiniCache)
    return bound.encode_group(layout, pair)


def two(lower: list[float], upper: list[float], **options: float) -> tuple[list[float], list[float]]:
    """One key of each layer, stored together and restored."""
    x, y = torch.tensor([[lower]]), torch.tensor([[upper]])
    codec = MiniCache(**{"start": 0.0, "retained": 0.0, **options})
    halves = pair_of(codec, Layout(rows=1, heads=1, size=1, start=0), [(x, x), (y, y)])
    below, above = (half.decode()[0].flatten().tolist() for half in halves)
    return below, above


def test_a_right_angle_by_hand() -> None:
    """From (1, 0) to (0, 1), 0.6 of 90 degrees is 54: cos 54 = 0.587785, sin 54 = 0.809017; norms are 2 and 3."""
    below, above = two([2.0, 0.0], [0.0, 3.0])
    assert below == pytest.approx([1.175571, 1.618034], abs=1e-6)
    assert above == pytest.approx([1.763356, 2.427051], abs=1e-6)


def test_sixty_degrees_halfway_by_hand() -> None:
    """Halfway from 0 to 60 degrees is 30: (sqrt(3) / 2, 1 / 2)."""
    below, above = two([1.0, 0.0], [2.0, 3.4641016], t=0.5)
    assert below == pytest.approx([0.8660254, 0.5], abs=1e-6) and above == pytest.approx([3.4641016, 2.0], abs=1e-6)


@pytest.mark.parametrize(
    ("lower", "upper", "below", "above"),
    [
        ([0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [3.0, 4.0]),
        ([3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([5.0, 0.0], [-2.0, 0.0], [-5.0, 0.0], [-2.0, 0.0]),
        ([3.0, 4.0], [6.0, 8.0], [3.0, 4.0], [6.0, 8.0]),
    ],
)
def test_where_there_is_no_arc(lower: list[float], upper: list[float], below: list[float], above: list[float]) -> None:
    """Opposite directions meet on the straight line, at 0.4 - 0.6 = -0.2 of the lower one: on the deeper one's side."""
    found = two(lower, upper)
    assert found[0] == pytest.approx(below, rel=1e-6) and found[1] == pytest.approx(above, rel=1e-6)


@pytest.mark.parametrize(("t", "retained"), crossed([0.0, 0.3, 0.6, 1.0], [0.5, 0.0, 0.05, 1.0]))
def test_equals_a_plain_loop(t: float, retained: float) -> None:
    pair = near_pair((15, 63, 24, 20), 5)
    layout = Layout(rows=3, heads=5, size=63, start=7)
    found = [half.decode() for half in pair_of(MiniCache(t=t, retained=retained), layout, pair)]
    for side in (0, 1):
        for layer, expected in enumerate(naive(pair[0][side], pair[1][side], t, retained)):
            torch.testing.assert_close(found[layer][side], expected, rtol=1e-5, atol=1e-5)


def test_unrelated_layers_equal_a_plain_loop_too() -> None:
    pair = [(states((2, 40, 8), 1), states((2, 40, 8), 2)), (states((2, 40, 8), 3), -states((2, 40, 8), 4))]
    found = [half.decode() for half in pair_of(MiniCache(), Layout(rows=1, heads=2, size=40, start=0), pair)]
    for side in (0, 1):
        for layer, expected in enumerate(naive(pair[0][side], pair[1][side], 0.6, 0.05)):
            torch.testing.assert_close(found[layer][side], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_stays(dtype: torch.dtype) -> None:
    """Equal layers, every norm, and both vectors of what is retained, which is 5 % and bit for bit."""
    layout, step = Layout(rows=2, heads=3, size=63, start=0), torch.finfo(dtype).eps
    pair = near_pair((6, 63, 24, 20), 3, dtype)
    alike = pair_of(MiniCache(), layout, [pair[0], pair[0]])
    for half in alike:
        for found, given in zip(half.decode(), pair[0], strict=True):
            assert bool(((found - given).abs() <= 4 * step * given.abs()).all())
    for half, given in zip(pair_of(MiniCache(), layout, pair), pair, strict=True):
        for x, y in zip(half.decode(), given, strict=True):
            torch.testing.assert_close(x.double().norm(dim=-1), y.double().norm(dim=-1), rtol=4 * step, atol=0)
            assert (x == y).all(-1).sum(-1).tolist() == [4] * 6, "a twentieth of 63 tokens, rounded up"


def test_ragged_rows_retain_a_share_of_their_own_tokens() -> None:
    """A row that is cut into pages, or is the only one in its batch, has the same tokens retained."""
    layout, owner, column = uneven(3, 5, 16, most=90, columns=128, seed=0)
    whole = near_pair((15, 128, 24, 20), 9)
    halves = pair_of(MiniCache(retained=0.1), layout, [(x[owner, column], y[owner, column]) for x, y in whole])
    filled = layout.filled(torch.device("cpu"))
    assert filled is not None and layout.owner is not None
    for lane in range(15):
        mine = layout.owner == lane
        kept = column[mine][filled[mine]]
        for side in (0, 1):
            expected = naive(whole[0][side][lane, kept][None], whole[1][side][lane, kept][None], 0.6, 0.1)
            for half, wanted in zip(halves, expected, strict=True):
                torch.testing.assert_close(half.decode()[side][mine][filled[mine]], wanted[0], rtol=1e-5, atol=1e-5)


def test_merging_commutes_with_the_rotary_embedding() -> None:
    """The same position turns both layers alike, and so what lies between them."""
    pair, rotation = near_pair((6, 63, 24, 20), 4), Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1, 0.01]))
    layout, positions = Layout(rows=2, heads=3, size=63, start=0), torch.arange(63)[None]
    turned = [(turn(keys, positions, rotation), values) for keys, values in pair]
    before, after = pair_of(MiniCache(), layout, pair), pair_of(MiniCache(), layout, turned)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(turn(one.decode()[0], positions, rotation), other.decode()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.25])
def test_a_pair_costs_what_the_definition_says(share: float) -> None:
    """For keys and values d + 2 + 2 rho d bytes of float16 each, as the mean of the two, and half of two 4-byte indices
    of each token that is retained. Over a model half of whose layers are merged 0.78 of everything, not a half."""
    d, codec = 128, MiniCache(retained=share)
    expected = 2 * (d + 2 + 2 * share * d) + 4 * share
    assert codec.bytes_per_token(d, d, 2) == pytest.approx(expected)
    assert codec.mean_bytes_per_token(32, d, d, 2) == pytest.approx((4 * d + expected) / 2)
    pair = near_pair((6, 200, d, d), 3, torch.float16)
    halves = pair_of(codec, Layout(rows=2, heads=3, size=200, start=0), pair)
    stored = storage_bytes(tensor for half in halves for tensor in half.tensors().values())
    assert stored == sum(half.closed_form_bytes() for half in halves) == pytest.approx(2 * 1200 * expected)
    if share == 0.05:
        assert codec.mean_bytes_per_token(32, d, d, 2) / (4 * d) == pytest.approx(0.779, abs=1e-3)


@pytest.mark.parametrize("of", [Plain(), Vector(bits=4), Kivi(bits=2)], ids=["plain", "vector", "kivi"])
def test_what_is_shared_is_stored_once_and_again_after_a_move(of: Plain | Vector | Kivi) -> None:
    codec, index = MiniCache(of=of), torch.tensor([1, 0, 1])
    halves = pair_of(codec, Layout(rows=2, heads=3, size=128, start=0), near_pair((6, 128, 32, 16), 3))
    moved = [half.rows(index) for half in halves]
    apart = storage_bytes(tensor for half in moved for tensor in half.tensors().values())
    joined = codec.joined(moved)
    stored = storage_bytes(tensor for half in joined for tensor in half.tensors().values())
    assert stored == sum(half.closed_form_bytes() for half in joined) < apart
    for half, before, kept in zip(joined, moved, halves, strict=True):
        for x, y, z in zip(half.decode(), before.decode(), kept.decode(), strict=True):
            assert torch.equal(x, y) and torch.equal(x, z[[3, 4, 5, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(CacheMisuse, match="hold 6 lanes of 128 tokens and 9 of 128"):
        codec.joined([moved[0], halves[1]])


def test_the_inner_codec_holds_the_directions() -> None:
    """4 bits of directions are an error that magnitudes do not see: half a step of the direction, times the norm."""
    pair = near_pair((6, 63, 24, 20), 3)
    layout = Layout(rows=2, heads=3, size=63, start=0)
    exact, coarse = (pair_of(MiniCache(of=of, retained=0.0), layout, pair) for of in (Plain(), Vector(bits=4)))
    for one, other in zip(exact, coarse, strict=True):
        for x, y in zip(one.decode(), other.decode(), strict=True):
            half = x.abs().amax(-1, keepdim=True) / 7 / 2
            assert bool(((x - y).abs() <= half * 1.0001).all()) and not torch.allclose(x, y, atol=1e-3)


@pytest.mark.parametrize("of", [Plain(), Vector(bits=4), Kivi(bits=4)], ids=["plain", "vector", "kivi"])
def test_one_side_alone(of: Plain | Vector | Kivi) -> None:
    """What is merged is what is merged of both; the other side is each layer's own, bit for bit and byte for byte."""
    pair = near_pair((6, 128, 32, 16), 3)
    layout = Layout(rows=2, heads=3, size=128, start=0)
    both = [half.decode() for half in pair_of(MiniCache(of=of), layout, pair)]
    for side, only, size in ((0, "keys", 32), (1, "values", 16)):
        codec = MiniCache(of=of, only=only)  # type: ignore[arg-type]
        halves = pair_of(codec, layout, pair)
        for half, together, given in zip(halves, both, pair, strict=True):
            assert torch.equal(half.decode()[side], together[side]) and torch.equal(
                half.decode()[1 - side], given[1 - side]
            )
        stored = storage_bytes(tensor for half in halves for tensor in half.tensors().values())
        assert stored == sum(half.closed_form_bytes() for half in halves)
        # Seven of 128 tokens, a twentieth rounded up, in both layers; a magnitude in both; a 4-byte index once.
        own = 2 * 6 * (128 * 4 + 7 * size * 4) + 6 * 7 * 4 + 2 * 6 * 128 * (48 - size) * 4
        assert stored == halves[0].shared.closed_form_bytes() + own
        if of == Plain():
            assert stored == 6 * 128 * size * 4 + own
    with pytest.raises(PlanError, match="minicache: only=keys leaves Vector in `of` nothing to code"):
        Plan.parse("minicache(of=vector(only=values), only=keys)")
    with pytest.raises(PlanError, match="minicache: only=values merges no keys"):
        Plan.parse("minicache(of=unrotated(of=vector), only=values)")


def test_which_layers_are_pairs() -> None:
    assert MiniCache().layer_groups(5) == ((0,), (1,), (2, 3), (4,))
    assert MiniCache(start=0.0).layer_groups(4) == ((0, 1), (2, 3))
    assert MiniCache(start=0.29).layer_groups(100)[28:30] == ((28,), (29, 30))
    assert MiniCache(of=Vector()).for_layer(CodecContext(layer=0, layers=4)) == Vector()
    assert (
        MiniCache().misfit(layers=1, heads=2, size=16) is not None
        and MiniCache().misfit(layers=3, heads=2, size=16) is None
    )


def test_refusals_are_sentences() -> None:
    layout, pair = Layout(rows=1, heads=2, size=8, start=0), near_pair((2, 8, 16, 16), 1)
    with pytest.raises(CacheMisuse, match=r"shapes \(\(2, 8, 16\).*\(\(2, 8, 12\).*same kv heads and head size"):
        pair_of(MiniCache(), layout, [pair[0], (pair[1][0][..., :12], pair[1][1])])
    with pytest.raises(CacheMisuse, match="minicache was given keys.*NaN or infinity.*no direction"):
        pair_of(MiniCache(), layout, [pair[0], (pair[1][0] * float("nan"), pair[1][1])])
    with pytest.raises(PlanError, match="minicache stores two layers' tokens together, and snapkv keeps other tokens"):
        Plan.parse("snapkv + minicache @ tokens=64")
    with pytest.raises(PlanError, match="(?s)pyramid gives each its own budget.*keep= may leave one of them"):
        Plan.parse("position + pyramid + minicache @ keep=0.5")
    with pytest.raises(PlanError, match=r"write minicache outside, as in minicache\(of=hadamard\)"):
        Plan.parse("hadamard(of=minicache)")
    for text, said in (
        ("minicache(t=1.5)", "minicache: t must be a share from 0.0 to 1.0, found 1.5"),
        ("minicache(of=minicache)", "minicache: of must be a codec that stores each token of one layer by itself"),
        ("minicache(block_size=0)", "minicache: block_size must be 1 token or more"),
    ):
        with pytest.raises(PlanError, match=said):
            Plan.parse(text)
