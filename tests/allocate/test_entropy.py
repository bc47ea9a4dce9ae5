"""Entropy: tokens in effect where attention is known, and on whole matrices of padded rows."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.budget_requests import asked, held_with, rows_of_attention
from tests.support.held_rows import held_of, make_row

from kvtailor.allocate.entropy import Entropy
from kvtailor.types import Needs


def tokens_in_effect(given: list[float]) -> float:
    return math.exp(-sum(share * math.log(share) for share in given if share))


@pytest.mark.parametrize("window", [1, 8, 32])
def test_equals_the_loops_for_every_padded_row(window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 1)]
    found = Entropy(window=window).measure(held_of(rows, Needs(window=window)))
    for i, row in enumerate(rows):
        flat = [tokens_in_effect(given) for head in rows_of_attention(row, window) for given in head]
        assert float(found[i]) == pytest.approx(sum(flat) / len(flat), rel=1e-5)


def test_measures_what_is_known() -> None:
    uniform = [[1 / (i + 1) if j <= i else 0.0 for j in range(20)] for i in range(20)]
    itself = [[float(i == j) for j in range(20)] for i in range(20)]
    # The last two queries look at 19 and at 20 tokens alike.
    assert float(Entropy().measure(held_with(uniform, heads=2, window=2))) == pytest.approx(19.5, rel=1e-5)
    assert float(Entropy().measure(held_with(itself, window=2))) == pytest.approx(1.0, rel=1e-5)
    # Half, a quarter and two eighths are 1/2 + 2/4 + 6/8 = 7/4 bits.
    last = [[0.0] * 4] * 3 + [[0.5, 0.25, 0.125, 0.125]]
    assert float(Entropy().measure(held_with(last, window=1))) == pytest.approx(2**1.75, rel=1e-5)


def test_layers_share_in_proportion_and_what_one_cannot_hold_goes_on() -> None:
    found = Entropy().allocate(asked(600, [999] * 3, measured=[10.0, 30.0, 20.0]))
    assert found[0, :, 0].tolist() == [100, 300, 200]
    found = Entropy().allocate(asked(600, [999, 150, 999], measured=[10.0, 30.0, 20.0], floor=120))
    assert found[0, :, 0].tolist() == [150, 150, 300]
    with pytest.raises(ValueError, match="layers 0 to 2 at once"):
        Entropy().allocate(asked(9, [9, 9], layers=3, measured=[1.0, 2.0]))


def test_refuses_wrong_settings() -> None:
    with pytest.raises(ValueError, match="^entropy: window must be at least 1 query, found 0"):
        Entropy(window=0)
