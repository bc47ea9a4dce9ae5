"""Pairs: the tree of merges, against a loop that merges the cheapest pair again and again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.budget_requests import held_with
from tests.support.held_rows import held_of, make_row
from torch import Tensor

from kvtailor.ops.lanes.topk import keep_top
from kvtailor.score.by_keys.pairs import Pairs
from kvtailor.types import Held


def kept_by_loops(held: Held, row: int, head: int, window: int, sinks: int, budget: int) -> list[int]:
    """Indices that are left when the cheapest pair has been merged until `budget` tokens are left."""
    there = held.valid[row, head].nonzero()[:, 0].tolist()
    group = held.queries.shape[1] // held.keys.shape[1]
    received = dict.fromkeys(there, 0.0)
    for g in range(group):
        for w, column in enumerate(held.query_columns.tolist()):
            query = held.queries[row, head * group + g, w].double()
            seen = [i for i in there if held.positions[row, head, i] <= column]
            if column < held.first[row]:
                continue
            weight = [0.0 if held.log_weight is None else float(held.log_weight[row, head, i]) for i in seen]
            logits = [float(query @ held.keys[row, head, i].double()) * held.scaling for i in seen]
            shares = [math.exp(logit + extra) for logit, extra in zip(logits, weight, strict=True)]
            for i, share in zip(seen, shares, strict=True):
                received[i] += share / sum(shares)
    gamma = 4096 / math.log(512)
    clusters = []
    for place, i in enumerate(there):
        column = int(held.positions[row, head, i])
        if column >= held.first[row] + sinks and column < held.seen - window:
            count = 1.0 if held.log_weight is None else math.exp(float(held.log_weight[row, head, i]))
            clusters.append([i, place, received[i], count])
    fixed = [i for i in there if i not in {cluster[0] for cluster in clusters}]
    while len(fixed) + len(clusters) > budget:
        prices = [
            (one[2] + two[2]) * (one[3] + two[3]) / math.exp(one[1] / gamma)
            for one, two in zip(clusters, clusters[1:], strict=False)
        ]
        at = prices.index(min(prices))
        gone = clusters.pop(at + 1)
        clusters[at][2] += gone[2]
        clusters[at][3] += gone[3]
    return sorted(fixed + [cluster[0] for cluster in clusters])


@pytest.mark.parametrize("merged_before", [False, True])
def test_equals_the_loop_for_every_budget(merged_before: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    scorer = Pairs(window=5, sinks=3)
    rows = [make_row(n, heads=3, group=2, size=6, generator=generator) for n in (63, 40)]
    held = held_of(rows, scorer.needs)
    if merged_before:
        held = replace(held, log_weight=torch.randint(1, 9, held.valid.shape, generator=generator).float().log())
    scores = scorer.score(held)
    for budget in (10, 17, 25, 36, 39):
        kept = keep_top(pinned(scores, held, scorer), torch.full((2, 3), budget))
        for row in range(2):
            for head in range(3):
                assert kept[row, head].nonzero()[:, 0].tolist() == kept_by_loops(held, row, head, 5, 3, budget)


def pinned(scores: Tensor, held: Held, scorer: Pairs) -> Tensor:
    return scores.masked_fill(held.recent(scorer.recent), torch.inf).masked_fill(~held.valid, -torch.inf)


def test_by_hand() -> None:
    """The last query gives 0.1, 0.4, 0.2, 0.1, 0.2; of tokens 0 to 3 the pair (2, 3) is cheapest, 0.3 * 2.

    Then (0, 1) costs 0.5 * 2 and (1, 23) would cost 0.7 * 3; last of all go the two pairs, 0.8 * 4.
    """
    rows = [[1.0, 0, 0, 0, 0]] * 4 + [[0.1, 0.4, 0.2, 0.1, 0.2]]
    scores = Pairs(window=1, sinks=0).score(held_with(rows, window=1))[0, 0]
    gamma = 4096 / math.log(512)
    assert scores[3].item() == pytest.approx(math.log(0.3 * 2) - 2 / gamma, rel=1e-5)
    assert scores[1].item() == pytest.approx(math.log(0.5 * 2), abs=1e-5)
    assert scores[2].item() == pytest.approx(math.log(0.8 * 4), rel=1e-5)
    assert scores[0] == scores[4] == 1e30


def test_many_falling_prices_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each price is below the one before, one pair merges at a time; the rounds are bounded."""
    monkeypatch.setattr("kvtailor.score.by_keys.pairs._ROUNDS", 4)
    rows = torch.tril(torch.ones(80, 80)) / torch.arange(1, 81)[:, None]
    scores = Pairs(window=1, sinks=0).score(held_with(rows.tolist(), window=1))
    assert torch.isfinite(scores).all() and (scores[0, 0, 1:79] < 1e30).all()


@pytest.mark.parametrize("given", [{"window": 0}, {"sinks": -1}], ids=str)
def test_refuses_what_makes_no_sense(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="^pairs: "):
        Pairs(**given)
