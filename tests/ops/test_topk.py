"""Keeping the best against a sort in plain Python, on both of its paths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.ops.lanes import topk
from kvtailor.ops.lanes.topk import keep_top, pooled_counts


def naive(scores: Tensor, budgets: Tensor) -> Tensor:
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            lane = scores[row, head].tolist()
            best = sorted(range(len(lane)), key=lambda i: (-lane[i], i))[: int(budgets[row, head])]
            kept[row, head, best] = True
    return kept


def make(shape: tuple[int, int, int], seed: int, coarse: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator)
    scores = (scores * 2).round() if coarse else scores
    draw = torch.rand(shape, generator=generator)
    scores = scores.masked_fill(draw < 0.2, -torch.inf).masked_fill(draw > 0.9, torch.inf)
    budgets = (torch.rand(shape[:2], generator=generator) * ((scores > -torch.inf).sum(-1) + 1)).long()
    return scores, budgets


@pytest.mark.parametrize("coarse", [True, False], ids=["ties", "distinct"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 63), (2, 3, 257)], ids=str)
def test_equals_a_sort(shape: tuple[int, int, int], coarse: bool) -> None:
    for seed in range(6):
        scores, budgets = make(shape, seed, coarse)
        assert torch.equal(keep_top(scores, budgets), naive(scores, budgets))


def test_negative_zero_ties_with_zero() -> None:
    kept = keep_top(torch.tensor([[[-0.0, 0.0, -0.0, 1.0]]]), torch.tensor([[2]]))
    assert kept.tolist() == [[[True, False, False, True]]]


def test_the_way_of_other_devices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        type = "elsewhere"

    class Moved(torch.Tensor):
        device = Elsewhere()  # type: ignore[assignment]

    for seed in range(6):
        scores, budgets = make((3, 5, 63), seed, coarse=True)
        expected = topk._lowest_kept(scores, budgets)
        assert torch.equal(topk._lowest_kept(scores.as_subclass(Moved), budgets).as_subclass(torch.Tensor), expected)
    nothing = torch.zeros(3, 5, dtype=torch.int64)
    assert (topk._lowest_kept(scores.as_subclass(Moved), nothing).as_subclass(torch.Tensor) == torch.inf).all()


def test_refuses_nan() -> None:
    scores = torch.zeros(1, 2, 5)
    scores[0, 1, 3] = torch.nan
    with pytest.raises(CacheMisuse, match="NaN"):
        keep_top(scores, torch.tensor([[1, 1]]))


@pytest.mark.parametrize("budget", [-1, 5])
def test_refuses_a_budget_that_tokens_cannot_fill(budget: int) -> None:
    scores = torch.tensor([[[1.0, 2.0, -torch.inf, 3.0, 4.0]]])
    with pytest.raises(ValueError, match="only"):
        keep_top(scores, torch.tensor([[budget]]))


def test_lanes_without_tokens_keep_none() -> None:
    nothing, none = torch.zeros(2, 3, 0), torch.zeros(2, 3, dtype=torch.int64)
    assert keep_top(nothing, none).shape == (2, 3, 0)
    assert torch.equal(pooled_counts(nothing, none, none[:, 0]), none)


def test_refuses_budgets_of_another_shape() -> None:
    with pytest.raises(ValueError, match="one budget per lane"):
        keep_top(torch.zeros(2, 3, 5), torch.tensor([[1, 1]]))


def test_pooled_worked_by_hand() -> None:
    scores = torch.tensor([[[9.0, 8.0, 7.0, 1.0], [2.0, 6.0, 0.0, -torch.inf]]])
    assert pooled_counts(scores, torch.tensor([[0, 0]]), torch.tensor([4])).tolist() == [[3, 1]]
    assert pooled_counts(scores, torch.tensor([[0, 2]]), torch.tensor([4])).tolist() == [[2, 2]]
    assert pooled_counts(scores, torch.tensor([[1, 3]]), torch.tensor([4])).tolist() == [[1, 3]]
