"""Apportioning against a brute force over every way in which bounds can bind, in exact fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtailor.ops.lanes.apportion import apportion, even_shares, layer_shares


def exact_shares(weights: list[int], total: int, low: list[int], high: list[int]) -> list[Fraction]:
    """The shares clamp(scale * weight, low, high), found by trying each place as at its floor, free or full."""
    n = len(weights)
    for kinds in itertools.product("lfh", repeat=n):
        ends = {"l": low, "h": high}
        fixed = sum(ends[k][i] for i, k in enumerate(kinds) if k != "f")
        weight = sum(weights[i] for i, k in enumerate(kinds) if k == "f")
        if weight == 0:
            if "f" in kinds or fixed != total:
                continue
            least = max((Fraction(high[i], weights[i]) for i, k in enumerate(kinds) if k == "h"), default=Fraction(0))
            most = min((Fraction(low[i], weights[i]) for i, k in enumerate(kinds) if k == "l"), default=least)
            if least <= most:
                return [Fraction(ends[k][i]) for i, k in enumerate(kinds)]
            continue
        scale = Fraction(total - fixed, weight)
        agrees = {
            "l": lambda i, s=scale: s * weights[i] <= low[i],
            "h": lambda i, s=scale: s * weights[i] >= high[i],
            "f": lambda i, s=scale: low[i] <= s * weights[i] <= high[i],
        }
        if all(agrees[k](i) for i, k in enumerate(kinds)):
            return [scale * weights[i] if k == "f" else Fraction(ends[k][i]) for i, k in enumerate(kinds)]
    raise AssertionError("no consistent shares")


def reference(weights: list[int], total: int, low: list[int], high: list[int]) -> list[int]:
    total = min(max(total, sum(low)), sum(high))
    shares = [Fraction(x) for x in low]
    weighted = [i for i, w in enumerate(weights) if w > 0]
    rest = [i for i, w in enumerate(weights) if w == 0]
    inner = total - sum(low[i] for i in rest)
    if inner >= sum(high[i] for i in weighted):
        for i in weighted:
            shares[i] = Fraction(high[i])
        weighted, weights = rest, [1] * len(weights)
        inner = total - sum(high[i] for i in range(len(low)) if i not in rest)
    if weighted:
        part = exact_shares(
            [weights[i] for i in weighted], inner, [low[i] for i in weighted], [high[i] for i in weighted]
        )
        for i, share in zip(weighted, part, strict=True):
            shares[i] = share
    result = [int(share) for share in shares]
    order = sorted(range(len(result)), key=lambda i: (result[i] - shares[i], i))
    for i in [i for i in order if result[i] < high[i]][: total - sum(result)]:
        result[i] += 1
    return result


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, list[int], list[int]]:
    n = draw(st.integers(1, 5))
    weights = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    low = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    high = [x + draw(st.integers(0, 40)) for x in low]
    return weights, draw(st.integers(0, sum(high) + 5)), low, high


def solve(weights: list[float], total: int, low: list[int], high: list[int]) -> list[int]:
    answer = apportion(torch.tensor(weights), torch.tensor(total), torch.tensor(low), torch.tensor(high))
    return list(answer.tolist())


@settings(max_examples=300, deadline=None)
@given(problems())
def test_equals_the_brute_force(problem: tuple[list[int], int, list[int], list[int]]) -> None:
    assert solve(*problem) == reference(*problem)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(0, 10**7), st.integers(0, 2**31))
def test_sums_exactly_for_any_size(n: int, total: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(4, n, generator=generator, dtype=torch.float64) ** 3
    low = torch.randint(0, 100, (4, n), generator=generator)
    high = low + torch.randint(0, 10**6, (4, n), generator=generator)
    got = apportion(weights, torch.full((4,), total), low, high)
    assert torch.equal(got.sum(-1), torch.full((4,), total).clamp(low.sum(-1), high.sum(-1)))
    assert (got >= low).all() and (got <= high).all()


def test_worked_by_hand() -> None:
    assert solve([1, 1, 1], 10, [0] * 3, [99] * 3) == [4, 3, 3]
    assert solve([3, 2, 1], 11, [0] * 3, [99] * 3) == [5, 4, 2]  # 5.5, 3.67, 1.83: remainders .5, .67, .83
    assert solve([3, 2, 1], 12, [0] * 3, [2, 99, 99]) == [2, 7, 3]  # 10 over 2 : 1, remainders .67 and .33
    assert solve([3, 2, 1], 12, [0, 0, 6], [99] * 3) == [4, 2, 6]  # 6 over 3 : 2, remainders .6 and .4
    assert solve([1, 0, 0], 9, [0] * 3, [4, 99, 99]) == [4, 3, 2]
    assert solve([0, 0], 3, [0, 0], [5, 5]) == [2, 1]
    assert solve([1, 1], 0, [2, 3], [5, 5]) == [2, 3]
    assert solve([1, 1], 99, [2, 3], [5, 5]) == [5, 5]


def test_equal_remainders_go_to_the_earliest_however_the_shares_were_reached() -> None:
    for total in range(1, 200):
        got = solve([0.1] * 7, total, [0] * 7, [10**6] * 7)
        assert got == [total // 7 + (i < total % 7) for i in range(7)]


@pytest.mark.parametrize("weights", [[-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_refuses_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite and not negative"):
        solve(weights, 1, [0, 0], [1, 1])


def test_refuses_bounds_that_cross() -> None:
    with pytest.raises(ValueError, match="low must be at most high"):
        solve([1, 1], 1, [2, 0], [1, 1])


def test_a_layer_alone_takes_the_others_to_be_like_itself() -> None:
    weights = torch.tensor([[3.0, 2.0, 1.0]])
    total, low, high = torch.tensor([13]), torch.tensor([[1]]), torch.tensor([[5]])
    alone = [layer_shares(weights, total, low, high, (i,)).item() for i in range(3)]
    assert alone == [5, 5, 3]
    together = layer_shares(weights, total, low.expand(1, 3), high.expand(1, 3), (0, 1, 2))
    assert together.tolist() == [alone]


def test_a_layer_alone_can_be_told_what_the_others_hold() -> None:
    weights = torch.tensor([[3.0, 2.0, 1.0]])
    total, low = torch.tensor([12]), torch.tensor([[0]])
    short = layer_shares(weights, total, low, torch.tensor([[3]]), (2,), torch.tensor([99]))
    assert short.tolist() == [[2]]
    assert layer_shares(weights, total, low, torch.tensor([[3]]), (2,)).tolist() == [[3]]
    assert layer_shares(weights, total, low, torch.tensor([[3]]), (0,), torch.tensor([99])).tolist() == [[3]]


def test_like_heads_share_evenly_and_unlike_ones_exactly() -> None:
    weights, low = torch.ones(2, 2), torch.zeros(2, 2, 3, dtype=torch.int64)
    high = torch.full((2, 2, 3), 9)
    high[1, 0, 0] = 1
    got = even_shares(weights, torch.tensor([17, 17]), low, high, (0, 1))
    assert got.tolist() == [[[3, 3, 3], [2, 2, 2]], [[1, 4, 4], [3, 3, 2]]]
    alone = even_shares(weights, torch.tensor([17, 17]), low[:, 1:], high[:, 1:], (1,), torch.tensor([9, 9]))
    assert alone.tolist() == [[[2, 2, 2]], [[2, 2, 2]]]
