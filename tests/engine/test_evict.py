"""Decisions of an eviction, against a loop over layers, rows and heads; they change nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.seam.zoo import build, prompts
from tests.support.segments_of import Padded, states

import kvtailor
from kvtailor.engine.budget import Budget
from kvtailor.engine.evict import ScoredLayer, decide, score_layer
from kvtailor.engine.evict import _as_cut as as_cut
from kvtailor.engine.saving import state_of
from kvtailor.engine.state import LayerState
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan


def candidates(lengths: list[int], seed: int, recent: int = 2) -> list[ScoredLayer]:
    """Layers of 3 rows and 2 heads whose tokens have scores; the last `recent` of each have +inf."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer, tokens in enumerate(lengths):
        scores = torch.rand(3, 2, tokens, generator=generator)
        scores[..., tokens - recent :] = torch.inf
        found.append(
            ScoredLayer(
                layer=layer,
                scores=scores,
                counts=torch.full((3, 2), tokens),
                floor=torch.full((3, 2), recent),
            )
        )
    return found


def budget_of(total: list[int], layers: int, heads: int = 2) -> Budget:
    whole = torch.tensor(total)
    return Budget(total=whole, each=whole // (layers * heads), row_tokens=torch.tensor([40, 41, 42]))


def test_a_layer_that_was_cut_has_its_kept_tokens_in_time_order_and_no_scores_in_filler() -> None:
    (layer,) = candidates([20], 5)
    keep = torch.rand(layer.scores.shape, generator=torch.Generator().manual_seed(6)) < 0.4
    counts = keep.sum(-1)
    longest = int(counts.max())
    cut = as_cut(layer, keep, counts, longest=longest)
    assert cut.scores.shape == (3, 2, longest) and bool((counts < longest).any())
    for row in range(3):
        for head in range(2):
            kept = layer.scores[row, head][keep[row, head]]
            assert torch.equal(cut.scores[row, head, : len(kept)], kept)
            assert (cut.scores[row, head, len(kept) :] == -torch.inf).all()


@pytest.mark.parametrize("total", [[60, 61, 95], [400, 400, 400], [12, 400, 60]])
def test_a_decision_is_the_best_tokens_of_each_head(total: list[int]) -> None:
    layers = candidates([20, 20, 20], 4)
    found = decide(Plan.parse("snapkv(window=2) @ tokens=10"), layers, budget_of(total, 3), layers=3, last=True)
    assert found.last and [cut.candidate.layer for cut in found.cuts] == [0, 1, 2]
    for i, cut in enumerate(found.cuts):
        all_fit = bool((found.budgets[:, i] >= 20).all())
        assert (cut.keep is None) == all_fit
        if cut.keep is None:
            assert torch.equal(cut.counts, cut.candidate.counts)
            continue
        for row in range(3):
            for head in range(2):
                most = int(found.budgets[row, i, head])
                ranked = sorted(range(20), key=lambda at: -float(cut.candidate.scores[row, head, at]))
                assert set(cut.keep[row, head].nonzero()[:, 0].tolist()) == set(ranked[:most])
                assert int(cut.counts[row, head]) == min(most, 20)
    assert (found.budgets.sum((1, 2)) <= torch.tensor(total)).all()


def test_a_layer_alone_and_all_layers_get_the_same_share() -> None:
    plan, layers = Plan.parse("snapkv(window=2) @ tokens=10"), candidates([20, 20], 5)
    both = decide(plan, layers, budget_of([40, 40, 40], 2), layers=2, last=True)
    for layer in layers:
        alone = decide(plan, [layer], budget_of([40, 40, 40], 2), layers=2, last=True)
        assert torch.equal(alone.budgets[:, 0], both.budgets[:, layer.layer])


def test_an_inexact_selector_decides_once_for_each_layer() -> None:
    """Where all tokens fit, a layer that was cut in an earlier stage of the eviction is left alone."""
    plan = Plan.parse("knorm + threshold(at=0.5) @ tokens=50")
    first, second = candidates([20, 20], 6)
    cut_before = dataclasses.replace(first, cut_before=True)
    found = decide(plan, [cut_before, second], budget_of([900, 900, 900], 2), layers=2, last=True)
    assert found.cuts[0].keep is None and found.cuts[1].keep is not None


def test_scoring_a_layer_changes_nothing() -> None:
    plan, state = Plan.parse("knorm(recent=3) @ tokens=10"), LayerState(1)
    state.append(*states((2, 3, 2, 20, 8), 3), exactly=True)
    before = state_of(state)
    real = torch.arange(20)[None] >= torch.tensor([0, 4, 19])[:, None]
    visible = Padded(new_tokens=20, first_column=0, real=real)
    found = score_layer(state, plan, plan.needs, visible, budget_of([40, 40, 40], 2), layers=2, keep_view=False)
    assert found.layer == 1 and found.view is None and found.remembered is None
    assert found.counts.tolist() == [[20, 20], [16, 16], [1, 1]] and found.floor.tolist() == [[3, 3], [3, 3], [1, 1]]
    keys = state.stored.tail.as_segment().keys.view(3, 2, 20, 8)
    for row, start in enumerate((0, 4, 19)):
        for at in range(20):
            score = found.scores[row, 0, at]
            if at < start:
                assert score == -torch.inf
            elif at >= 17:
                assert score == torch.inf
            else:
                assert score == pytest.approx(-float(keys[row, 0, at].norm()), rel=1e-5)
    after = state_of(state)
    assert before[0] == after[0] and all(torch.equal(before[1][name], after[1][name]) for name in before[1])


@torch.no_grad()
def test_a_rows_first_tokens_are_those_behind_its_padding() -> None:
    model = build("llama")
    ids, mask = prompts((60, 20))
    cache = kvtailor.cache_for(model, "streaming @ tokens=16")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=positions, **hand_cache(cache))
    for state in cache.engine.states:
        layout = state.stored.tail.as_segment().layout
        columns = layout.columns(ids.device).expand(layout.lanes, -1).view(2, state.heads, -1)
        for row, first in enumerate((0, 40)):
            for head in columns[row].tolist():
                assert head == [*range(first, first + 4), *range(48, 60)]
