"""Grids of pairs: that they are best, their distortion, a plain loop, bytes, and what is refused."""

import math

import pytest
import torch
from tests.encode.test_gaussian import DISTORTION as ALONE
from tests.encode.test_gaussian import layout, lost
from tests.support.segments_of import states

from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.higgs import Higgs
from kvtailor.encode.vector import Vector
from kvtailor.errors import CacheMisuse
from kvtailor.ops.codes.grids import GridCodes, grid_of
from kvtailor.plan import Plan

# Squared error for each number of variance 1, by quadrature over a mesh that the grids were not made on.
DISTORTION = {2: 0.107598, 3: 0.029758, 4: 0.007804}


def mesh(step):
    """Points (n, 2) of a mesh around 0, and the probability of a normal pair that falls to each."""
    line = torch.arange(-6.1, 6.1, step, dtype=torch.float64)
    points = torch.cartesian_prod(line, line)
    weights = (-points.square().sum(1) / 2).exp()
    return points, weights / weights.sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_point_is_the_mean_of_what_is_nearest_to_it(bits):
    grid, (points, weights) = grid_of(bits).double(), mesh(0.023)
    assert grid.shape == (4**bits, 2)
    nearest = torch.cat([torch.cdist(part, grid).argmin(1) for part in points.split(1 << 15)])
    share = torch.zeros(len(grid), dtype=torch.float64).index_add_(0, nearest, weights)
    mean = torch.zeros_like(grid).index_add_(0, nearest, weights[:, None] * points) / share[:, None]
    assert (mean - grid).abs().max() < 3e-2 and (share > 0).all()
    error = float((weights * (points - grid[nearest]).square().sum(1)).sum() / 2)
    assert error == pytest.approx(DISTORTION[bits], rel=2e-3)


def test_the_largest_grid_loses_what_theory_says():
    """P. L. Zador (1982), with hexagons as the best cells: 5 / (18 sqrt 3) * 8 pi / n for a pair, as n grows."""
    assert DISTORTION[4] == pytest.approx(5 / (18 * math.sqrt(3)) * 8 * math.pi / 256 / 2, rel=0.02)
    for bits, error in DISTORTION.items():
        assert error < 0.97 * ALONE[bits]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_normal_numbers_lose_what_theory_says(bits):
    """Within 2 %. The norm of a vector of 4,096 numbers is that of the distribution but for 1 %."""
    keys = torch.randn((1, 48, 4096), generator=torch.Generator().manual_seed(bits))
    assert lost(Higgs(bits=bits, keep_norm=False), keys) == pytest.approx(DISTORTION[bits], rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_after_a_rotation_every_vector_loses_that(bits):
    """Pairs are of channels that stay independent where sizes grow along the channels, or differ between halves."""
    spread = torch.randn((1, 300, 128), generator=torch.Generator().manual_seed(2)) * torch.linspace(0.01, 3, 128)
    rotated = lost(Hadamard(of=Higgs(bits=bits, keep_norm=False), signs=0), spread)
    assert rotated == pytest.approx(DISTORTION[bits], rel=0.05)
    for other in (Gaussian(bits=bits, keep_norm=False), Vector(bits=bits)):
        assert rotated < lost(Hadamard(of=other, signs=0), spread)


@pytest.mark.parametrize(("size", "bits"), [(20, 3), (7, 2), (33, 4), (1, 2)])
def test_against_the_definition_pair_by_pair(size, bits):
    keys, grid = states((2, 5, size), 5), grid_of(bits)
    found = GridCodes.of(keys, bits, keep_norm=False)
    half = -(-size // 2)
    for lane in range(2):
        for slot in range(5):
            x = keys[lane, slot]
            scale = x.norm() / math.sqrt(size)
            made = torch.zeros(size)
            for i in range(half):
                other = size - 1 - i
                pair = torch.tensor([float(x[i] / scale), float(x[other] / scale) if other > i else 0.0])
                point = grid[(pair - grid).square().sum(1).argmin()] * scale
                made[i] = point[0]
                if other > i:
                    made[other] = point[1]
            assert torch.allclose(found.decode()[lane, slot], made, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kept_norm_is_the_norm(dtype):
    for size in (24, 33):
        keys = states((3, 63, size), 4, dtype)
        found = GridCodes.of(keys, 2, keep_norm=True).decode().float()
        assert torch.allclose(found.norm(dim=-1), keys.float().norm(dim=-1), rtol=3 * torch.finfo(dtype).eps)


def test_zeros_constants_and_large_numbers():
    keys = torch.zeros((1, 4, 16), dtype=torch.float16)
    keys[0, 1] = 3
    keys[0, 2] = 60000
    keys[0, 3, 2] = 6e-8
    found = GridCodes.of(keys, 4, keep_norm=True).decode()
    assert (found[0, 0] == 0).all() and found.isfinite().all()
    # All pairs of a constant vector have one point, beside the diagonal by less than a cell.
    assert (found[0, 1] / keys[0, 1] - 1).abs().max() < 0.15 and (found[0, 2] / keys[0, 2] - 1).abs().max() < 0.15


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_no_code_can_hold_is_refused(bad):
    keys = states((1, 8, 16), 1)
    keys[0, 3, 2] = bad
    with pytest.raises(CacheMisuse, match="higgs"):
        Higgs().encode(layout(8), keys, keys)


@pytest.mark.parametrize(("size", "bits", "each"), [(20, 2, 5), (20, 3, 8), (20, 4, 10), (33, 3, 14), (33, 2, 9)])
def test_bytes_are_those_of_the_closed_form(size, bits, each):
    """6-bit codes of 10 pairs are planes of 5 and 3 bytes, of 17 pairs 9 and 5."""
    keys = states((2, 67, size), 1, torch.bfloat16)
    segment = Higgs(bits=bits).encode(layout(67, 2), keys, keys)
    each += 2
    assert segment.closed_form_bytes() == sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert segment.closed_form_bytes() == 2 * 67 * 2 * each
    assert Higgs(bits=bits).bytes_per_token(size, size, 2) == 2 * each


def test_words():
    assert Plan.parse("hadamard(of=higgs(bits=3), signs=0)").encode == Hadamard(of=Higgs(bits=3), signs=0)
    with pytest.raises(ValueError, match="bits must be 2, 3 or 4, for which there are grids, found 8"):
        Higgs(bits=8)
    with pytest.raises(ValueError, match="value_bits must be 2, 3 or 4"):
        Higgs(value_bits=1)
    with pytest.raises(ValueError, match="block_size must be 1"):
        Higgs(block_size=0)
