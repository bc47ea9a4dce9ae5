"""Gated chunks against loops, and chunks worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvtailor.errors import CacheMisuse
from kvtailor.plan import Plan
from kvtailor.select.gatedchunks import GatedChunks

INF = math.inf


def entropy(scores: list[float]) -> float:
    if len(scores) == 1:
        return 0.0
    scores = [score - min(0.0, *scores) for score in scores]
    shares = [score / (math.fsum(scores) + 1e-8) for score in scores]
    return min(max(-math.fsum(p * math.log(p + 1e-8) for p in shares) / math.log(len(scores)), 0.0), 1.0)


def median(numbers: list[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2]


def naive(scores: list[float], budget: int, size: int, short: int) -> list[int]:
    """One lane by loops, the budget spent chunk by chunk."""
    tokens = [i for i, score in enumerate(scores) if score > -INF]
    chunks = [[i for i in tokens[at : at + size] if scores[i] < INF] for at in range(0, len(tokens), size)]
    chunks = [chunk for chunk in chunks if chunk]
    chosen = [i for i in tokens if scores[i] == INF][:budget]
    means = [math.fsum(scores[i] for i in chunk) / len(chunk) for chunk in chunks]
    spread = [entropy([scores[i] for i in chunk]) for chunk in chunks]
    for at in sorted(range(len(chunks)), key=lambda at: -means[at]):
        gated = means[at] >= median(means) and spread[at] < median(spread)
        best = sorted(chunks[at], key=lambda i: -scores[i])
        chosen += best[: min(budget - len(chosen), short if gated else size)]
    rest = sorted((i for i in tokens if i not in chosen), key=lambda i: -scores[i])
    return sorted(chosen + rest[: budget - len(chosen)])


@pytest.mark.parametrize(("size", "short"), [(3, 1), (10, 4), (7, 6), (100, 4)])
@pytest.mark.parametrize("signed", [False, True])
def test_equals_loops(size: int, short: int, signed: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    # Sharp: some chunks are one token's, others are not.
    scores = torch.randn(3, 5, 63, generator=generator) * 2
    scores = scores if signed else scores.exp()
    draw = torch.rand(3, 5, 63, generator=generator)
    scores = scores.masked_fill(draw < 0.2, -INF).masked_fill(draw > 0.9, INF)
    budgets = (torch.rand(3, 5, generator=generator) * ((scores > -INF).sum(-1) + 1)).long()
    got = GatedChunks(size=size, short=short).select(scores, budgets)
    for row in range(3):
        for head in range(5):
            expected = naive(scores[row, head].tolist(), int(budgets[row, head]), size, short)
            assert torch.nonzero(got[row, head]).flatten().tolist() == expected


def test_heads_that_choose_together_equal_loops_over_the_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = (torch.randn(3, 5, 63, generator=generator) * 2).exp()
    scores = scores.masked_fill((torch.rand(3, 1, 63, generator=generator) < 0.2).expand_as(scores), -INF)
    got = GatedChunks(size=6, short=2, heads="all").select(scores, torch.full((3, 5), 23))
    for row in range(3):
        expected = naive(scores[row].double().sum(0).tolist(), 23, 6, 2)
        assert all(torch.nonzero(got[row, head]).flatten().tolist() == expected for head in range(5))


def test_worked_by_hand() -> None:
    """Means 3, 2, 1 and 0.5: the first chunk is one token's, so it keeps two, and the second is kept whole."""
    scores = [8.6, 0.2, 0.2, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.9, 0.3, 0.3]

    def kept(budget: int) -> list[int]:
        chosen = GatedChunks(size=3, short=2).select(torch.tensor([[scores]]), torch.tensor([[budget]]))
        return torch.nonzero(chosen[0, 0]).flatten().tolist()

    assert kept(2) == [0, 1]
    assert kept(5) == [0, 1, 3, 4, 5]
    assert kept(8) == [0, 1, 3, 4, 5, 6, 7, 8]
    # All chunks have had their turn after 11 tokens; the twelfth is what the first one left.
    assert kept(11) == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11] and kept(12) == list(range(12))


def test_settings() -> None:
    plan = Plan.parse("snapkv + gatedchunks(size=8, short=2) @ keep=0.25")
    assert plan.select == GatedChunks(size=8, short=2)
    with pytest.raises(ValueError, match="short must be from 1 to below size, found short=4 and size=4"):
        GatedChunks(size=4)
    with pytest.raises(ValueError, match=r"^gatedchunks: heads must be one of \('each', 'all'\), found 'some'"):
        GatedChunks(heads="some")  # type: ignore[arg-type]
    with pytest.raises(CacheMisuse, match="NaN"):
        GatedChunks().select(torch.tensor([[[1.0, math.nan, 2.0]]]), torch.tensor([[1]]))
