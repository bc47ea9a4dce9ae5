"""DynamicKV: its rounds against loops over sorted lists, and by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from tests.support.budget_requests import asked
from torch import Tensor

from kvtailor.allocate.dynamickv import DynamicKV

Heads = list[list[float]]


def split(total: int, parts: list[int], capacity: list[int]) -> list[int]:
    """A total by parts, within the capacity of each: what one cannot take others get; largest remainders first."""
    if sum(capacity) <= total:
        return capacity
    parts = parts if any(parts) else [1] * len(parts)
    full: set[int] = set()
    while True:
        left, weight = total - sum(capacity[i] for i in full), sum(p for i, p in enumerate(parts) if i not in full)
        if not weight:  # those of part 0 share the rest
            parts = [1] * len(parts)
            continue
        due = [Fraction(capacity[i]) if i in full else Fraction(left * parts[i], weight) for i in range(len(parts))]
        over = {i for i in range(len(parts)) if i not in full and due[i] > capacity[i]}
        if not over:
            break
        full |= over
    given = [int(each) for each in due]
    for i in sorted(range(len(due)), key=lambda i: (given[i] - due[i], i)):
        if sum(given) < total and given[i] < capacity[i]:
            given[i] += 1
    return given


def rounds(scores: list[Heads], tokens: int, window: int, interval: int, most: float) -> list[list[int]]:
    """The history budget per head of each layer so far, after each layer.

    Args:
        scores: of the history, for each layer and head.
        tokens: C, per head and layer on average, the window included.
    """
    layers, heads = len(scores), len(scores[0])
    base = tokens - window
    kept: list[Heads] = []
    after = []
    for layer, of_heads in enumerate(scores):
        share = min(int(most * base), len(of_heads[0]))
        kept.append([sorted(head, reverse=True)[:share] for head in of_heads])
        if (layer + 1) % interval == 0 or layer + 1 == layers:
            pool = [(-score, i) for i, of_layer in enumerate(kept) for head in of_layer for score in head]
            winners = [i for _, i in sorted(pool)[: base * heads * (layer + 1)]]
            parts = [winners.count(i) for i in range(layer + 1)]
            due = split(base * layers, parts, [len(of_layer[0]) for of_layer in kept])
            kept = [[head[:budget] for head in of_layer] for of_layer, budget in zip(kept, due, strict=True)]
        after.append([len(of_layer[0]) for of_layer in kept])
    return after


def staged(allocator: DynamicKV, scores: list[Tensor], tokens: int, window: int) -> list[list[int]]:
    """The same asked of the allocator, with scores (h, n) cut as an eviction cuts them; the window scores +inf."""
    layers, held, after = len(scores), [], []
    for layer, of_heads in enumerate(scores):
        forced = torch.full((of_heads.shape[0], window), torch.inf)
        held.append(torch.cat([of_heads, forced], 1)[None])
        capacity = torch.tensor([[each.shape[-1]] * each.shape[1] for each in held])
        total = tokens * layers * of_heads.shape[0]
        request = asked(total, capacity, floor=window, layers=layers, scores=list(held))
        budgets = allocator.allocate(request)[0]
        assert (budgets == budgets[:, :1]).all(), "heads of a layer are alike"
        held = [
            each.sort(dim=-1, descending=True).values[..., :budget]
            for each, budget in zip(held, budgets[:, 0].tolist(), strict=True)
        ]
        after.append([each.shape[-1] - window for each in held])
        assert len(held) == layer + 1
    return after


@pytest.mark.parametrize(("interval", "most"), [(4, 10.0), (3, 1.5), (1, 2.0), (8, 3.0), (5, 1.0)])
@pytest.mark.parametrize("layers", [1, 7, 8])
def test_every_round_equals_the_loops(layers: int, interval: int, most: float) -> None:
    for state in range(4):
        generator = torch.Generator().manual_seed(state)
        peaks = torch.rand(layers, 3, 1, generator=generator) ** 3
        scores = [torch.rand(3, 55, generator=generator) * peak for peak in peaks]
        for tokens in (9, 17, 40, 63):
            found = staged(DynamicKV(interval=interval, most=most), scores, tokens, window=8)
            expected = rounds([each.tolist() for each in scores], tokens, 8, interval, most)
            assert found == expected
            assert sum(found[-1]) == layers * min(tokens - 8, 55)


def ask(held: list[list[float]], layers: int, total: int, **settings: float) -> list[int]:
    """One head, nothing that must stay."""
    scores = [torch.tensor([[of_layer]]) for of_layer in held]
    request = asked(total, [len(of_layer) for of_layer in held], layers=layers, scores=scores)
    return DynamicKV(**settings).allocate(request)[0, :, 0].tolist()  # type: ignore[arg-type]


def test_by_hand() -> None:
    first, second, third = [9.0, 8, 7, 6, 5, 4], [3.0, 2, 1, 0.9, 0.8, 0.7], [7.5, 6.5, 0.6, 0.5, 0.4, 0.3]
    # Three layers of 2 tokens on average: a new layer keeps 1.5 * 2 = 3.
    assert ask([first], 3, 6, interval=2, most=1.5) == [3]
    # Four winners of both: 9, 8, 7 and 3, so 6 tokens go 3 : 1, but the first holds 3.
    assert ask([first[:3], second], 3, 6, interval=2, most=1.5) == [3, 3]
    # Six winners: 9, 8, 7, 7.5, 6.5 and 3: 3, 1 and 2 of the budget of 6.
    assert ask([first[:3], second[:3], third], 3, 6, interval=2, most=1.5) == [3, 1, 2]


def test_a_layer_that_wins_nothing_keeps_only_what_must_stay() -> None:
    assert ask([[9.0, 8, 7, 6], [1.0, 0.9, 0.8, 0.7]], 2, 4, interval=2) == [4, 0]


def test_the_last_layer_updates_though_the_interval_does_not_divide_the_layers() -> None:
    high, low = [9.0, 8, 7, 6, 5, 4], [3.0, 2, 1, 0.9, 0.8, 0.7]
    assert ask([high, low], 3, 6, interval=4) == [6, 6], "no update yet"
    assert ask([high, low, low], 3, 6, interval=4) == [6, 0, 0]


def test_all_layers_at_once_are_bounded_as_if_they_had_come_one_by_one() -> None:
    assert ask([[9.0, 8, 7, 6, 5, 4], [3.0, 2, 1], [2.5, 1, 1]], 3, 6, most=1.5) == [3, 2, 1]


def test_layers_that_hold_too_little_may_not_break_the_sum() -> None:
    """After a second turn one layer may hold nearly all; then it may keep more than `most` times the mean."""
    assert ask([[9.0, 8, 7, 6, 5, 4], [1.0], [1.0]], 3, 6, most=1.0) == [4, 1, 1]


def test_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="dynamickv pools scores"):
        DynamicKV().allocate(asked(4, [3, 3]))


@pytest.mark.parametrize(("wrong", "said"), [({"interval": 0}, "interval"), ({"most": 0.5}, "most")])
def test_refuses_wrong_settings(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=f"^dynamickv: {said} must"):
        DynamicKV(**wrong)  # type: ignore[arg-type]
