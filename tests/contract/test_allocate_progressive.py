"""What the stage `allocate` promises of the scope "progressive", tested on every method that has it."""

from __future__ import annotations

import pytest
import torch
from tests.contract.test_allocate import ALLOCATORS, SHAPES, ask, bounds, fitting, owed, scores_for, text_of, totals
from torch import Tensor

from kvtailor.allocate.contract import Allocator

PROGRESSIVE = [allocator for allocator in ALLOCATORS if allocator.scope == "progressive"]
every_progressive = pytest.mark.parametrize("allocator", PROGRESSIVE, ids=text_of)


def test_some_methods_have_it() -> None:
    assert {"Cake", "DynamicKV"} <= {type(allocator).__name__ for allocator in PROGRESSIVE}


@every_progressive
@pytest.mark.parametrize("shape", [*SHAPES, (2, 9, 2)], ids=str)
def test_cut_as_layers_come_it_never_grows_and_sums_exactly(allocator: Allocator, shape: tuple[int, int, int]) -> None:
    shape = fitting(allocator, shape)
    for seed, recent in ((3, 0), (4, 8), (5, 500)):
        every, every_floor = bounds(shape, 63, recent, seed, equal=True)
        scores = scores_for(every, every_floor, seed)
        for total in totals(every, every_floor):
            held, left = every[:, :0], []
            for layer in range(shape[1]):
                held, left = torch.cat([held, every[:, layer : layer + 1]], 1), [*left, scores[layer]]
                floor = every_floor[:, : layer + 1]
                budgets = ask(allocator, total, held, floor, left, layers=shape[1])
                assert (budgets >= floor).all() and (budgets <= held).all()
                held, left = budgets, [best(each, budgets[:, i]) for i, each in enumerate(left)]
            assert torch.equal(held.sum((1, 2)), owed(allocator, total, every, every_floor))


def best(scores: Tensor, budgets: Tensor) -> Tensor:
    """(b, h, n) the highest `budgets` (b, h) of scores (b, h, n), the rest -inf."""
    ranked = scores.sort(dim=-1, descending=True).values[..., : int(budgets.max())]
    return ranked.masked_fill(torch.arange(ranked.shape[-1]) >= budgets[..., None], -torch.inf)


@every_progressive
def test_after_the_first_layers_at_most_the_total_and_one_update_is_held(allocator: Allocator) -> None:
    """What makes it worth to cut early: the layers so far hold less than all their tokens."""
    every = torch.full(fitting(allocator, (1, 12, 2)), 500)
    floor, total = every.clamp(max=8), torch.tensor([12 * 2 * 20])
    scores, held = scores_for(every, floor, 0), every[:, :0]
    for layer in range(every.shape[1]):
        held = torch.cat([held, every[:, layer : layer + 1]], 1)
        left = [best(each, held[:, i]) for i, each in enumerate(scores[: layer + 1])]
        held = ask(allocator, total, held, floor[:, : layer + 1], left, layers=every.shape[1])
        assert int(held.sum()) < max(int(total) * 4, 2 * 500)
