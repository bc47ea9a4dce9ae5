"""The pyramid's end points, its exact sum, and how it bends at the prompt's length."""

from __future__ import annotations

import pytest
import torch

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.pyramid import Pyramid


def layer_by_layer(
    mean: int,
    tokens: int,
    layers: int,
    *,
    heads: int = 1,
    window: int = 32,
    beta: float = 20,
    held: list[int] | None = None,
) -> list[int]:
    """Tokens per layer, summed over heads, each layer asked alone."""
    found = []
    for layer in range(layers):
        capacity = torch.full((1, 1, heads), tokens if held is None else held[layer])
        request = BudgetRequest(
            total=torch.tensor([mean * layers * heads]),
            capacity=capacity,
            floor=capacity.clamp(max=window),
            layers=(layer,),
            num_layers=layers,
            row_tokens=torch.tensor([tokens]),
        )
        found.append(int(Pyramid(beta=beta).allocate(request).sum()))
    return found


@pytest.mark.parametrize("mean", [256, 512, 1024])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_layers_sum_to_the_nominal_budget(mean: int, heads: int) -> None:
    assert sum(layer_by_layer(mean, 8000, 32, heads=heads)) == 32 * mean * heads


def test_both_ends_are_reached() -> None:
    # History 224 on average: 224 / 20 = 11.2 in the last layer, 448 - 11.2 = 436.8 in the first, and 32 recent tokens.
    budgets = layer_by_layer(256, 8000, 32)
    assert budgets[0] == 469 and budgets[-1] == 43
    line = [436.8 - i * (436.8 - 11.2) / 31 + 32 for i in range(32)]
    assert all(abs(got - exact) < 1 for got, exact in zip(budgets, line, strict=True))
    assert budgets == sorted(budgets, reverse=True)


def test_a_short_prompt_flattens_the_line_about_its_mean() -> None:
    # The first layer can hold 300 - 32 = 268 of history, so the last gets 2 * 224 - 268 = 180.
    budgets = layer_by_layer(256, 300, 32)
    assert budgets[0] == 300 and budgets[-1] == 212 and sum(budgets) == 32 * 256


def test_a_budget_above_the_prompt_keeps_it_whole() -> None:
    assert layer_by_layer(256, 200, 4) == [200] * 4
    assert layer_by_layer(256, 256, 4) == [256] * 4


def test_one_layer_is_uniform_and_so_is_beta_one() -> None:
    assert layer_by_layer(100, 900, 1) == [100]
    assert layer_by_layer(100, 900, 5, beta=1) == [100] * 5


def test_a_second_walk_draws_the_same_line() -> None:
    first = layer_by_layer(256, 8000, 32)
    assert layer_by_layer(256, 8040, 32, held=[each + 40 for each in first]) == first


def test_heads_share_a_layer_equally() -> None:
    capacity = torch.full((1, 4, 3), 900)
    request = BudgetRequest(
        total=torch.tensor([4 * 3 * 100]), capacity=capacity, floor=capacity * 0, layers=(0, 1, 2, 3), num_layers=4
    )
    budgets = Pyramid().allocate(request)[0]
    assert torch.equal(budgets, budgets[:, :1].expand(-1, 3)) and int(budgets.sum()) == 4 * 3 * 100


def test_refuses_a_pyramid_on_its_head() -> None:
    with pytest.raises(ValueError, match="beta"):
        Pyramid(beta=0.5)
