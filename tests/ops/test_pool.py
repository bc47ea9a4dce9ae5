"""Pooling over members against loops that first take the members out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtailor.ops.lanes.pool import pool_members


def naive(values: Tensor, member: Tensor, kernel: int, kind: str) -> Tensor:
    out = torch.zeros_like(values)
    for lane in torch.cartesian_prod(*[torch.arange(size) for size in values.shape[:-1]]).tolist():
        where = [i for i, is_member in enumerate(member[tuple(lane)].tolist()) if is_member]
        line = [values[tuple(lane)][i].item() for i in where]
        for j, slot in enumerate(where):
            near = line[max(0, j - kernel // 2) : j + kernel // 2 + 1]
            out[(*lane, slot)] = max(near) if kind == "max" else sum(near) / kernel
    return out


@pytest.mark.parametrize("kind", ["average", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5, 63])
@pytest.mark.parametrize("n", [1, 2, 63])
def test_equals_the_loops(n: int, kernel: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(n + kernel)
    for share in (0.0, 0.5, 1.0):
        values = torch.rand(3, 2, n, generator=generator)
        member = torch.rand(3, 2, n, generator=generator) < share
        got = pool_members(values, member, kernel, kind)
        torch.testing.assert_close(got, naive(values, member, kernel, kind), rtol=1e-6, atol=1e-7)


def test_what_is_no_member_is_never_read() -> None:
    values = torch.tensor([[1.0, torch.nan, 2.0, torch.inf, 3.0]])
    member = torch.tensor([[True, False, True, False, True]])
    assert pool_members(values, member, 3, "average").tolist() == [[1.0, 0.0, 2.0, 0.0, pytest.approx(5 / 3)]]
    assert pool_members(values, member, 3, "max").tolist() == [[2.0, 0.0, 3.0, 0.0, 3.0]]
