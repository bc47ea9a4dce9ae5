"""The quantiser against a slow one, and packing against bit by bit."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.ops.codes.quant import (
    FLAT,
    count_below,
    dequantise,
    from_e4m3,
    largest_divisor,
    pack,
    packed_size,
    quantise,
    quantise_symmetric,
    to_e4m3,
    unpack,
)

every_bits = pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def slow(x: Tensor, bits: int, group: int) -> Tensor:
    """Quantises and restores runs along the last dimension, one run at a time in float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    flat, target = x.reshape(-1, group).double(), out.view(-1, group)
    for run, place in zip(flat, target, strict=True):
        low, high = float(run.min()), float(run.max())
        step = (high - low) / (2**bits - 1)
        for i, value in enumerate(run.tolist()):
            place[i] = low + (round((value - low) / step) * step if step else 0.0)
    return out


@pytest.mark.parametrize("number", [1, 7, 15, 16, 255])
def test_borders_below_are_those_that_a_search_finds(number: int) -> None:
    """Numbers on a border, and one step beside it, too."""
    borders = torch.randn(number).sort().values
    step = torch.tensor([-torch.inf, torch.inf])[:, None]
    on = torch.cat([borders, *torch.nextafter(borders, step)])
    x = torch.cat([on, torch.randn(63), torch.tensor([0.0, -0.0, 1e38, -1e38])])
    expected = [sum(border < each for border in borders.tolist()) for each in x.tolist()]
    assert count_below(x, borders).tolist() == expected


@every_bits
@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("group", [4, 7, 28])
def test_equals_the_slow_quantiser(bits: int, dim: int, group: int) -> None:
    x = states((3, 28, 56), 1)
    codes, step, low = quantise(x, bits, dim, group)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and int(codes.max()) == 2**bits - 1
    found = dequantise(codes, step, low, dim).double()
    expected = slow(x.transpose(dim, -1).contiguous(), bits, group).transpose(dim, -1)
    # A value halfway between two codes may go either way in float32.
    wrong = (found - expected).abs() > 1e-5
    assert wrong.float().mean() < 1e-3


@every_bits
@every_dtype
def test_a_group_of_equal_values_has_a_step_and_comes_back(bits: int, dtype: torch.dtype) -> None:
    x = states((2, 5, 16), 3).to(dtype)
    x[1, 2, 8:] = -1.5
    codes, step, low = quantise(x, bits, 2, 8)
    assert float(step[1, 2, 1]) == FLAT and not codes[1, 2, 8:].any()
    assert torch.equal(dequantise(codes, step, low, 2)[1, 2, 8:], x[1, 2, 8:])


@every_bits
@every_dtype
@pytest.mark.parametrize("scale", [1.0, 1e-6, 2e3])
def test_no_error_above_half_a_step(bits: int, dtype: torch.dtype, scale: float) -> None:
    x = (states((5, 63, 40), 2) * scale).to(dtype)
    codes, step, low = quantise(x, bits, 2, 8)
    found = dequantise(codes, step, low, 2)
    assert found.dtype == dtype
    grouped = x.double().unflatten(2, (-1, 8))
    reach = grouped.amax(-1) - grouped.amin(-1)
    half = (reach / (2**bits - 1) / 2)[..., None]
    # Step and result are rounded to the dtype; below its normal numbers the spacing is fixed.
    info = torch.finfo(dtype)
    spacing = info.smallest_normal * info.eps * 2**bits
    rounding = info.eps * (reach[..., None] + grouped.abs()) + spacing
    assert bool(((found.double().unflatten(2, (-1, 8)) - grouped).abs() <= half + rounding).all())


@every_bits
@every_dtype
def test_ends_of_the_range_are_kept(bits: int, dtype: torch.dtype) -> None:
    """The least value of a group is exact, and the greatest is within the rounding of the step; nothing overflows."""
    top = min(torch.finfo(dtype).max, 1e30)
    x = torch.tensor([[-top, 0.0, top / 3, top]]).to(dtype)
    codes, step, low = quantise(x / 2, bits, 1, 4)
    found = dequantise(codes, step, low, 1)
    assert bool(found.isfinite().all()) and found[0, 0] == (x / 2)[0, 0]
    assert abs(float(found[0, 3]) - float(x[0, 3]) / 2) <= 4 * torch.finfo(dtype).eps * top


def test_groups_must_divide() -> None:
    with pytest.raises(ValueError, match=r"63 values.*\(2, 63, 8\).*groups of 32"):
        quantise(torch.zeros(2, 63, 8), 4, 1, 32)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64, 129])
def test_packing_round_trips_at_the_size_it_says(bits: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    codes = torch.randint(0, 2**bits, (3, 5, size), generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5, packed_size(size, bits))
    assert packed.untyped_storage().nbytes() == packed.numel()
    assert torch.equal(unpack(packed, bits, size), codes)
    # Tokens stay apart: picking rows of bytes is picking rows of codes.
    assert torch.equal(unpack(packed[:, [4, 0]], bits, size), codes[:, [4, 0]])


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_codes_that_begin_anywhere_in_memory_are_unpacked_alike(bits: int) -> None:
    """Eight at a time, from any byte on, of rows side by side or apart, and of none."""
    codes = torch.randint(0, 2**bits, (3, 5, 192), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack(codes, bits)
    for first in (0, 1, 7, 8):
        buffer = torch.full((packed.numel() + 8,), 255, dtype=torch.uint8)
        there = buffer[first : first + packed.numel()].view(packed.shape).copy_(packed)
        assert torch.equal(unpack(there, bits, 192), codes)
        assert torch.equal(unpack(there[1:2, 2:3], bits, 192), codes[1:2, 2:3])
    assert torch.equal(unpack(packed[:, ::2], bits, 192), codes[:, ::2])
    assert unpack(packed[:, :0], bits, 192).shape == (3, 0, 192)


@pytest.mark.parametrize("shape", [(1, 1, 32), (1, 3, 32), (3, 1, 64), (1, 1, 96)], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7])
def test_a_single_token_or_lane_round_trips(bits: int, shape: tuple[int, ...]) -> None:
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack(pack(codes, bits), bits, shape[-1]), codes)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_every_code_has_its_own_bits(bits: int) -> None:
    size = 2 * (8 // bits)
    for i in range(size):
        codes = torch.zeros(size, dtype=torch.uint8)
        codes[i] = 2**bits - 1
        byte, place = i % 2, i // 2
        expected = torch.zeros(2, dtype=torch.uint8)
        expected[byte] = (2**bits - 1) << (place * bits)
        assert torch.equal(pack(codes, bits), expected)


def test_codes_of_three_bits_are_a_plane_of_two_and_a_plane_of_one() -> None:
    """By hand: 8 codes in 3 bytes, the low bits of the codes 0, 2, 4, 6 in the first, all third bits in the last."""
    codes = torch.tensor([7, 0, 1, 2, 4, 5, 6, 3], dtype=torch.uint8)
    low = [3, 0, 1, 2, 0, 1, 2, 3]
    first = low[0] | low[2] << 2 | low[4] << 4 | low[6] << 6
    second = low[1] | low[3] << 2 | low[5] << 4 | low[7] << 6
    third = sum(1 << i for i in (0, 4, 5, 6))
    assert pack(codes, 3).tolist() == [first, second, third]
    assert [packed_size(size, 3) for size in (1, 4, 5, 8, 64, 128)] == [2, 2, 3, 3, 24, 48]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@every_dtype
@pytest.mark.parametrize("scale", [1.0, 1e-3, 2e3])
def test_symmetric_codes_are_within_half_a_step_and_odd(bits: int, dtype: torch.dtype, scale: float) -> None:
    """The step is max |x| / Q with Q = 2^(bits - 1) - 1, and -x decodes to minus what x decodes to."""
    x = (states((5, 63, 40), 3) * scale).to(dtype)
    codes, step = quantise_symmetric(x, bits)
    most = 2 ** (bits - 1) - 1
    found = dequantise(codes, step, None, 2, zero=most)
    assert step.shape == (5, 63, 1) and int(codes.max()) <= 2 * most and found.dtype == dtype
    top = x.double().abs().amax(-1, keepdim=True)
    eps = torch.finfo(dtype).eps
    assert bool(((found.double() - x.double()).abs() <= top / most / 2 + 2 * eps * top).all())
    mirrored, same = quantise_symmetric(-x, bits)
    assert torch.equal(dequantise(mirrored, same, None, 2, zero=most), -found)


def test_int4_by_hand() -> None:
    """Q = 7: the step of [3.5, -7, 1, 0.4] is 1, and 3.5 goes to the even neighbour."""
    codes, step = quantise_symmetric(torch.tensor([[3.5, -7.0, 1.0, 0.4]]), 4)
    assert step.item() == 1.0 and (codes.int() - 7).tolist() == [[4, -7, 1, 0]]


@every_dtype
def test_symmetric_codes_leave_their_input_and_survive_its_largest(dtype: torch.dtype) -> None:
    x = torch.tensor([[torch.finfo(dtype).max, 0.0, -1.0], [0.0, 0.0, 0.0]], dtype=dtype)
    before = x.clone()
    for bits in (2, 8):
        codes, step = quantise_symmetric(x, bits)
        found = dequantise(codes, step, None, 1, zero=2 ** (bits - 1) - 1)
        assert torch.equal(x, before) and bool(found.isfinite().all()) and bool((found[1] == 0).all())


def test_every_e4m3_number_is_what_its_bits_say() -> None:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa, and no infinity: by the format's definition."""
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:  # not a number, which nothing is ever coded to
            continue
        expected = sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = from_e4m3(torch.tensor([code], dtype=torch.uint8), torch.ones(1, dtype=dtype))
            assert found.dtype == dtype and found.item() == expected
        assert to_e4m3(torch.tensor([expected])).item() & 127 == code & 127


def test_e4m3_rounds_to_the_nearest_and_cuts_at_448() -> None:
    x = states((2000,), 1) * torch.logspace(-4, 2, 2000)
    found = from_e4m3(to_e4m3(x), torch.ones(1))
    grid = from_e4m3(torch.arange(256, dtype=torch.uint8), torch.ones(1))
    grid = grid[grid.abs() <= 448]
    nearest = (x[:, None] - grid).abs().amin(1)
    assert torch.equal((found - x).abs(), nearest)
    assert from_e4m3(to_e4m3(torch.tensor([1e6, -1e6, 449.0])), torch.ones(1)).tolist() == [448.0, -448.0, 448.0]


def test_largest_divisor() -> None:
    for size in range(1, 100):
        for most in range(1, 40):
            assert largest_divisor(size, most) == max(g for g in range(1, most + 1) if size % g == 0)
