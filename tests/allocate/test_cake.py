"""CAKE: its preference where attention is known and by loops, and its cascade."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.budget_requests import asked, held_with, rows_of_attention
from tests.support.held_rows import held_of, make_row

from kvtailor.allocate.cake import Cake
from kvtailor.types import Needs


def preference(heads: list[list[list[float]]], window: int, tau1: float, tau2: float) -> float:
    """H and V of the last queries over the tokens before them, as the paper defines them."""
    n = len(heads[0][-1])
    history = n - min(window, n)
    entropy = shift = 0.0
    for head in heads:
        cut = [given[:history] for given in head]
        entropy -= sum(share * math.log(share) for given in cut for share in given)
        for token in range(history):
            column = [given[token] for given in cut]
            mean = sum(column) / len(column)
            shift += sum((share - mean) ** 2 for share in column) / (len(column) - 1)
    return entropy ** (1 / tau1) * shift ** (1 / tau2)


@pytest.mark.parametrize(("tau1", "tau2"), [(1.0, 1.0), (1.6, 0.4)])
def test_equals_the_loops_for_every_padded_row(tau1: float, tau2: float) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 8, 1)]
    found = Cake(window=8, tau1=tau1, tau2=tau2).measure(held_of(rows, Needs(window=8)))
    for i, row in enumerate(rows):
        expected = preference(rows_of_attention(row, 8), 8, tau1, tau2) if row.tokens > 8 else 0.0
        assert float(found[i]) == pytest.approx(expected, rel=1e-4)


def test_measures_what_is_known() -> None:
    # Two queries over two older tokens: (1/2, 1/4) and (1/4, 1/2), the rest on themselves. H = 4 * ln(2) / 2 = 2 ln 2;
    # each token's variance is 2 * (1/8)^2 = 1/32, so V = 1/16. Two heads alike double both.
    rows = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.125, 0.125]]
    held = held_with(rows, heads=2, window=2)
    assert float(Cake().measure(held)) == pytest.approx(4 * math.log(2) / 8, rel=1e-5)
    warm = Cake(tau1=2.0, tau2=0.5).measure(held)
    assert float(warm) == pytest.approx(math.sqrt(4 * math.log(2)) / 64, rel=1e-5)
    itself = [[float(i == j) for j in range(9)] for i in range(9)]
    assert float(Cake().measure(held_with(itself, window=2))) == 0.0


def test_layers_so_far_share_the_whole_history_budget() -> None:
    # Three layers with 75 tokens in all, of which 10 must stay in each: 45 of history. The first may have it all, but
    # holds 40; with the second it goes 1 : 2, and with the third 1 : 2 : 2.
    one = Cake().allocate(asked(75, [50], floor=10, layers=3, measured=[1.0]))
    assert one[0, :, 0].tolist() == [50]
    two = Cake().allocate(asked(75, [50, 50], floor=10, layers=3, measured=[1.0, 2.0]))
    assert two[0, :, 0].tolist() == [25, 40]
    three = Cake().allocate(asked(75, [25, 40, 50], floor=10, measured=[1.0, 2.0, 2.0]))
    assert three[0, :, 0].tolist() == [19, 28, 28]
    # 120 tokens, 90 of history: 1 : 2 would be 30 and 60, but the second holds 40, and its rest goes to the first.
    rich = Cake().allocate(asked(120, [50, 50], floor=10, layers=3, measured=[1.0, 2.0]))
    assert rich[0, :, 0].tolist() == [50, 50]


def test_no_preference_anywhere_is_uniform() -> None:
    assert Cake().allocate(asked(60, [50] * 3, measured=[0.0] * 3))[0, :, 0].tolist() == [20, 20, 20]


@pytest.mark.parametrize("total", [60, 150, 331])
def test_the_cascade_ends_where_one_split_over_all_layers_does(total: int) -> None:
    """The paper's theorem: what a layer is due only falls as others follow. Rounding moves a token or two."""
    generator = torch.Generator().manual_seed(total)
    preferences = (torch.rand(9, generator=generator) ** 3).tolist()
    held: list[int] = []
    for layer in range(9):
        held.append(63)
        found = Cake().allocate(asked(total, held, floor=2, layers=9, measured=preferences[: layer + 1]))
        assert all(now <= before for now, before in zip(found[0, :, 0].tolist(), held, strict=True))
        held = found[0, :, 0].tolist()
    at_once = Cake().allocate(asked(total, [63] * 9, floor=2, measured=preferences))[0, :, 0].tolist()
    assert sum(held) == sum(at_once) == total
    assert max(abs(one - other) for one, other in zip(held, at_once, strict=True)) <= 2


def test_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="cake splits by what it measured"):
        Cake().allocate(asked(9, [9, 9]))


@pytest.mark.parametrize(
    ("wrong", "said"), [({"window": 1}, "window"), ({"tau1": 0}, "tau1 and tau2"), ({"tau2": -1}, "tau1 and tau2")]
)
def test_refuses_wrong_settings(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=f"^cake: {said} must"):
        Cake(**wrong)  # type: ignore[arg-type]
