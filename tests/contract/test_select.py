"""What the stage `select` promises, tested on every method in its folder."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.discover import methods_of, sample_of
from torch import Tensor

import kvtailor.select
from kvtailor.select.contract import Selector

SELECTORS = methods_of(kvtailor.select, Selector)
every_selector = pytest.mark.parametrize("kind", SELECTORS, ids=lambda kind: kind.__name__)


def make(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Coarse scores, so that ties abound; some tokens forced, some absent; a budget that the tokens can fill."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, shape, generator=generator).float()
    draw = torch.rand(shape, generator=generator)
    scores = scores.masked_fill(draw < 0.15, -torch.inf).masked_fill(draw > 0.95, torch.inf)
    available = (scores > -torch.inf).sum(-1)
    budgets = (torch.rand(shape[:2], generator=generator) * (available + 1)).long()
    return scores, budgets


def test_the_folder_holds_methods() -> None:
    assert "TopK" in {kind.__name__ for kind in SELECTORS}


@every_selector
def test_is_a_frozen_keyword_only_dataclass_with_defaults(kind: type[Selector]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    assert sample_of(kind) == sample_of(kind) and hash(sample_of(kind)) == hash(sample_of(kind))


@every_selector
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 63), (2, 1, 2), (1, 8, 200)], ids=str)
def test_keeps_the_budget_and_only_tokens(kind: type[Selector], shape: tuple[int, int, int]) -> None:
    for seed in range(8):
        scores, budgets = make(shape, seed)
        kept = sample_of(kind).select(scores, budgets)
        assert kept.shape == scores.shape and kept.dtype == torch.bool
        assert not (kept & (scores == -torch.inf)).any()
        counts = kept.sum(-1)
        if kind.exact:
            assert torch.equal(counts, budgets)
        else:
            least = torch.minimum(budgets, (scores == torch.inf).sum(-1).clamp(min=1))
            assert (counts <= budgets).all() and (counts >= least).all()


@every_selector
def test_keeps_nothing_and_everything_when_told(kind: type[Selector]) -> None:
    scores, _ = make((3, 5, 63), 11)
    assert not sample_of(kind).select(scores, torch.zeros(3, 5, dtype=torch.int64)).any()
    everything = scores > -torch.inf
    kept = sample_of(kind).select(scores, everything.sum(-1))
    assert torch.equal(kept, everything) == kind.exact, (
        "exact says whether a selector drops what the budget has room for"
    )


@every_selector
def test_a_budget_of_one_keeps_a_token_however_low_it_scores(kind: type[Selector]) -> None:
    scores = torch.full((2, 3, 63), -1e30).masked_fill(torch.arange(63) < 60, -torch.inf)
    assert torch.equal(sample_of(kind).select(scores, torch.ones(2, 3, dtype=torch.int64)).sum(-1), torch.ones(2, 3))


@every_selector
def test_tokens_that_must_stay_go_first(kind: type[Selector]) -> None:
    scores, _ = make((3, 5, 63), 12)
    forced = scores == torch.inf
    assert torch.equal(sample_of(kind).select(scores, forced.sum(-1)), forced)


@every_selector
def test_equals_go_to_the_earliest(kind: type[Selector]) -> None:
    kept = sample_of(kind).select(torch.zeros(2, 3, 63), torch.tensor([[0, 1, 5], [63, 62, 31]]))
    counts = torch.tensor([[0, 1, 5], [63, 62, 31]])
    assert torch.equal(kept, torch.arange(63) < counts[..., None])


@every_selector
def test_lanes_do_not_hear_of_each_other(kind: type[Selector]) -> None:
    scores, budgets = make((3, 5, 63), 13)
    together = sample_of(kind).select(scores, budgets)
    for row in range(3):
        for head in range(5):
            lane = (slice(row, row + 1), slice(head, head + 1))
            assert torch.equal(sample_of(kind).select(scores[lane], budgets[lane]), together[lane])


@every_selector
def test_changes_no_input_and_reads_any_stride(kind: type[Selector]) -> None:
    scores, budgets = make((3, 5, 63), 14)
    strided = scores.transpose(1, 2).contiguous().transpose(1, 2)
    before = scores.clone()
    assert torch.equal(sample_of(kind).select(strided, budgets), sample_of(kind).select(scores, budgets))
    assert torch.equal(scores, before)
