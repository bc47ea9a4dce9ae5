"""The C++ kernels against attention in float64 over what the codes stand for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cpu.coded_layouts import (
    COARSE,
    GGML,
    LAYOUTS,
    every_dtype,
    every_variant,
    exact,
    needs_built,
    states_of,
    width_of,
)
from tests.ops.cpu.coded_truth import merges_ragged_lanes, same, truth

from kvtailor.ops.attention.cpu import attention
from kvtailor.ops.attention.cpu.attention import attend_coded
from kvtailor.ops.attention.cpu.sides import unsuited
from kvtailor.ops.codes.floats import MxCodes, NvCodes
from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.codes.sides import ChannelCodes, FloatCodes, TokenCodes
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole

pytestmark = [needs_built, pytest.mark.usefixtures("poisoned")]
# (b, h, g, t, s, d): 63 slots, odd heads, sizes that no vector divides, several blocks and pieces.
SIZES = [
    (1, 2, 4, 1, 63, 128),
    (3, 1, 1, 1, 600, 64),
    (2, 3, 3, 5, 130, 24),
    (1, 1, 7, 2, 1030, 80),
    (1, 2, 4, 16, 300, 96),
]


@lru_cache(maxsize=2)
def every_size(layout: str, dtype: torch.dtype) -> list[tuple]:
    """Query, coded keys and values, and the truth: for all variants, which follow each other."""
    made = []
    for index, (b, h, g, t, s, d) in enumerate(SIZES if dtype == torch.bfloat16 else SIZES[1:4]):
        keys, values = (LAYOUTS[layout](states) for states in states_of(index, dtype, b * h, s, d))
        query = torch.randn((b * h, g, t, width_of(keys)), generator=torch.Generator().manual_seed(9))
        made.append((query, keys, values, truth(query, keys, values)))
    return made


@every_variant
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(library: Library, dtype: torch.dtype, layout: str) -> None:
    tolerance = 1e-5 if dtype == torch.float32 or layout == "plain" else COARSE
    for query, keys, values, expected in every_size(layout, dtype):
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert same(found, expected, tolerance), (layout, query.shape)


@every_variant
@every_dtype
@pytest.mark.parametrize("format", GGML)
def test_blocks_of_llama_cpp(library: Library, dtype: torch.dtype, format: str) -> None:
    """Their steps have 16 bits in a cache of 32, too, which is exact nevertheless."""
    for index, (n, g, t, s, d) in enumerate(
        [(2, 4, 1, 63, 128), (3, 1, 1, 600, 64), (1, 7, 2, 300, 32), (2, 3, 5, 130, 256)]
    ):
        keys, values = states_of(index, dtype, n, s, d)
        # Each block of a token has a loudness of its own, from a hundredth to a hundred.
        loud = 10 ** (4 * torch.rand((n, s, d // 32), generator=torch.Generator().manual_seed(index)) - 2)
        values = (values * loud.repeat_interleave(32, -1)).to(dtype)
        query = torch.randn((n, g, t, d), generator=torch.Generator().manual_seed(9))
        for sides in ((GGML[format](keys), GGML[format](values)), (GGML[format](keys), Whole(states=values))):
            found = attend_coded(AttentionInputs(query, *sides, scaling=0.1), using=library)
            assert same(found, truth(query, *sides), 1e-5 if dtype == torch.float32 else COARSE), (format, query.shape)


@every_variant
@pytest.mark.parametrize("of_keys", ["plain", "vector8", "channels4"])
@pytest.mark.parametrize("of_values", ["plain", "tokens4", "channels2"])
def test_each_side_has_its_own_layout_and_width(library: Library, of_keys: str, of_values: str) -> None:
    states, _ = states_of(1, torch.bfloat16, 3, 70, 64)
    keys, values = LAYOUTS[of_keys](states), LAYOUTS[of_values](states_of(2, torch.bfloat16, 3, 70, 40)[1])
    query = torch.randn(3, 2, 1, 64)
    assert same(
        attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library),
        truth(query, keys, values),
        COARSE,
    )


@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector4", "tokens2", "channels4"])
@pytest.mark.parametrize("shape", [(4, 3, 300), (4, 1, 300), (1, 3, 300), (1, 1, 300), (4, 3, 1)], ids=str)
def test_what_is_seen_and_how_much_it_counts(library: Library, layout: str, shape: tuple[int, ...]) -> None:
    keys, values = (LAYOUTS[layout](states) for states in states_of(3, torch.float32, 4, 300, 64))
    state = torch.Generator().manual_seed(5)
    query = torch.randn((4, 2, 3, 64), generator=state)
    visible = torch.rand(shape, generator=state) < 0.2
    if visible.shape[:2].numel() > 1:
        visible[0, 0] = False
    log_weight = torch.rand((4, 300), generator=state) * 3
    found = attend_coded(
        AttentionInputs(query, keys, values, scaling=0.1, visible=visible, log_weight=log_weight), using=library
    )
    full = visible.expand(4, 3, 300)
    assert same(found, truth(query, keys, values, full, log_weight))
    assert not same(found, truth(query, keys, values, full))


@every_variant
@pytest.mark.parametrize(
    "layout",
    [
        "plain",
        "vector8",
        "tokens4",
        "channels2",
        "channels4x5",
        "levels4",
        "grid2",
        "signs3",
        "nvfp4",
        "nvfp4x8",
        "mxfp4",
        "fitted3",
        "fitted4",
        "fitted5",
    ],
)
def test_ragged_lanes_are_read_to_their_length_and_merged_by_owner(library: Library, layout: str) -> None:
    """Runs of 32 tokens end with a page of 64, runs of 5 and of 3 do not."""
    merges_ragged_lanes(partial(attend_coded, using=library), layout, COARSE)


@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector8", "channels4", "nvfp4"])
@pytest.mark.parametrize("seen", [1.0, 0.3])
def test_full_lanes_of_an_owner_keep_their_own_weights(library: Library, layout: str, seen: float) -> None:
    """Lanes that are read as one: what hides or weighs a slot is still that lane's."""
    state = torch.Generator().manual_seed(8)
    keys, values = (LAYOUTS[layout](states) for states in states_of(9, torch.bfloat16, 7, 64, 32))
    owner, query = torch.tensor([0, 0, 0, 0, 0, 1, 1]), torch.randn((2, 3, 1, 32), generator=state)
    log_weight = torch.rand((7, 64), generator=state) * 3
    visible = torch.rand((1, 1, 64), generator=state) < seen if seen < 1 else None  # the same for all lanes
    inputs = AttentionInputs(query, keys, values, scaling=0.1, owner=owner, visible=visible, log_weight=log_weight)
    out, lse = attend_coded(inputs, using=library)
    for mine in range(2):
        lanes = owner == mine
        k, v = (Whole(states=exact(side)[lanes].reshape(1, -1, 32)) for side in (keys, values))
        sees = None if visible is None else visible.expand(7, 1, 64)[lanes].reshape(1, 1, -1)
        expected = truth(query[mine : mine + 1], k, v, sees, log_weight[lanes].reshape(1, -1))
        assert same((out[mine : mine + 1], lse[mine : mine + 1]), expected, COARSE)


@every_variant
@pytest.mark.parametrize("rows", [1, 4])
def test_runs_that_no_vector_divides_stay_within_their_block(library: Library, rows: int) -> None:
    """The last run of a block of 256 tokens has 1 token: what is computed for a whole vector must not be written."""
    keys, values = states_of(12, torch.float32, 2, 511, 32)
    coded = ChannelCodes.of(keys, 4, 15), Whole(states=values)
    query, visible = torch.randn(2, rows, 1, 32), torch.rand(2, 1, 511) < 0.8
    found = attend_coded(AttentionInputs(query, *coded, scaling=0.1, visible=visible), using=library)
    assert same(found, truth(query, *coded, visible))


@every_variant
def test_moved_tokens_use_the_scales_they_were_coded_with(library: Library) -> None:
    state = torch.Generator().manual_seed(6)
    keys, values = (ChannelCodes.of(states, 4, 32) for states in states_of(7, torch.bfloat16, 3, 100, 64))
    lane, slot = torch.randint(0, 3, (2, 50), generator=state), torch.randint(0, 100, (2, 50), generator=state)
    keys, values = keys.regather(lane, slot), values.regather(lane, slot)
    query = torch.randn((2, 4, 1, 64), generator=state)
    assert same(
        attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library),
        truth(query, keys, values),
        COARSE,
    )


@every_variant
@pytest.mark.parametrize("size", [128, 64, 80])
@pytest.mark.parametrize("layout", ["fitted2", "fitted3", "fitted4x20"])
def test_moved_levels_are_those_of_their_run(library: Library, layout: str, size: int) -> None:
    """Neighbours of one run stand between tokens of others."""
    state = torch.Generator().manual_seed(6)
    loud = torch.logspace(-2, 2, 100)[:, None]
    keys, values = (LAYOUTS[layout](states * loud) for states in states_of(7, torch.float32, 3, 100, size))
    lane, slot = torch.randint(0, 3, (2, 25), generator=state), torch.randint(0, 98, (2, 25), generator=state)
    lane, slot = lane.repeat_interleave(2, 1), (slot[..., None] + torch.arange(2)).flatten(1)
    keys, values = keys.regather(lane, slot), values.regather(lane, slot)
    query = torch.randn((2, 4, 1, size), generator=state) / 20
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
    assert same(found, truth(query, keys, values), 2e-5)


@every_variant
@pytest.mark.parametrize("size", [128, 64, 80])
def test_moved_floats_use_the_scale_of_their_run(library: Library, size: int) -> None:
    state = torch.Generator().manual_seed(6)
    loud = torch.logspace(-2, 2, 100)[:, None]
    keys, values = (NvCodes.of(states.float() * loud, 16, 8) for states in states_of(7, torch.float32, 3, 100, size))
    query = torch.randn((2, 4, 1, size), generator=state) / 20
    for _ in range(2):
        lane, slot = (
            torch.randint(0, keys.codes.shape[0], (2, 50), generator=state),
            torch.randint(0, keys.codes.shape[1], (2, 50), generator=state),
        )
        keys, values = keys.regather(lane, slot), values.regather(lane, slot)
        assert keys.row is not None
        assert same(
            attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library),
            truth(query, keys, values),
            2e-5,
        )


@every_variant
@pytest.mark.parametrize("layout", ["plain", "tokens4", "levels4", "grid2", "signs3", "nvfp4"])
def test_sums_fade_when_later_tokens_weigh_more(library: Library, layout: str) -> None:
    """A piece of several blocks, each of which has higher logits than those before."""
    keys, values = states_of(15, torch.float32, 1, 4200, 128)
    keys = keys.abs() * torch.linspace(0.1, 1, 4200)[:, None]
    coded = LAYOUTS[layout](keys), LAYOUTS[layout](values)
    query = torch.rand(1, 3, 1, width_of(coded[0]))
    query[..., 128:] = 0
    assert same(attend_coded(AttentionInputs(query, *coded, scaling=0.1), using=library), truth(query, *coded))


@every_variant
def test_floats_of_every_size_of_states(library: Library) -> None:
    """Scales at both ends of what float32 holds: no product on the way to a number may overflow or vanish."""
    for factor in (1e-30, 1e-3, 1e30):
        for of in ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "fp8"):
            keys, values = (LAYOUTS[of](x * factor) for x in states_of(5, torch.float32, 2, 70, 128))
            query = torch.randn(2, 2, 1, 128) / factor
            found, lse = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
            expected = truth(query, keys, values)
            assert same((found / factor, lse), (expected[0] / factor, expected[1]), 2e-5), (factor, of)


@every_variant
@pytest.mark.parametrize("block", [32, 64, 128, None], ids=str)
def test_every_number_of_eight_bits(library: Library, block: int | None) -> None:
    """Also those below the normal ones, of tokens of any width; None: one scale for a run of 3 tokens."""
    numbers = torch.cat([torch.arange(127), torch.arange(128, 255)]).to(torch.uint8)
    for size, rows in itertools.product([32, 64, 96, 128, 256], [1, 2, 3, 4, 7]):
        generator = torch.Generator().manual_seed(size + rows)
        sides = []
        for _ in range(2):
            codes = numbers[torch.randint(len(numbers), (2, 303, size), generator=generator)]
            if block is None:
                scale = torch.rand((2, 101, 1), generator=generator) / 448
                sides.append(FloatCodes(group=3, codes=codes, scale=scale))
            else:
                shape = (2, 303, -(-size // block))
                scales = torch.randint(115, 125, shape, generator=generator, dtype=torch.uint8)
                of = {"element": "e4m3", "block": block, "size": size, "dtype": "float32"}
                sides.append(MxCodes(**of, codes=codes, scales=scales))
        query = torch.randn((2, rows, 1, size), generator=generator)
        found = attend_coded(AttentionInputs(query, *sides, scaling=0.1), using=library)
        assert same(found, truth(query, *sides), 1e-5), (size, rows)


@every_variant
@every_dtype
def test_a_part_of_a_larger_buffer(library: Library, dtype: torch.dtype) -> None:
    keys, values = states_of(8, dtype, 4, 90, 64)
    inside = Whole(states=keys[:, 3:70]), Whole(states=values[:, 3:70])
    query = torch.randn(4, 2, 1, 64)
    assert same(attend_coded(AttentionInputs(query, *inside, scaling=0.1), using=library), truth(query, *inside))


@every_variant
@pytest.mark.parametrize("layout", ["plain", "vector4", "channels4"])
def test_threads_share_the_work_and_change_nothing(library: Library, layout: str, threads: int) -> None:
    keys, values = (LAYOUTS[layout](states) for states in states_of(10, torch.bfloat16, 3, 3000, 64))
    query = torch.randn(3, 4, 1, 64)
    assert keys.decode().numel() * 4 > attention._SMALL
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
    assert same(found, truth(query, keys, values), COARSE)


@every_variant
@pytest.mark.parametrize("bits", [pytest.param(2, marks=pytest.mark.long), 4, pytest.param(8, marks=pytest.mark.long)])
def test_tokens_of_every_length(library: Library, bits: int) -> None:
    """Keys and values of a few bytes share vectors: any size, group, number of rows and of slots."""
    slots = itertools.cycle([301, 1, 33, 256, 18, 259, 63])
    usual = itertools.product([32, 64, 128, 256], [8, 16, 32, 64, 128], [1, 2, 3, 4, 8])
    for size, group, rows in [*usual, (1024, 64, 1), (1024, 64, 4)]:
        keys, values = states_of(size + group, torch.bfloat16, 2, next(slots), size)
        coded = ChannelCodes.of(keys, bits, group), TokenCodes.of(values, bits, min(group, size))
        query = torch.randn(2, rows, 1, size)
        found = attend_coded(AttentionInputs(query, *coded, scaling=0.1), using=library)
        assert same(found, truth(query, *coded), COARSE), (size, group, rows, keys.shape[1])


@every_variant
@every_dtype
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_that_are_all_equal_cost_the_others_nothing(library: Library, bits: int, dtype: torch.dtype) -> None:
    """Their step is free to choose, and a large one would be what queries and weights are rounded beside."""
    keys, values = (each / 30 for each in states_of(12, dtype, 2, 300, 128))
    keys[:, 64:128, ::5] = keys[:, 64:65, ::5]
    keys[:, :, 7] = values[:, 17:300:9] = 0
    sides = (
        (ChannelCodes.of(keys, bits, 64), TokenCodes.of(values, bits, 64)),
        (
            TokenCodes.symmetric(values, bits),
            TokenCodes.symmetric(values.flip(1), bits),
        ),
    )
    for coded in sides:
        for rows in (1, 4):
            query = torch.randn((2, rows, 1, 128), generator=torch.Generator().manual_seed(rows)) * 30
            found = attend_coded(AttentionInputs(query, *coded, scaling=0.1), using=library)
            assert same(found, truth(query, *coded), COARSE), rows


@every_variant
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("size", [64, 128])
def test_tokens_with_others_bytes_between_them(library: Library, bits: int, size: int) -> None:
    keys, values = states_of(13, torch.bfloat16, 2, 300, size)
    coded = ChannelCodes.of(keys, bits, 64), TokenCodes.of(values, bits, 64)
    spread = []
    for side in coded:
        bytes_of = side.codes.shape[2]
        buffer = torch.randint(0, 256, (2, 300, bytes_of + 24), dtype=torch.uint8)
        buffer[..., 8 : 8 + bytes_of] = side.codes
        spread.append(replace(side, codes=buffer[..., 8 : 8 + bytes_of]))
    for rows in (1, 4):
        query = torch.randn(2, rows, 1, size)
        apart = attend_coded(AttentionInputs(query, *spread, scaling=0.1), using=library)
        assert all(map(torch.equal, apart, attend_coded(AttentionInputs(query, *coded, scaling=0.1), using=library)))


@every_variant
@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_no_number_stays_in_its_row_and_lane(library: Library, bits: int) -> None:
    keys, values = states_of(14, torch.bfloat16, 2, 100, 64)
    coded = ChannelCodes.of(keys, bits, 64), TokenCodes.of(values, bits, 64)
    for rows in (1, 2, 4):
        query = torch.randn(2, rows, 1, 64)
        query[0, rows - 1, 0, 9] = torch.nan
        out, lse = attend_coded(AttentionInputs(query, *coded, scaling=0.1), using=library)
        assert out[0, rows - 1].isnan().all() and lse[0, rows - 1].isnan().all()
        assert out[0, : rows - 1].isfinite().all() and out[1].isfinite().all()
        query[0, rows - 1, 0, 9] = 0
        for side, at in ((0, (0, 1, 5)), (1, (0, 77, 0))):
            for wrong in (torch.nan, torch.inf):
                step = coded[side].step.clone()
                step[at] = wrong
                sides = [replace(each, step=step) if each is coded[side] else each for each in coded]
                out, _ = attend_coded(AttentionInputs(query, *sides, scaling=0.1), using=library)
                assert not out[0].isfinite().any() and out[1].isfinite().all(), (rows, side, wrong)


@every_variant
@pytest.mark.parametrize("code", [0, 255])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_sum_of_the_largest_codes_overflows(library: Library, bits: int, code: int) -> None:
    for size in (128, 256, 512):
        side = TokenCodes.symmetric(torch.zeros(1, 300, size, dtype=torch.bfloat16), bits)
        side = replace(side, codes=torch.full_like(side.codes, code), step=torch.full_like(side.step, 2.0**-bits))
        for rows in (1, 2, 4):
            query = torch.ones(1, rows, 1, size) / size
            found = attend_coded(AttentionInputs(query, side, side, scaling=0.1), using=library)
            assert same(found, truth(query, side, side), COARSE), (size, rows)


@every_variant
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("times", [3.0, 8.0, 100.0, 1e4, 1e-4])
def test_runs_of_tokens_whose_steps_differ(library: Library, bits: int, times: float) -> None:
    """The first run, of other steps than the rest, is hidden: what is read of the rest must not follow from it."""
    keys, values = states_of(12, torch.bfloat16, 1, 300, 128)
    keys[:, :32] *= times
    visible = (torch.arange(300) >= 32)[None, None]
    query = torch.randn((1, 4, 1, 128), generator=torch.Generator().manual_seed(13))
    sides = ChannelCodes.of(keys, bits, 32), TokenCodes.symmetric(values, 8)
    found = attend_coded(AttentionInputs(query, *sides, scaling=0.1, visible=visible), using=library)
    assert same(found, truth(query, *sides, visible), COARSE)


@every_variant
def test_numbers_that_overflow_are_not_swallowed(library: Library) -> None:
    keys, values = states_of(11, torch.float16, 1, 40, 32)
    keys[0, 5, 3] = torch.nan
    out, _ = attend_coded(
        AttentionInputs(torch.randn(1, 1, 1, 32), Whole(states=keys), Whole(states=values), scaling=0.1), using=library
    )
    assert out.isnan().any()
    coded = TokenCodes.symmetric(values.repeat(1, 1, 4), 8)
    query = torch.full((1, 2, 1, 128), 0.1)
    query[0, 1, 0, 3] = torch.nan
    out, lse = attend_coded(AttentionInputs(query, coded, coded, scaling=0.1), using=library)
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all() and lse.isnan().tolist() == [[[False], [True]]]
    for wrong in (torch.nan, torch.inf):
        coded.step[0, 5] = wrong
        for group in (1, 2, 4):
            query = torch.randn(1, group, 1, 32)
            out, _ = attend_coded(AttentionInputs(query, Whole(states=keys), coded, scaling=0.1), using=library)
            assert not out.isfinite().any()
    values[0, 6, 7] = torch.inf
    keys[0, 5, 3] = 0
    out, _ = attend_coded(
        AttentionInputs(torch.randn(1, 1, 1, 32), Whole(states=keys), Whole(states=values), scaling=0.1), using=library
    )
    assert not out[..., 7].isfinite().all() and out[..., 8].isfinite().all()


@every_variant
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(library: Library, data: st.DataObject) -> None:
    draw = data.draw
    h, g, t, s = (draw(st.integers(1, most)) for most in (3, 9, 5, 300))
    d, dv = (draw(st.sampled_from([8, 24, 32, 40, 64, 72, 96, 128])) for _ in range(2))
    of_keys, of_values = (draw(st.sampled_from(sorted(LAYOUTS))) for _ in range(2))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    seed = draw(st.integers(0, 10**6))
    keys, values = (
        LAYOUTS[of_keys](states_of(seed, dtype, h, s, d)[0]),
        LAYOUTS[of_values](states_of(seed, dtype, h, s, dv)[1]),
    )
    state = torch.Generator().manual_seed(seed)
    query, visible = (
        torch.randn((h, g, t, width_of(keys)), generator=state),
        torch.rand((h, t, s), generator=state) < 0.8,
    )
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, visible=visible), using=library)
    assert same(found, truth(query, keys, values, visible), 1e-5 if dtype == torch.float32 else COARSE)


def test_what_is_unsuited_is_said() -> None:
    states = torch.randn(1, 8, 16)
    plain = Whole(states=states)
    assert unsuited(plain, TokenCodes.symmetric(states, 4)) is None
    assert unsuited(GridCodes.of(states, 3, keep_norm=True), plain) is None
    assert unsuited(plain, FloatCodes.of(states, 8)) is None
    unread = TokenCodes.symmetric(states, 4)
    vars(unread)["code_layout"] = None
    assert "no C++ kernel reads TokenCodes" in str(unsuited(plain, unread))
    assert "float64 on cpu" in str(unsuited(plain, FloatCodes.of(states.double(), 8)))
    assert "float64" in str(unsuited(plain, Whole(states=states.double())))
