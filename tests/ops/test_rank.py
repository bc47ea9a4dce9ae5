"""The effective rank against singular values, and where its value is known."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.live_bytes import LiveBytes
from torch import Tensor

from kvtailor.ops.codes.rank import effective_rank


def by_singular_values(matrix: Tensor) -> float:
    """The definition, with LAPACK's singular values in float64 and RankKV's threshold."""
    values = [value for value in torch.linalg.svdvals(matrix.double()).tolist() if value > 1e-10]
    shares = [value / sum(values) for value in values]
    return math.exp(-sum(share * math.log(share) for share in shares))


@pytest.mark.parametrize(
    ("matrix", "rank"),
    [
        (torch.eye(7), 7.0),
        (torch.eye(5, 63) * 3, 5.0),
        (torch.ones(6, 9) / 9, 1.0),
        (torch.rand(1, 999, generator=torch.Generator().manual_seed(0)).repeat(256, 1), 1.0),
        (torch.zeros(4, 9), 1.0),
        (torch.zeros(0, 9), 1.0),
        (torch.diag(torch.tensor([3.0, 1.0])), 4 / 3**0.75),  # shares 3/4 and 1/4: 4^(3/4) * 4^(1/4) / 3^(3/4)
        (torch.diag(torch.tensor([1.0, 1.0, 1e-11])), 2.0),
        # Each query looks at itself and before it alike: two tokens have the rows (1, 0) and (1/2, 1/2).
        (torch.tensor([[1.0, 0.0], [0.5, 0.5]]), by_singular_values(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))),
    ],
)
def test_known_ranks(matrix: Tensor, rank: float) -> None:
    assert float(effective_rank(matrix)) == pytest.approx(rank, rel=1e-6)


@pytest.mark.parametrize("sharp", [0.1, 1.0, 6.0, 30.0])
@pytest.mark.parametrize("shape", [(63, 63), (17, 5000), (256, 700), (1, 40)], ids=str)
def test_equals_singular_values(shape: tuple[int, int], sharp: float) -> None:
    generator = torch.Generator().manual_seed(int(sharp * 10))
    matrix = torch.softmax(torch.randn(shape, generator=generator) * sharp, -1)
    assert float(effective_rank(matrix)) == pytest.approx(by_singular_values(matrix), rel=1e-5)


@pytest.mark.parametrize("dimensions", [1, 2, 5])
def test_singular_values_that_are_rounding_count_for_little(dimensions: int) -> None:
    """The product of few dimensions with a softmax behind it: hundreds of values between 1 and 1e-9 of the largest."""
    generator = torch.Generator().manual_seed(dimensions)
    factors = torch.randn(200, dimensions, generator=generator), torch.randn(dimensions, 900, generator=generator)
    matrix = torch.softmax(factors[0] @ factors[1], -1)
    assert float(effective_rank(matrix)) == pytest.approx(by_singular_values(matrix), rel=1e-4)


def test_widens_a_few_columns_at_a_time() -> None:
    matrix = torch.rand(64, 40_000)
    with LiveBytes() as count:
        effective_rank(matrix)
    assert count.peak < 3 * 2**20, "all of it in float64 takes 19 MiB"
