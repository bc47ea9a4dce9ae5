"""Channels that are picked are what a matrix of ones and zeros gives, in torch and in every variant."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.coded_layouts import every_variant, needs_built
from torch import Tensor

from kvtailor.ops.attention.cpu import sides
from kvtailor.ops.cpu.library import Library
from kvtailor.types import Coordinates, PickedChannels

pytestmark = needs_built
# (n, k, g, t, c, r): rows of several heads, heads that share their channels, more channels than a byte can tell.
SIZES = [(6, 6, 1, 1, 63, 38), (6, 3, 3, 2, 7, 1), (3, 1, 4, 5, 24, 24), (5, 5, 2, 1, 300, 180)]


def both(k: int, c: int, r: int, generator: torch.Generator) -> tuple[PickedChannels, Coordinates]:
    picked = torch.rand((k, c), generator=generator).topk(r, -1).indices.sort(-1).values
    matrix = torch.zeros((k, c, r)).scatter_(1, picked[:, None], 1.0)
    # As a codec has them: tables of more runs of tokens, of which the first is looked at.
    table = picked.to(torch.uint8 if c <= 256 else torch.int16)[:, None].repeat(1, 2, 1)
    table[:, 1] = 0
    return PickedChannels(channels=table[:, 0], size=c), Coordinates(matrix=matrix)


@every_variant
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_a_matrix_of_ones_and_zeros(sizes: tuple[int, ...], library: Library) -> None:
    n, k, g, t, c, r = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    mine, other = both(k, c, r, generator)
    query, sums = (torch.randn((n, g, t, size), generator=generator) for size in (c, r))
    lse = torch.zeros(n, g, t).masked_fill_(torch.rand((n, g, t), generator=generator) < 0.3, -torch.inf)

    def is_same(found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape and torch.equal(found, expected)

    for each in (query, query.to(torch.bfloat16)):
        expected = Coordinates.of_queries(other, each)
        is_same(Coordinates.of_queries(mine, each), expected)
        is_same(sides.map_queries(mine, each, library), expected)
    expected = Coordinates.of_sums(other, sums, lse)
    is_same(Coordinates.of_sums(mine, sums, lse), expected)
    is_same(sides.map_sums(mine, sums, lse, library), expected)


def test_what_kernels_cannot_read_is_refused() -> None:
    for table in (torch.zeros((2, 3), dtype=torch.int64), torch.zeros((3, 2), dtype=torch.uint8).T):
        with pytest.raises(ValueError, match="uint8 or int16 in dense rows on the CPU"):
            sides.map_of(PickedChannels(channels=table, size=8))
