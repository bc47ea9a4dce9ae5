"""Keys that are turned as they are read, by every variant, against a plain loop in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.ops.cpu.coded_layouts import COARSE, LAYOUTS, every_dtype, every_variant, exact, needs_built, states_of
from tests.ops.cpu.coded_truth import attend_by, same, truth
from torch import Tensor

from kvtailor.ops.attention.cpu import attention
from kvtailor.ops.attention.cpu.attention import attend_and_keep, attend_coded
from kvtailor.ops.codes.hadamard import coordinates
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs, Turned
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.types import Coordinates, Layout, Rotation

pytestmark = [needs_built, pytest.mark.usefixtures("poisoned")]
# Layouts whose channels are in their order, and that are not twice as many numbers.
INSIDE = (
    "plain",
    "vector3",
    "tokens4",
    "channels4",
    "channels4x5",
    "levels3",
    "nvfp4",
    "fitted3",
    "fitted4",
    "fitted5",
)
# (b, h, g, t, s, d), turned channels: odd sizes, several blocks and pieces.
SIZES = [
    ((1, 2, 4, 1, 63, 128), 128),
    ((3, 1, 1, 1, 600, 64), 32),
    ((2, 3, 3, 2, 130, 24), 22),
    ((1, 1, 7, 1, 1030, 80), 80),
]


def turned_by(size: int, layout: Layout, *maps: Coordinates, joined: int = 1, interleaved: bool = False) -> Turned:
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    rotation = Rotation(frequencies=frequencies, interleaved=interleaved)
    return Turned(rotation=rotation, first=None, layout=layout, keys_in=maps, joined=joined)


def model_keys(stored: Tensor, turned: Turned) -> Tensor:
    """Keys of each kv head (n, s, d) from what is stored (n / joined, s, r), in float64, one head after the other."""
    found, rotation = [], turned.rotation
    columns = turned.layout.columns(torch.device("cpu")).expand(stored.shape[:2])
    for head in range(stored.shape[0] * turned.joined):
        lane = head // turned.joined
        keys = stored[lane].double()
        for each in reversed(turned.keys_in):
            k = head % each.matrix.shape[0]
            parts = [part @ each.matrix[k].double().T * each.scale for part in keys.chunk(each.blocks, -1)]
            keys = torch.cat(parts, -1) + (0 if each.mean is None else each.mean[k].double())
        places = columns[lane] - (0 if turned.first is None else turned.first[lane])
        for plane, frequency in enumerate(rotation.frequencies):
            # Angles are products in float32, as they were where the keys were turned back.
            angle = (places.float() * frequency).double()
            a, b = (2 * plane, 2 * plane + 1) if rotation.interleaved else (plane, plane + rotation.size // 2)
            one, two = keys[:, a].clone(), keys[:, b].clone()
            keys[:, a], keys[:, b] = one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()
        found.append(keys)
    return torch.stack(found)


def expected(query: Tensor, keys: Coded, values: Coded, turned: Turned, **how: Tensor) -> tuple[Tensor, Tensor]:
    """For each lane, whose rows are those of the heads that share it."""
    lanes, rows, new, size = query.shape
    by_head = query.reshape(lanes * turned.joined, rows // turned.joined, new, size)
    whole = Whole(states=model_keys(exact(keys), turned))
    each = Whole(states=exact(values).repeat_interleave(turned.joined, 0))
    out, lse = truth(by_head, whole, each, **how)
    return out.reshape(lanes, rows, new, -1), lse.reshape(lanes, rows, new)


@every_variant
@every_dtype
@pytest.mark.parametrize("layout", INSIDE)
def test_every_layout_is_turned(library: Library, dtype: torch.dtype, layout: str) -> None:
    for index, ((b, h, g, t, s, d), size) in enumerate(SIZES):
        keys, values = (LAYOUTS[layout](states) for states in states_of(index, dtype, b * h, s, d))
        turned = turned_by(size, Layout(rows=b, heads=h, size=s, start=1000), interleaved=index % 2 == 1)
        if index:
            turned = turned._replace(first=torch.tensor([0, 7, 1200])[:b].repeat_interleave(h))
        query = torch.randn((b * h, g, t, d), generator=torch.Generator().manual_seed(9))
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, turned=turned), using=library)
        tolerance = 1e-5 if dtype == torch.float32 or layout == "plain" else COARSE
        assert same(found, expected(query, keys, values, turned), tolerance), (layout, index)


def lane_positions(lanes: int, slots: int) -> Layout:
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(1, 300, (lanes, slots), generator=generator, dtype=torch.int32).cumsum(
        1, dtype=torch.int32
    )
    return Layout(rows=1, heads=lanes, size=slots, positions=positions)


@every_variant
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_lane_has_its_own_far_positions(library: Library, interleaved: bool) -> None:
    """Up to some 90,000, where a float32 angle is off by a hundredth of what a turn of the last plane would be."""
    keys, values = (Whole(states=states) for states in states_of(1, torch.float32, 3, 600, 64))
    turned, query = turned_by(64, lane_positions(3, 600), interleaved=interleaved), torch.randn(3, 2, 1, 64)
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, turned=turned), using=library)
    assert same(found, expected(query, keys, values, turned))
    nearer = turned._replace(layout=Layout(rows=1, heads=3, size=600, positions=turned.layout.positions - 1))
    later = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, turned=nearer), using=library)
    assert not same(later, expected(query, keys, values, turned), 1e-3)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joined", [1, 4])
@pytest.mark.parametrize("size, rank", [(128, 200), (20, 33), (64, 64)])
def test_coordinates_become_channels_before(
    library: Library, dtype: torch.dtype, joined: int, size: int, rank: int
) -> None:
    """Of single heads and of several that share a lane; with a mean, in blocks, and one map after another."""
    state = torch.Generator().manual_seed(size)
    heads, b, s = 4, 2, 301
    draw = lambda *shape: torch.randn(shape, generator=state) / rank**0.5  # noqa: E731
    one = Coordinates(matrix=draw(heads, size, rank), scale=2.0)
    blocks = Coordinates(matrix=draw(1, size // 4, rank // 4), blocks=4, scale=0.5)
    chains = [(one,), (replace(one, mean=draw(heads, size)),), (blocks,)]
    chains += [(one, Coordinates(matrix=draw(1, rank, 32), mean=draw(1, rank)))]
    # One for all heads, then one for each, then blocks that are mixed.
    own = Coordinates(matrix=draw(heads, rank // 4 * 4, 36), mean=draw(heads, rank // 4 * 4))
    chains += [(replace(blocks, mean=draw(1, size)), own, replace(coordinates(36, torch.device("cpu"), 1), scale=0.5))]
    for maps, layout in zip(chains, ("tokens4", "plain", "plain", "nvfp4", "plain"), strict=True):
        stored = maps[-1].blocks * maps[-1].matrix.shape[-1]
        lanes = b * heads // joined
        keys = LAYOUTS[layout](states_of(2, dtype, lanes, s, stored)[0])
        values = Whole(states=states_of(3, dtype, lanes, s, 40)[1])
        turned = turned_by(size, Layout(rows=b, heads=heads // joined, size=s, start=5), *maps, joined=joined)
        turned = turned._replace(first=torch.tensor([0, 9]).repeat_interleave(heads // joined))
        query = torch.randn((lanes, 3 * joined, 1, size), generator=state) * 3
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, turned=turned), using=library)
        tolerance = 2e-5 if dtype == torch.float32 else COARSE
        assert same(found, expected(query, keys, values, turned), tolerance), (layout, len(maps))


@every_variant
@pytest.mark.parametrize("layout", ["plain", "fitted3"])
def test_what_is_seen_and_what_each_slot_receives(library: Library, layout: str) -> None:
    keys, values = (LAYOUTS[layout](states) for states in states_of(3, torch.float32, 4, 300, 64))
    state = torch.Generator().manual_seed(5)
    query, visible = torch.randn((4, 2, 3, 64), generator=state), torch.rand((4, 3, 300), generator=state) < 0.2
    visible[0, 0], weight = False, torch.rand((4, 300), generator=state)
    turned = turned_by(64, Layout(rows=1, heads=4, size=300, start=0))
    how = {"visible": visible, "log_weight": weight}
    out, lse, kept = attend_and_keep(
        AttentionInputs(query, keys, values, scaling=0.1, turned=turned, **how), using=library
    )
    assert same((out, lse), expected(query, keys, values, turned, **how))
    logits = query.double() @ model_keys(exact(keys), turned)[:, None].mT * 0.1 + weight[:, None, None]
    shares = (logits - lse[..., None]).exp().masked_fill(~visible[:, None], 0).nan_to_num(0)
    torch.testing.assert_close(kept.mass(lse, torch.ones(4, 3)), shares.sum((1, 2)).float(), atol=1e-5, rtol=1e-4)


@every_variant
@pytest.mark.parametrize("owned", [False, True])
def test_filled_slots_alone_are_read(library: Library, owned: bool) -> None:
    """Pages of an owner, and lanes that take their blocks in turns."""
    lengths = torch.tensor([300, 300, 7, 299], dtype=torch.int32)
    owner = torch.tensor([0, 0, 0, 2]) if owned else None
    keys, values = (states.clone() for states in states_of(4, torch.float32, 4, 300, 32))
    for lane, length in enumerate(lengths.tolist()):
        keys[lane, length:] = values[lane, length:] = torch.nan
    layout = lane_positions(4, 300) if owned else Layout(rows=1, heads=4, size=300, start=40)
    turned, query = turned_by(32, layout), torch.randn(3 if owned else 4, 3, 1, 32)
    out, lse = attend_coded(
        AttentionInputs(
            query, Whole(states=keys), Whole(states=values), scaling=0.1, owner=owner, lengths=lengths, turned=turned
        ),
        using=library,
    )
    whole, of_lane = model_keys(keys, turned), [0, 1, 2, 3] if owner is None else owner.tolist()
    for mine in range(query.shape[0]):
        lanes = [lane for lane in range(4) if of_lane[lane] == mine]
        if not lanes:
            assert (lse[mine] == -torch.inf).all() and (out[mine] == 0).all()
            continue
        k, v = (torch.cat([each[lane, : lengths[lane]] for lane in lanes])[None] for each in (whole, values))
        alone = truth(query[mine : mine + 1], Whole(states=k), Whole(states=v))
        assert same((out[mine : mine + 1], lse[mine : mine + 1]), alone)


@every_variant
def test_threads_share_what_is_turned(library: Library, threads: int) -> None:
    keys, values = (LAYOUTS["fitted4"](states) for states in states_of(10, torch.bfloat16, 6, 400, 64))
    query, turned = torch.randn(6, 4, 1, 64), turned_by(64, Layout(rows=2, heads=3, size=400, start=0))
    assert keys.decode().numel() * 4 > attention._SMALL
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, turned=turned), using=library)
    assert same(found, expected(query, keys, values, turned), COARSE)


@every_variant
def test_fitted_levels_of_moved_tokens_and_of_many_channels(library: Library) -> None:
    """Counts and channels have 16 bits above 255 channels; every width is another way to pick a level."""
    state = torch.Generator().manual_seed(6)
    for bits, size in itertools.product((1, 2, 3, 4, 5, 8), (64, 300)):
        query = torch.randn((2, 3, 1, size), generator=state)
        made = {"bits": bits, "group": 32, "share": 0.03}
        keys, values = states_of(bits, torch.float32, 3, 100, size)
        first = torch.zeros((3, 100), dtype=torch.bool)
        first[:, 0] = True
        keys = LAYOUTS["fitted3"].func(keys, by_channel=True, whole=first, **made)
        values = LAYOUTS["fitted3"].func(values, by_channel=False, whole=first, **made)
        lane, slot = torch.randint(0, 3, (2, 50), generator=state), torch.randint(0, 100, (2, 50), generator=state)
        sides = keys.regather(lane, slot), values.regather(lane, slot)
        assert same(attend_by(library)(query, *sides), truth(query, *sides)), (bits, size)


@every_variant
def test_mapped_sums_do_not_overflow_and_hide_nothing(library: Library) -> None:
    """Whole numbers, where a variant takes them, are as large as they can be; what is no number stays in its lane."""
    stored = torch.ones((2, 40, 96), dtype=torch.bfloat16)
    stored[1, ::3] = -1
    matrix = torch.ones((1, 32, 96)) * torch.linspace(0.1, 3, 32)[:, None]
    turned = turned_by(32, Layout(rows=1, heads=2, size=40, start=0), Coordinates(matrix=matrix))
    query, values = torch.randn(2, 3, 1, 32) / 300, Whole(states=states_of(3, torch.bfloat16, 2, 40, 32)[1])
    attend, keys = attend_by(library), Whole(states=stored)
    assert same(attend(query, keys, values, turned=turned), expected(query, keys, values, turned), COARSE)
    for wrong in (torch.nan, torch.inf):
        stored[0, 5, 3] = wrong
        out, _ = attend(query, keys, values, turned=turned)
        assert out[0].isnan().all() and out[1].isfinite().all()


# (lanes, rows, slots, size): several blocks, runs that end within one, every number of rows at once.
FITTED_SIZES = [(2, 4, 600, 128), (6, 7, 300, 64), (1, 1, 257, 256), (3, 2, 63, 64), (2, 3, 129, 192)]


def rough_states(seed: int, dtype: torch.dtype, lanes: int, slots: int, size: int) -> tuple[Tensor, Tensor]:
    """Keys of channels that differ thirtyfold, with an offset and a loud first token, as those of models are."""
    keys, values = (each.float() for each in states_of(seed, torch.float32, lanes, slots, size))
    state = torch.Generator().manual_seed(seed)
    keys = keys * torch.logspace(-1, 0.5, size)[torch.randperm(size, generator=state)]
    keys = keys + 3 * torch.randn(size, generator=state)
    keys[:, 0] *= 2
    return keys.to(dtype), values.to(dtype)


@every_variant
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits, group", [(2, 64), (3, 64), (4, 64), (3, 40), (4, 100)])
def test_whole_numbers_lose_little_beside_what_levels_lose(
    library: Library, bits: int, group: int, dtype: torch.dtype, turns: bool
) -> None:
    """By every lane: a variant may take fitted levels of a cache of 16 bits as whole numbers."""
    coded = LAYOUTS["fitted3"].func
    for index, (lanes, rows, slots, size) in enumerate(FITTED_SIZES):
        states = rough_states(index, dtype, lanes, slots, size)
        first = torch.zeros((lanes, slots), dtype=torch.bool)
        first[:, 0] = True
        keys, values = (
            coded(each, bits=bits, group=group, share=0.02, by_channel=by_channel, whole=first)
            for each, by_channel in zip(states, (True, False), strict=True)
        )
        turned = turned_by(size, Layout(rows=1, heads=lanes, size=slots, start=500)) if turns else None
        query = torch.randn((lanes, rows, 1, size), generator=torch.Generator().manual_seed(index))
        # So that many tokens count.
        query *= 30 / (query.flatten(1, 2) @ states[0].float().mT).std()
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, turned=turned), using=library)
        wholes = [Whole(states=each) for each in states]
        if turned is None:
            right, uncoded = (truth(query, *sides) for sides in ((keys, values), wholes))
        else:
            right, uncoded = (expected(query, *sides, turned) for sides in ((keys, values), wholes))
        for lane in range(lanes):
            off, lost = ((each[0][lane] - right[0][lane]).norm() for each in (found, uncoded))
            assert off <= 0.03 * lost + COARSE * right[0][lane].norm(), (index, lane)
        off, lost = ((each[1] - right[1]).abs().max() for each in (found, uncoded))
        assert off <= 0.03 * lost + COARSE * right[1].abs().max(), index


@every_variant
@pytest.mark.parametrize("turns", [True, False])
def test_the_largest_whole_numbers_do_not_overflow_and_what_is_none_stays(library: Library, turns: bool) -> None:
    """All numbers as large as they can be, of one sign; then one that is no number, in codes and kept aside."""
    coded, lanes, slots, size = LAYOUTS["fitted3"].func, 2, 300, 128
    turned = turned_by(size, Layout(rows=1, heads=lanes, size=slots, start=0)) if turns else None
    states = torch.ones((lanes, slots, size), dtype=torch.bfloat16)
    states[:, ::2] = -1
    made = {"bits": 4, "group": 64, "share": 0.02}
    keys, values = (coded(states, by_channel=by_channel, **made) for by_channel in (True, False))
    query = torch.ones(lanes, 4, 1, size)
    query[:, 1], query[:, 2, :, ::2], query[:, 3, :, 7:] = -1, 0, 1e-3
    inputs = AttentionInputs(query, keys, values, scaling=0.1, turned=turned)
    right = truth(query, keys, values)
    if turned is not None:
        right = expected(query, keys, values, turned)
    assert same(attend_coded(inputs, using=library), right, COARSE)
    states = rough_states(1, torch.bfloat16, lanes, slots, size)
    keys, values = (
        coded(each, by_channel=by_channel, **made) for each, by_channel in zip(states, (True, False), strict=True)
    )
    for name, (broken, whole) in itertools.product(
        ("low", "reach", "levels", "exact"), ((keys, "keys"), (values, "values"))
    ):
        table = getattr(broken, name).clone()
        # Of a run the codes of which have all levels.
        table.view(-1)[5] = torch.nan
        sides = {"keys": keys, "values": values} | {whole: replace(broken, **{name: table})}
        out, _ = attend_coded(inputs._replace(**sides), using=library)
        assert out[0].isnan().any() and out[1].isfinite().all(), (name, whole)


@every_variant
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("size", [128, 256, 512])
def test_no_sum_of_neighbouring_loud_channels_overflows(library: Library, turns: bool, size: int) -> None:
    """Queries of two neighbours in each sixteen, whose products are added in one lane, over keys that are all alike."""
    state = torch.Generator().manual_seed(size)
    keys = torch.randn((1, 100, size), generator=state) / 1000
    keys[..., : size // 2] = 1 + torch.rand((1, 100, 1), generator=state) / 100
    coded = LAYOUTS["fitted3"].func
    keys = coded(keys.bfloat16(), bits=4, group=64, share=0.0, by_channel=True)
    values = Whole(states=states_of(size, torch.float32, 1, 100, size)[1])
    turned = turned_by(size, Layout(rows=1, heads=1, size=100, start=0)) if turns else None
    if turned is not None:
        slow = replace(turned.rotation, frequencies=turned.rotation.frequencies / 100_000)
        turned = turned._replace(rotation=slow)
    for first in range(0, 16, 2):
        query = torch.zeros(1, 1, 1, size)
        query[..., first : size // 2 : 16] = query[..., first + 1 : size // 2 : 16] = 1
        inputs = AttentionInputs(query, keys, values, scaling=0.1, turned=turned)
        right = truth(query, keys, values) if turned is None else expected(query, keys, values, turned)
        assert same(attend_coded(inputs, using=library), right, 2 * COARSE), first


@every_variant
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.02])
def test_a_first_token_that_is_whole_takes_nothing_from_small_values(library: Library, scale: float, bits: int) -> None:
    """It gets nearly all of the weight and has hardly a value, as in models; levels and scales are not fitted to it."""
    keys, values = (each.bfloat16() for each in states_of(5, torch.float32, 1, 256, 128))
    values *= scale
    values[:, 0] /= 1000
    first = torch.zeros((1, 256), dtype=torch.bool)
    first[:, 0] = True
    coded = LAYOUTS["fitted3"].func
    side = coded(values, bits=bits, group=128, share=0.01, by_channel=False, dense=~first, whole=first)
    query, weight = torch.randn((1, 4, 1, 128), generator=torch.Generator().manual_seed(7)), torch.zeros(1, 256)
    weight[:, 0] = 10
    plain = Whole(states=keys.float())
    inputs = AttentionInputs(query, plain, side, scaling=0.1, log_weight=weight)
    right, uncoded = (truth(query, plain, each, log_weight=weight) for each in (side, Whole(states=values)))
    off, lost = ((each - right[0]).norm() for each in (attend_coded(inputs, using=library)[0], uncoded[0]))
    assert off <= 0.03 * lost + COARSE * right[0].norm(), (off / lost, off / right[0].norm())
