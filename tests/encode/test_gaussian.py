"""Levels of the normal distribution: their closed form, their distortion, bytes, and what they refuse."""

import itertools
import math
import re
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.centred import Centred
from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.vector import Vector
from kvtailor.errors import CacheMisuse
from kvtailor.ops import cpu
from kvtailor.ops.attention.cpu.sides import MOST_WHOLE, padded_levels
from kvtailor.ops.codes.gaussian import GaussianCodes, gaussian_levels
from kvtailor.ops.codes.hadamard import mixed, unmixed
from kvtailor.plan import Plan
from kvtailor.types import Layout

# J. Max, Quantizing for minimum distortion (1960), table I: squared error for variance 1.
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
# The same table's levels for 4 and 8 codes, the positive half.
LEVELS = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}


def layout(slots, lanes=1):
    return Layout(rows=1, heads=lanes, size=slots, start=0)


def lost(codec, keys):
    """Squared error over squared norm, of keys (m, s, d)."""
    found = codec.encode(layout(keys.shape[1], keys.shape[0]), keys, keys).decode()[0]
    return float((found - keys).square().sum() / keys.square().sum())


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_those_of_the_published_table(bits):
    found = gaussian_levels(bits)
    assert found.shape == (2**bits,) and torch.equal(found, -found.flip(0))
    assert found[2 ** (bits - 1) :].tolist() == pytest.approx(LEVELS[bits], rel=1e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_level_is_the_mean_of_what_is_nearest_to_it(bits):
    """By the normal law's density and distribution in the standard library, in float64."""
    law, levels = NormalDist(), gaussian_levels(bits).double().tolist()
    borders = [-40.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), 40.0]
    for level, (low, high) in zip(levels, itertools.pairwise(borders), strict=True):
        assert level == pytest.approx((law.pdf(low) - law.pdf(high)) / (law.cdf(high) - law.cdf(low)), abs=1e-6)


def test_whole_levels_are_those_of_four_bits_and_as_large_as_the_kernels_allow():
    """16 for keys and 16 for values, and what one of either is worth, behind the levels."""
    levels, rest = padded_levels(gaussian_levels(4)).split([16, 34])
    for i, most in enumerate(MOST_WHOLE):
        whole, unit = rest[16 * i : 16 * i + 16], rest[32 + i]
        assert most / 2 <= whole.max() <= most and torch.equal(whole, whole.round())
        assert (whole * unit - levels).abs().max() <= 0.51 * unit
    header = (Path(cpu.__file__).parent / "shorts.h").read_text()
    known = [int(re.search(rf"MOST_OF_{side} = (\d+)", header)[1]) for side in ("KEYS", "VALUES")]
    assert known == list(MOST_WHOLE)


@pytest.mark.parametrize("bits", DISTORTION)
def test_normal_numbers_lose_what_theory_says(bits):
    """Within 2 %. The norm of a vector of 4,096 numbers is that of the distribution but for 1 %."""
    keys = torch.randn((2, 64, 4096), generator=torch.Generator().manual_seed(bits))
    assert lost(Gaussian(bits=bits, keep_norm=False), keys) == pytest.approx(DISTORTION[bits], rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_after_a_rotation_every_vector_loses_that(bits):
    """Vectors of one large channel, which the codec alone cannot hold."""
    keys = 0.05 * torch.randn((1, 600, 128), generator=torch.Generator().manual_seed(1))
    keys[0, torch.arange(600), torch.arange(600) % 128] += 1
    rotated, alone = Hadamard(of=Gaussian(bits=bits, keep_norm=False), signs=0), Gaussian(bits=bits)
    # One rotated channel of many equal ones is no normal number: without noise all would have one magnitude.
    assert lost(rotated, keys) < 1.5 * DISTORTION[bits] < lost(alone, keys)
    spread = torch.randn((1, 600, 128), generator=torch.Generator().manual_seed(2)) * torch.linspace(0.01, 3, 128)
    assert lost(rotated, spread) == pytest.approx(DISTORTION[bits], rel=0.05)
    assert lost(rotated, spread) < lost(Hadamard(of=Vector(bits=bits), signs=0), spread)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kept_norm_is_the_norm(dtype):
    keys = states((3, 63, 24), 4, dtype)
    for bits in (1, 2, 4):
        found = GaussianCodes.of(keys, bits, keep_norm=True).decode().float()
        rounding = 3 * torch.finfo(dtype).eps
        assert torch.allclose(found.norm(dim=-1), keys.float().norm(dim=-1), rtol=rounding)


def test_against_the_definition_vector_by_vector():
    keys, levels = states((2, 7, 20), 5), gaussian_levels(3)
    found = GaussianCodes.of(keys, 3, keep_norm=False)
    for lane in range(2):
        for slot in range(7):
            x = keys[lane, slot]
            scale = x.norm() / math.sqrt(20)
            nearest = (x / scale - levels[:, None]).abs().argmin(0)
            assert torch.allclose(found.decode()[lane, slot], levels[nearest] * scale, rtol=1e-5)


@pytest.mark.parametrize("size", [128, 80, 33, 7])
def test_signs_are_a_rotation_too(size):
    x = states((3, 5, size), 1)
    assert torch.allclose(unmixed(mixed(x, 3), 3), x, atol=1e-5)
    assert torch.allclose(mixed(x, 3).norm(dim=-1) ** 2 * (size & -size), x.norm(dim=-1) ** 2, rtol=1e-4)
    if size > 1 and size & -size > 1:
        assert not torch.equal(mixed(x, 3), mixed(x)) and not torch.equal(mixed(x, 3), mixed(x, 4))


def test_zeros_constants_and_large_numbers():
    keys = torch.zeros((1, 4, 16), dtype=torch.float16)
    keys[0, 1] = 3
    keys[0, 2] = 60000
    keys[0, 3, 2] = 6e-8
    found = GaussianCodes.of(keys, 4, keep_norm=True).decode()
    assert (found[0, 0] == 0).all() and found.isfinite().all()
    # A constant vector has one level for all channels, and its norm.
    assert torch.allclose(found[0, 1], keys[0, 1], rtol=2e-3) and torch.allclose(found[0, 2], keys[0, 2], rtol=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_no_code_can_hold_is_refused(bad):
    keys = states((1, 8, 16), 1)
    keys[0, 3, 2] = bad
    with pytest.raises(CacheMisuse, match="gaussian"):
        Gaussian().encode(layout(8), keys, keys)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_those_of_the_closed_form(bits):
    keys = states((2, 67, 20), 1, torch.bfloat16)
    segment = Gaussian(bits=bits).encode(layout(67, 2), keys, keys)
    each = -(-20 * bits // 8) + 2
    assert segment.closed_form_bytes() == sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert segment.closed_form_bytes() == 2 * 67 * 2 * each
    assert Gaussian(bits=bits).bytes_per_token(20, 20, 2) == 2 * each


def test_words():
    assert Plan.parse("turboquant4").encode == Centred(of=Hadamard(of=Gaussian(bits=4), signs=0))
    with pytest.raises(ValueError, match="bits must be 1 to 8, found 9"):
        Gaussian(bits=9)
    with pytest.raises(ValueError, match="block_size must be 1"):
        Gaussian(block_size=0)
