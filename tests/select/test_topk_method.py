"""Top-k against a stable sort at the size of a long prompt."""

from __future__ import annotations

import pytest
import torch

from kvtailor.errors import CacheMisuse
from kvtailor.select.topk import TopK


def test_equals_a_stable_sort_at_length() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(2, 3, 5000, generator=generator) * 300).round()
    budgets = torch.randint(0, 5001, (2, 3), generator=generator)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    rank = order.argsort(dim=-1)
    assert torch.equal(TopK().select(scores, budgets), rank < budgets[..., None])


def test_nan_is_an_error_and_not_a_choice() -> None:
    with pytest.raises(CacheMisuse, match="NaN"):
        TopK().select(torch.tensor([[[1.0, torch.nan]]]), torch.tensor([[1]]))
