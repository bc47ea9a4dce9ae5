"""Threshold: bars worked by hand, its bound, and a cache that holds what reaches the bar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.allocate.uniform import Uniform
from kvtailor.bench.subject import plans_at_whole_budget
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan, parse
from kvtailor.score.by_keys.knorm import KNorm
from kvtailor.select.threshold import Threshold

INF = math.inf


def kept(selector: Threshold, scores: list[float], budget: int) -> list[int]:
    chosen = selector.select(torch.tensor([[scores]]), torch.tensor([[budget]]))
    return torch.nonzero(chosen[0, 0]).flatten().tolist()


def test_the_mean_worked_by_hand() -> None:
    scores = [1.0, 2.0, 3.0, 6.0]  # mean 3
    assert kept(Threshold(), scores, 4) == [2, 3]
    assert kept(Threshold(at=0.5), scores, 4) == [1, 2, 3]
    assert kept(Threshold(at=1.5), scores, 4) == [3]
    # Neither absent tokens nor those that must stay are part of the mean.
    assert kept(Threshold(), [-INF, *scores, INF, INF], 6) == [3, 4, 5, 6]
    assert kept(Threshold(), [-5.0, -1.0, -6.0], 3) == [1]


def test_a_fixed_bar_worked_by_hand() -> None:
    assert kept(Threshold(at=2.0, of="score"), [1.0, 2.0, 3.0, 6.0], 4) == [1, 2, 3]
    assert kept(Threshold(at=-2.0, of="score"), [-1.0, -2.5, -2.0], 3) == [0, 2]


def test_the_budget_is_a_bound() -> None:
    assert kept(Threshold(at=-9.0, of="score"), [1.0, 2.0, 3.0, 6.0, 2.0], 3) == [1, 2, 3]


def test_the_best_token_stays_where_none_reaches_the_bar() -> None:
    assert kept(Threshold(at=9.0, of="score"), [1.0, 7.0, 3.0], 3) == [1]
    assert kept(Threshold(at=9.0, of="score"), [1.0, 7.0, INF], 3) == [2]


@pytest.mark.parametrize("at", [-1.0, 0.0, 1.0, 2.0])
def test_what_must_stay_stays_even_alone(at: float) -> None:
    assert kept(Threshold(at=at), [INF, -INF, INF, INF], 3) == [0, 2, 3]


@pytest.mark.parametrize("value", [0.1, -0.7, 1 / 3, 1e-30, 0.0])
def test_equal_scores_are_all_their_own_mean(value: float) -> None:
    for tokens in (1, 11, 63):
        assert kept(Threshold(), [value] * tokens, tokens) == list(range(tokens))


def test_wrong_input_is_an_error() -> None:
    with pytest.raises(CacheMisuse, match="NaN"):
        kept(Threshold(), [1.0, math.nan, 2.0], 1)
    with pytest.raises(ValueError, match=r"^threshold: at must be a finite number, found inf"):
        Threshold(at=INF)
    with pytest.raises(ValueError, match=r"^threshold: of must be one of"):
        Threshold(of="median")  # type: ignore[arg-type]


@torch.no_grad()
def test_a_cache_holds_what_reaches_the_bar_under_any_budget() -> None:
    """The budget has room for all tokens, and still each head drops the keys that are longer than the bar."""
    model = build("llama")
    ids, mask = prompts((56, 31))
    full = kvtailor.cache_for(model, "full")
    model(ids, attention_mask=mask, **hand_cache(full))
    norms = [state.stored.tail.as_segment().keys.unflatten(0, (2, 2)).norm(dim=-1) for state in full.engine.states]
    bar = float(torch.cat([norm[:, :, 25:].flatten() for norm in norms]).median())
    cache = kvtailor.cache_for(model, f"knorm + threshold(at={-bar!r}, of='score') @ keep=1.0")
    model(ids, attention_mask=mask, **hand_cache(cache))
    for held, norm in zip(held_columns(cache).values(), norms, strict=True):
        expected = (norm <= bar) & mask.bool()[:, None]
        alone = expected.sum(-1, keepdim=True) == 0
        assert not alone.any() and torch.equal(held, expected)
        assert 0 < held.sum() < mask.sum() * 2


@dataclass(frozen=True, kw_only=True)
class Again(Uniform):
    """Cuts each layer once more whenever another one is done."""

    scope: ClassVar[str] = "progressive"


@torch.no_grad()
def test_is_asked_once_for_each_layer_also_where_budgets_are_given_again_and_again() -> None:
    model = build("llama")
    ids, mask = prompts((56, 31))
    caches = [
        kvtailor.cache_for(model, Plan(score=KNorm(), select=Threshold(), allocate=each, keep=1.0))
        for each in (Uniform(), Again())
    ]
    for cache in caches:
        model(ids, attention_mask=mask, **hand_cache(cache))
    once, again = (held_columns(cache) for cache in caches)
    assert all(torch.equal(once[layer], again[layer]) for layer in once)


def test_its_whole_budget_is_tried_without_it() -> None:
    assert plans_at_whole_budget("snapkv + threshold(at=0.5) @ tokens=64") == ("snapkv @ keep=1.0",)
    assert plans_at_whole_budget("snapkv + chunks @ tokens=64") == ("snapkv + chunks @ keep=1.0",)
    assert str(parse("knorm + threshold(at=-2.0, of='score') @ keep=1.0")).startswith("knorm + threshold(at=-2.0, of=")
