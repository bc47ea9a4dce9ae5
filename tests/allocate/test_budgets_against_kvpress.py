"""Budgets that kvpress gives to layers and heads, and ours under the same hyper-parameters; see `kvpress_kept.md`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tests.support.kvpress_cases import Pairing, each_pairing, recorded

from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.pyramid import Pyramid

# kvpress counts the window into the safeguard, `adakv` adds its floor to it: of 40 tokens and a window of 8, 0.2 is the
# window alone, and 0.9 is the window and 28 of the 32 others.
POOLED = (
    Pairing(case="adakv snapkv a0.2", plan="snapkv(window=8, kernel=5) + adakv(floor=0)"),
    Pairing(case="adakv snapkv a0.9", plan="snapkv(window=8, kernel=5) + adakv(floor=0.875)"),
    Pairing(case="adakv h2o a0.2", plan="h2o(recent=0, normalise=true) + adakv(floor=0.2)"),
    Pairing(case="adakv h2o a0.9", plan="h2o(recent=0, normalise=true) + adakv(floor=0.9)"),
    Pairing(case="adakv lagkv cross", plan="lagkv(sinks=4, lag=16, compete=true) + adakv(floor=0.2)"),
    Pairing(case="kvzip all layers c2048", plan="kvzip(sinks=4) + pooled(floor=0)"),
    Pairing(case="kvzip all layers c100", plan="kvzip(sinks=4, chunk=100) + pooled(floor=0)"),
    Pairing(case="kvzip per layer c2048", plan="kvzip(sinks=4) + adakv(floor=0)"),
    Pairing(case="lukv expected", plan="expected(sinks=4, epsilon=0.02) + lukv"),
    Pairing(case="kvcompose layers", plan="kvcompose + composite"),
    Pairing(case="kvcompose heads", plan="kvcompose + pooled(floor=0)"),
    # Two heads that keep all 200 tokens, two that keep 4 sinks and 16 recent tokens.
    Pairing(case="duo half", plan="position(sinks=4) + table(weights=[[200, 20], [200, 20]])", tokens={0: 110}),
    # kvpress's line runs from 120 to 40 tokens with the window inside, ours from 112 to 32 and the window on top.
    Pairing(case="pyramid snapkv", plan="snapkv(window=8, kernel=5) + pyramid(beta=2.25)"),
)


@each_pairing(*POOLED)
def test_the_same_tokens_stay(pairing: Pairing) -> None:
    pairing.check_kept()


def test_the_scores_of_kvcompose_rank_as_theirs() -> None:
    Pairing(case="kvcompose layers", plan="kvcompose + composite").check_order()


@dataclass(frozen=True)
class Line:
    """One recorded pyramid; `budget` is the mean of its layers."""

    layers: int
    tokens: int
    window: int
    beta: float
    ratio: float
    budgets: list[int]

    @property
    def budget(self) -> float:
        return self.tokens * (1 - self.ratio)

    def ours(self) -> list[int]:
        """Our budgets less the window, asked for a window more.

        Both draw the paper's line for the history. kvpress lets it be the whole budget; we add the window to it.
        """
        capacity = torch.full((1, self.layers, 1), self.tokens)
        request = BudgetRequest(
            total=torch.tensor([round((self.budget + self.window) * self.layers)]),
            capacity=capacity,
            floor=torch.full_like(capacity, self.window),
            layers=tuple(range(self.layers)),
            num_layers=self.layers,
        )
        return (Pyramid(beta=self.beta).allocate(request)[0, :, 0] - self.window).tolist()


LINES = [Line(**found) for found in recorded()["pyramid_budgets"]]
# Where the last layer would get less than the window, kvpress gives up the pyramid; ours goes on.
GIVEN_UP = [line for line in LINES if (line.tokens, line.ratio) == (63, 0.75)]
DRAWN = [line for line in LINES if line not in GIVEN_UP]


@pytest.mark.parametrize("line", DRAWN, ids=lambda line: f"{line.layers} layers, {line.tokens} tokens, {line.ratio}")
def test_pyramid_draws_the_same_line(line: Line) -> None:
    ours = line.ours()
    assert sum(ours) == round(line.budget * line.layers)
    # kvpress rounds each layer by itself; ours share what rounding leaves.
    assert max(abs(a - b) for a, b in zip(ours, line.budgets, strict=True)) <= 1
    if sum(line.budgets) == line.budget * line.layers:
        assert ours == line.budgets


def test_lines_of_whole_numbers_are_among_them() -> None:
    assert sum(sum(line.budgets) == line.budget * line.layers for line in DRAWN) >= 5


def test_kvpress_gives_up_a_pyramid_that_ours_keeps() -> None:
    assert [line.budgets for line in GIVEN_UP] == [[16, 16]] and [line.ours() for line in GIVEN_UP] == [[31, 1]]
