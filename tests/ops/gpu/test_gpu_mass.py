"""Column sums of a prompt's attention against the whole matrix in float64."""

from __future__ import annotations

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, error, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("new", "slots", "dtype", "padded"),
    [(63, 63, torch.float32, True), (7, 70, torch.float16, False), (40, 130, torch.float16, True)],
)
def test_sums_of_columns(new: int, slots: int, dtype: torch.dtype, padded: bool) -> None:
    from kvtailor.ops.triton.mass import column_mass

    generator = torch.Generator().manual_seed(slots)
    query, keys = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 3, new, 40), (2, 1, slots, 40)))
    weight = torch.rand((2, new), generator=generator)
    start = torch.tensor([0, slots // 2], dtype=torch.int32)
    sees = torch.arange(slots) <= torch.arange(new)[:, None] + slots - new
    sees = sees[None] & (torch.arange(slots) >= (start if padded else start * 0)[:, None])[:, None]
    logits = torch.einsum("bqtd,bhnd->bqtn", query.double(), keys.double()) * 0.2
    logits = logits.masked_fill(~sees[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    shares = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    wanted = torch.einsum("bqtn,bt->bn", shares, weight.double())[:, None]
    found = column_mass(
        query.to(DEVICE),
        keys.to(DEVICE),
        lse.float().to(DEVICE),
        0.2,
        weight=weight.to(DEVICE),
        start=start.to(DEVICE) if padded else None,
    )
    assert error(found, wanted) < 1e-5
    assert float(found.sum()) == pytest.approx(float(wanted.sum()), rel=1e-5)


def test_refuses_two_dtypes() -> None:
    from kvtailor.ops.triton.mass import column_mass

    query, keys = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="need one dtype"):
        column_mass(query, keys, torch.zeros(1, 1, 4), 1.0)
