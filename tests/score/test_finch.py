"""Finch against loops over the question's queries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row
from torch import Tensor

from kvtailor.plan import Plan
from kvtailor.score.finch import Finch


def naive(
    queries: Tensor, columns: list[int], keys: Tensor, there: list[int], scaling: float, normalise: bool
) -> list[float]:
    """One kv head by loops: queries (g, w, d) at columns, keys (n, d) of which those at `there` are held."""
    found = [0.0] * keys.shape[0]
    for group in queries.double():
        for query, column in zip(group, columns, strict=True):
            seen = [j for j in there if j <= column]
            weight = {j: math.exp(scaling * float(query @ keys[j].double())) for j in seen}
            times = sum(1 for j in there if j < column) if normalise else 1
            for j in seen:
                found[j] += weight[j] / sum(weight.values()) * times / len(columns) / len(queries)
    return found


@pytest.mark.parametrize("normalise", [True, False])
def test_equals_loops_in_every_padded_row(normalise: bool) -> None:
    """Of the row of 5 tokens not all 7 columns of the window are its own; those that are padding do not vote."""
    generator = torch.Generator().manual_seed(19)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 5)]
    scorer = Finch(window=7, normalise=normalise)
    held = held_of(rows, scorer.needs)
    scores = scorer.score(held)
    for i, row in enumerate(rows):
        question = list(range(max(row.tokens - 7, 0), row.tokens))
        for head in range(3):
            queries = row.queries[2 * head : 2 * head + 2, question]
            text = list(range(row.tokens))
            expected = naive(queries, question, row.keys[head], text, held.scaling, normalise)
            older = slice(0, max(row.tokens - 7, 0))
            found = scores[i, head, 63 - row.tokens :]
            torch.testing.assert_close(found[older], torch.tensor(expected)[older], rtol=1e-4, atol=1e-6)


def test_later_queries_count_the_tokens_that_are_still_held() -> None:
    generator = torch.Generator().manual_seed(20)
    row = make_row(40, heads=2, group=1, size=6, generator=generator)
    scorer = Finch(window=4)
    held = held_of([row], scorer.needs)
    there = torch.rand(2, 40, generator=generator) < 0.5
    there[:, 36:] = True
    scores = scorer.score(replace(held, valid=held.valid & there))
    for head in range(2):
        left = there[head].nonzero()[:, 0].tolist()
        expected = naive(
            row.queries[head : head + 1, 36:], list(range(36, 40)), row.keys[head], left, held.scaling, True
        )
        older = [j for j in left if j < 36]
        torch.testing.assert_close(scores[0, head, older], torch.tensor(expected)[older], rtol=1e-4, atol=1e-6)


def test_settings() -> None:
    assert Plan.parse("finch(window=24) + rolling @ tokens=256").score == Finch(window=24)
    with pytest.raises(ValueError, match=r"^finch: window must be at least 1 token, found 0; give the question's"):
        Finch(window=0)
