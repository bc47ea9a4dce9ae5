"""Signs of a random projection of what levels leave: unbiased products, their variance, bytes, a plain loop."""

import math

import pytest
import torch
from tests.encode.test_gaussian import DISTORTION, layout
from tests.support.segments_of import states

from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard
from kvtailor.errors import CacheMisuse
from kvtailor.ops.codes.gaussian import GaussianCodes, ResidualCodes, gaussian_levels, projection
from kvtailor.plan import Plan

CPU = torch.device("cpu")


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "bits"), [(20, 3), (7, 2), (33, 4)])
def test_against_the_definition_vector_by_vector(size, bits):
    keys, levels, onto = states((2, 5, size), 5), gaussian_levels(bits - 1), projection(size, 3, CPU)
    found = ResidualCodes.of(keys, bits, 3, keep_norm=False).decode()
    for lane in range(2):
        for slot in range(5):
            x = keys[lane, slot]
            scale = x.norm() / math.sqrt(size)
            coarse = levels[(x / scale - levels[:, None]).abs().argmin(0)] * scale
            left, made = x - coarse, coarse.clone()
            for row in range(size):
                sign = 1 if float(onto[row] @ left) >= 0 else -1
                made += math.sqrt(math.pi / 2) / size * left.norm() * sign * onto[row]
            assert torch.allclose(found[lane, slot], made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep_norm", [False, True])
def test_products_are_unbiased_over_projections(keep_norm):
    """Over 800 projections the mean product is the true one; that of the levels alone is too small."""
    keys, query = random(1, 4, 32, seed=1), random(32, seed=2)
    # Vectors that lean to the query, so that there is a product to be biased.
    keys = keys + query * torch.tensor([0.5, -1.0, 2.0, 0.0])[:, None]
    made = [ResidualCodes.of(keys, 2, state, keep_norm=keep_norm).decode()[0] @ query for state in range(800)]
    each, wanted = torch.stack(made), keys[0] @ query
    assert ((each.mean(0) - wanted).abs() < 4 * each.std(0) / math.sqrt(800)).all()
    if not keep_norm:
        alone = GaussianCodes.of(keys, 1, keep_norm=False).decode()[0] @ query
        assert (alone.abs() < 0.9 * wanted.abs())[:3].all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_of_products_is_the_papers(bits):
    """Its mean square for a unit query is pi / (2 d) of what b - 1 bits lose, less the square of the mean, 1 / d of it.

    The mean over all queries is that of the decoded vector's squared error.
    """
    keys = random(1, 1500, 128, seed=bits)
    error = 0.0
    for state in range(3):
        found = ResidualCodes.of(keys, bits, state, keep_norm=False).decode() - keys
        error += float(found.square().sum() / keys.square().sum()) / 3
    assert error == pytest.approx(DISTORTION[bits - 1] * (math.pi / 2 - 1 / 128), rel=0.02)


@pytest.mark.parametrize(("bits", "sides"), [(2, "both"), (3, "keys"), (4, "values")])
def test_bytes_are_those_of_the_closed_form(bits, sides):
    keys = states((2, 67, 20), 1, torch.bfloat16)
    codec = Gaussian(bits=bits, qjl=sides)
    segment = codec.encode(layout(67, 2), keys, keys)
    plain, both = -(-20 * bits // 8) + 2, -(-20 * (bits - 1) // 8) + 3 + 4
    each = {"both": 2 * both, "keys": both + plain, "values": both + plain}[sides]
    assert segment.closed_form_bytes() == sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert segment.closed_form_bytes() == 2 * 67 * each
    assert codec.bytes_per_token(20, 20, 2) == each


def test_zeros_constants_and_large_numbers():
    keys = torch.zeros((1, 5, 16), dtype=torch.float16)
    keys[0, 1] = 3
    keys[0, 2] = 30000
    keys[0, 3, 2] = 6e-8
    found = ResidualCodes.of(keys[:, :4], 4, 0, keep_norm=True).decode()
    assert (found[0, 0] == 0).all() and found.isfinite().all()
    # A constant vector leaves nothing where its norm is kept.
    assert torch.allclose(found[0, 1], keys[0, 1], rtol=5e-3) and torch.allclose(found[0, 2], keys[0, 2], rtol=5e-3)
    keys[0, 4, 3] = math.nan
    with pytest.raises(CacheMisuse, match="gaussian"):
        Gaussian(bits=3, qjl="both").encode(layout(5), keys, keys)


def test_words():
    written = "hadamard(of=gaussian(bits=3, qjl=keys, projection=5), signs=0)"
    assert Plan.parse(written).encode == Hadamard(of=Gaussian(bits=3, qjl="keys", projection=5), signs=0)
    with pytest.raises(ValueError, match="qjl takes one bit of a code, and values have bits=1"):
        Gaussian(bits=3, value_bits=1, qjl="both")
    with pytest.raises(ValueError, match="only=keys leaves qjl=values nothing to code"):
        Gaussian(only="keys", qjl="values")
    assert Gaussian(only="keys", qjl="both").bytes_per_token(16, 16, 2) == 8 - 2 + 2 + 4 + 32
