"""Attention over codes that stand for levels, for points of a grid, and over signs beside them: what only they have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.ops.cpu.coded_layouts import COARSE, LAYOUTS, every_dtype, every_variant, needs_built, states_of
from tests.ops.cpu.coded_truth import attend_by, same, truth

from kvtailor.ops.attention.cpu.attention import attend_coded
from kvtailor.ops.codes.floats import MxCodes, NvCodes
from kvtailor.ops.codes.gaussian import GaussianCodes, ResidualCodes
from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.segments.attention_inputs import AttentionInputs

pytestmark = [needs_built, pytest.mark.usefixtures("poisoned")]


@every_variant
@every_dtype
@pytest.mark.parametrize("size", [1, 7, 33, 63, 65, 129])
def test_the_last_of_an_odd_number_of_channels_has_no_second(library: Library, dtype: torch.dtype, size: int) -> None:
    for bits in (2, 3, 4):
        keys, values = (GridCodes.of(x, bits, keep_norm=True) for x in states_of(size, dtype, 3, 63, size))
        query = torch.randn(3, 3, 2, size)
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert same(found, truth(query, keys, values), 1e-5), bits


@every_variant
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("layout", ["levels2", "levels3", "levels4", "vector2", "vector3", "vector4"])
def test_an_endless_scale_of_one_key_hides_no_token(library: Library, layout: str, size: int) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        keys, values = (
            LAYOUTS[layout](torch.randn(1, 100, size).bfloat16()),
            LAYOUTS["vector4"](torch.randn(1, 100, size).bfloat16()),
        )
        of = "scale" if layout.startswith("levels") else "step"
        table = getattr(keys, of).clone()
        table.view(-1)[37] = torch.inf
        query = torch.randn(1, 1, 1, size)
        out, _ = attend_coded(AttentionInputs(query, replace(keys, **{of: table}), values, scaling=0.1), using=library)
        assert out.isnan().any(), seed


@every_variant
@every_dtype
@pytest.mark.parametrize("size", [1, 7, 33, 63, 65, 129])
def test_signs_of_any_number_of_channels(library: Library, dtype: torch.dtype, size: int) -> None:
    for bits, state in ((2, 0), (3, 1)):
        keys, values = (ResidualCodes.of(x, bits, state, keep_norm=False) for x in states_of(size, dtype, 3, 63, size))
        query = torch.randn(3, 3, 2, 2 * size) / 3
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert same(found, truth(query, keys, values), 1e-5), bits


@every_variant
@pytest.mark.parametrize("layout", ["levels4", "nvfp4", "nvfp4x8", "mxfp4"])
def test_levels_of_tokens_that_fill_vectors(library: Library, layout: str) -> None:
    slots = itertools.cycle([301, 1, 129, 256, 63, 128])
    for size, rows in itertools.product([128, 256, 384], [1, 2, 3, 4]):
        keys, values = (LAYOUTS[layout](x) for x in states_of(size + rows, torch.bfloat16, 2, next(slots), size))
        query = torch.randn(2, rows, 1, size)
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert same(found, truth(query, keys, values), COARSE), (size, rows)


@every_variant
@pytest.mark.parametrize("layout", ["levels4", "levels3", "levels2"])
def test_levels_of_tokens_that_fill_half_a_vector(library: Library, layout: str) -> None:
    state = torch.Generator().manual_seed(1)
    for slots, rows in itertools.product([1, 2, 63, 128, 301], [1, 2, 3, 4, 7]):
        keys, values = (LAYOUTS[layout](x) for x in states_of(slots + rows, torch.bfloat16, 2, slots, 64))
        query = torch.randn((2, rows, 1, 64), generator=state)
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
        assert same(found, truth(query, keys, values), COARSE), (slots, rows)


@every_variant
@pytest.mark.parametrize("code", [0, 255])
def test_no_sum_of_the_largest_levels_overflows(library: Library, code: int) -> None:
    for size in (64, 128, 256, 512):
        states = torch.zeros(1, 300, size, dtype=torch.bfloat16)
        side = GaussianCodes.of(states, 4, keep_norm=True)
        side = replace(side, codes=torch.full_like(side.codes, code), scale=torch.ones_like(side.scale))
        for rows in (1, 2, 4):
            query = torch.ones(1, rows, 1, size) / size
            found = attend_coded(AttentionInputs(query, side, side, scaling=0.1), using=library)
            assert same(found, truth(query, side, side), COARSE), (size, rows)


@every_variant
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_signs_with_others_bytes_between_them(library: Library, rows: int) -> None:
    """And what is no number in a query, or beside signs, stays in its row and lane."""
    keys, values = (ResidualCodes.of(x, 3, 0, keep_norm=True) for x in states_of(13, torch.bfloat16, 24, 40, 72))
    spread = []
    for side in (keys, values):
        buffer = torch.randint(0, 256, (24, 50, side.signs.shape[2] + 24), dtype=torch.uint8)
        buffer[:, 3:43, 8:-16] = side.signs
        spread.append(replace(side, signs=buffer[:, 3:43, 8:-16]))
    query = torch.randn(24, rows, 1, 144) / 3
    attend = attend_by(library)
    assert all(map(torch.equal, attend(query, *spread), attend(query, keys, values)))
    # Lanes of one owner, which are read as one where they lie one behind the other.
    owner = torch.zeros(24, dtype=torch.int64)
    alone, usual = (attend(query[:1], *sides, owner=owner) for sides in (spread, (keys, values)))
    assert same(alone, (usual[0].double(), usual[1].double()))
    query[0, rows - 1, 0, 99] = torch.nan
    out, lse = attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library)
    assert out[0, rows - 1].isnan().all() and lse[0, rows - 1].isnan().all()
    assert out[0, : rows - 1].isfinite().all() and out[1].isfinite().all()
    query[0, rows - 1, 0, 99] = 0
    rest = values.rest.clone()
    rest[1, 7] = torch.inf
    out, _ = attend_coded(AttentionInputs(query, keys, replace(values, rest=rest), scaling=0.1), using=library)
    assert not out[1, :, :, 72:].isfinite().any() and out[1, :, :, :72].isfinite().all() and out[0].isfinite().all()


BLOCKS = {"nvfp4": NvCodes, "mxfp4": MxCodes}


@every_variant
@pytest.mark.parametrize("layout", BLOCKS)
@pytest.mark.parametrize("code", [0x77, 0xFF, 0x7F])
def test_no_sum_of_the_largest_numbers_of_blocks_overflows(library: Library, layout: str, code: int) -> None:
    """6, -6, and both in turns, of as many tokens as are summed together and more."""
    for size, rows in itertools.product((128, 256, 512), (1, 2, 3, 4)):
        side = LAYOUTS[layout](torch.ones(1, 520, size, dtype=torch.bfloat16))
        side = replace(side, codes=torch.full_like(side.codes, code))
        query = torch.ones(1, rows, 1, size) / size
        found = attend_coded(AttentionInputs(query, side, side, scaling=0.1), using=library)
        assert same(found, truth(query, side, side), COARSE), (size, rows)


@every_variant
@pytest.mark.parametrize("layout", BLOCKS)
def test_a_loud_block_takes_nothing_from_the_others(library: Library, layout: str) -> None:
    """Each block of values has a scale of its own in the sum, over tokens of very different sizes."""
    keys, values = states_of(21, torch.bfloat16, 2, 300, 128)
    keys = keys / 8
    values[:, :, 32:64] *= 4096
    values[:, 100:, 64:96] /= 4096
    keys, values = LAYOUTS[layout](keys), LAYOUTS[layout](values)
    for rows in (1, 2, 4):
        query = torch.randn(2, rows, 1, 128)
        (found, lse), (out, whole) = (
            attend_coded(AttentionInputs(query, keys, values, scaling=0.1), using=library),
            truth(query, keys, values),
        )
        for first in range(0, 128, 32):
            block = slice(first, first + 32)
            assert same((found[..., block], lse), (out[..., block], whole), COARSE), (rows, first)


@every_variant
@pytest.mark.parametrize("layout", BLOCKS)
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_no_number_stays_in_its_block_row_and_lane(library: Library, layout: str, rows: int) -> None:
    keys, values = (LAYOUTS[layout](x) for x in states_of(22, torch.bfloat16, 2, 140, 128))
    query = torch.randn(2, rows, 1, 128) / 3
    attend = attend_by(library)
    usual = attend(query, keys, values)
    broken = query.clone()
    broken[0, rows - 1, 0, 99] = torch.nan
    out, lse = attend(broken, keys, values)
    assert out[0, rows - 1].isnan().all() and lse[0, rows - 1].isnan().all()
    assert torch.equal(out[0, : rows - 1], usual[0][0, : rows - 1]) and torch.equal(out[1], usual[0][1])
    if layout == "mxfp4":
        # 255 is no number there; of the other's scales none is.
        scales = values.scales.clone()
        scales[1, 7, 1] = 255
        out, _ = attend(query, keys, replace(values, scales=scales))
        assert not out[1, :, :, 32:64].isfinite().any() and torch.equal(out[0], usual[0][0])
        assert torch.equal(out[1, :, :, 64:], usual[0][1, :, :, 64:])
        scales = keys.scales.clone()
        scales[1, 139, 3] = 255
        out, lse = attend(query, replace(keys, scales=scales), values)
        assert not lse[1].isfinite().any() and torch.equal(out[0], usual[0][0])
        for sign in (1, -1):
            # All products of a block on one side of 0.
            level = replace(keys, scales=scales, codes=torch.full_like(keys.codes, 0x77))
            _, lse = attend(sign * query.abs(), level, values)
            assert not lse[1].isfinite().any()
