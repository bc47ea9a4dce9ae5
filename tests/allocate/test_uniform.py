"""Equal shares and what is left over."""

from __future__ import annotations

import torch

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.uniform import Uniform


def ask(total: int, capacity: list[list[int]], floor: int = 0) -> list[list[int]]:
    held = torch.tensor(capacity)[None]
    layers = held.shape[1]
    request = BudgetRequest(
        total=torch.tensor([total]),
        capacity=held,
        floor=held.clamp(max=floor),
        layers=tuple(range(layers)),
        num_layers=layers,
    )
    return list(Uniform().allocate(request)[0].tolist())


def test_divides_evenly() -> None:
    assert ask(24, [[9, 9], [9, 9], [9, 9]]) == [[4, 4], [4, 4], [4, 4]]


def test_what_layers_leave_over_goes_to_the_earliest() -> None:
    assert ask(16, [[9, 9], [9, 9], [9, 9]]) == [[3, 3], [3, 3], [2, 2]]


def test_what_heads_cannot_share_is_not_spent() -> None:
    assert ask(17, [[9, 9], [9, 9], [9, 9]]) == [[3, 3], [3, 3], [2, 2]]


def test_what_a_short_head_cannot_hold_goes_to_its_layer_first() -> None:
    assert ask(24, [[1, 9], [9, 9], [9, 9]]) == [[1, 7], [4, 4], [4, 4]]
    assert ask(24, [[1, 3], [9, 9], [9, 9]]) == [[1, 3], [5, 5], [5, 5]]
    assert ask(25, [[1, 9], [9, 9], [9, 9]]) == [[1, 8], [4, 4], [4, 4]]
