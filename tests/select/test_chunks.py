"""Chunks against loops, and chunks worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse, PlanError
from kvtailor.plan import Plan, parse
from kvtailor.score.snapkv import SnapKV
from kvtailor.select.chunks import Chunks
from kvtailor.select.topk import TopK

INF = math.inf


def kept(scores: list[float], budget: int, size: int) -> list[int]:
    chosen = Chunks(size=size).select(torch.tensor([[scores]]), torch.tensor([[budget]]))
    return torch.nonzero(chosen[0, 0]).flatten().tolist()


def naive(scores: list[float], budget: int, size: int) -> list[int]:
    """One lane by loops."""
    tokens = [i for i, score in enumerate(scores) if score > -INF]
    chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    free = [[i for i in chunk if scores[i] < INF] for chunk in chunks]
    chosen = [i for i in tokens if scores[i] == INF][:budget]
    for chunk in sorted((c for c in free if c), key=lambda c: -math.fsum(scores[i] for i in c) / len(c)):
        best = sorted(chunk, key=lambda i: -scores[i])
        chosen += best[: budget - len(chosen)]
    return sorted(chosen)


@pytest.mark.parametrize("size", [1, 3, 10, 64, 100])
def test_equals_loops(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(3, 5, 63, generator=generator)
    draw = torch.rand(3, 5, 63, generator=generator)
    scores = scores.masked_fill(draw < 0.2, -INF).masked_fill(draw > 0.9, INF)
    budgets = (torch.rand(3, 5, generator=generator) * ((scores > -INF).sum(-1) + 1)).long()
    got = Chunks(size=size).select(scores, budgets)
    for row in range(3):
        for head in range(5):
            expected = naive(scores[row, head].tolist(), int(budgets[row, head]), size)
            assert torch.nonzero(got[row, head]).flatten().tolist() == expected


def test_chunks_of_one_are_top_k_ties_included() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (2, 3, 200), generator=generator).float()
    budgets = torch.randint(0, 201, (2, 3), generator=generator)
    assert torch.equal(Chunks(size=1).select(scores, budgets), TopK().select(scores, budgets))


def test_worked_by_hand() -> None:
    # Chunks of 3 have the means 3, 2 and 4; one token alone is better than all of them.
    scores = [0.0, 9.0, 0.0, 2.0, 1.0, 3.0, 4.0, 4.0, 4.0]
    assert kept(scores, 3, 3) == [6, 7, 8]
    assert kept(scores, 4, 3) == [1, 6, 7, 8]
    assert kept(scores, 6, 3) == [0, 1, 2, 6, 7, 8]
    assert kept(scores, 8, 3) == [0, 1, 2, 3, 5, 6, 7, 8]


def test_must_stay_does_not_lift_its_chunk() -> None:
    # The newest token stays; its chunk ranks by its other token, 1, below the first chunk's 2.
    assert kept([2.0, 2.0, 1.0, INF], 3, 2) == [0, 1, 3]
    # A chunk cut short ranks by its mean: 3 here, and as a sum it would lose to 2 + 2.
    assert kept([2.0, 2.0, 3.0, INF], 2, 2) == [2, 3]


def test_padding_makes_no_chunk() -> None:
    # Held tokens are 5 5 | 1 1 | 4 4, whatever lies between.
    assert kept([-INF, 5.0, -INF, 5.0, 1.0, 1.0, -INF, 4.0, 4.0, -INF], 4, 2) == [1, 3, 7, 8]
    assert kept([-INF, -INF, -INF, 5.0, 5.0], 2, 4) == [3, 4]


def test_equal_chunks_go_to_the_earliest_whatever_their_length() -> None:
    for value in (0.1, -0.7, 1 / 3):
        assert kept([value] * 23, 17, 5) == list(range(17))
        # 16 of these by plain addition have a lower mean than 11 of them.
        assert kept([value] * 27, 16, 16) == list(range(16))


def test_nan_is_an_error() -> None:
    with pytest.raises(CacheMisuse, match="NaN"):
        kept([1.0, math.nan, 2.0], 1, 2)


@pytest.mark.parametrize("size", [1, 3, 10, 64])
def test_heads_that_choose_together_equal_loops_over_the_sum(size: int) -> None:
    """All heads of a row keep what loops keep of the sum of their scores; rows choose for themselves."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(-40, 40, (3, 5, 63), generator=generator).float() / 8
    draw = torch.rand(3, 1, 63, generator=generator).expand_as(scores)
    scores = scores.masked_fill(draw < 0.2, -INF).masked_fill(draw > 0.9, INF)
    available = (scores[:, 0] > -INF).sum(-1)
    budgets = (torch.rand(3, generator=generator) * (available + 1)).long()
    got = Chunks(size=size, heads="all").select(scores, budgets[:, None].expand(3, 5))
    for row in range(3):
        expected = naive(scores[row].sum(0).tolist(), int(budgets[row]), size)
        for head in range(5):
            assert torch.nonzero(got[row, head]).flatten().tolist() == expected
    alone = Chunks(size=size).select(scores, budgets[:, None].expand(3, 5))
    assert not torch.equal(alone, got)


def test_one_choice_for_all_heads_needs_one_budget_for_all_heads() -> None:
    with pytest.raises(
        PlanError, match="chunks keeps the same tokens in all kv heads of a layer, and adakv gives each"
    ):
        parse('snapkv + adakv + chunks(heads="all") @ tokens=99')
    for allocate in ("", " + pyramid", " + inverse(of=pyramid)"):
        assert parse(f'snapkv{allocate} + chunks(heads="all") @ tokens=99').select == Chunks(heads="all")
    assert parse("snapkv + adakv + chunks @ tokens=99").select == Chunks()


def test_settings_and_the_papers_preset() -> None:
    published = Plan(score=SnapKV(kernel=1), select=Chunks(size=10, heads="all"), tokens=99)
    assert parse("chunkkv @ tokens=99") == published
    with pytest.raises(ValueError, match=r"^chunks: heads must be one of \('each', 'all'\), found 'some'"):
        Chunks(heads="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^chunks: size must be at least 1 token, found 0"):
        Chunks(size=0)


def test_leaves_its_scores_as_they_are() -> None:
    scores: Tensor = torch.randn(2, 2, 31, generator=torch.Generator().manual_seed(1))
    before = scores.clone()
    Chunks(size=4).select(scores, torch.full((2, 2), 9))
    assert torch.equal(scores, before)
