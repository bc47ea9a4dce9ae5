"""Budgets at or below the newest tokens that a score always keeps: exactly so many are held, and it is said."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build, error, held_columns, prompts

LENGTH = 100


def prefilled(plan: str, ids, mask=None, model=None):
    model = build("llama") if model is None else model
    cache = kvtailor.cache_for(model, plan)
    with torch.no_grad():
        model(ids, attention_mask=mask, **hand_cache(cache))
    return cache


def newest_of(cache, length: int) -> list[int]:
    """The columns that all layers and heads of a lone row hold."""
    found = {tuple(head.nonzero()[:, 0].tolist()) for held in held_columns(cache).values() for head in held[0]}
    assert len(found) == 1
    return [column - length for column in found.pop()]


@pytest.mark.parametrize(
    "score",
    ["snapkv", "snapkv + adakv", "snapkv + pyramid", "h2o + threshold", "snapkv + chunks", "snapkv + kivi(group=8)"],
)
@pytest.mark.parametrize("budget", ["tokens=10", "keep=0.1"])
def test_tokens_and_keep_below_the_window_hold_the_newest_and_say_so(score: str, budget: str) -> None:
    ids, _ = prompts((LENGTH,))
    said = r"nothing but the newest 10 of 100 tokens is held.*10 per kv head.*newest 32\). Give more than 32$"
    with pytest.warns(UserWarning, match=said):
        cache = prefilled(f"{score} @ {budget}", ids)
    assert newest_of(cache, LENGTH) == list(range(-10, 0))


@pytest.mark.parametrize("budget", ["tokens=32", "keep=0.32"])
def test_a_budget_of_just_the_window_says_that_nothing_else_is_held(budget: str) -> None:
    ids, _ = prompts((LENGTH,))
    with pytest.warns(UserWarning, match=r"nothing but the newest 32 of 100 tokens is held"):
        cache = prefilled(f"snapkv @ {budget}", ids)
    assert newest_of(cache, LENGTH) == list(range(-32, 0))


@pytest.mark.parametrize(
    "plan",
    ["snapkv @ tokens=33", "snapkv @ keep=0.34", "position @ tokens=4", "snapkv @ tokens=200", "tova @ tokens=2"],
)
def test_a_budget_above_the_window_or_above_the_prompt_says_nothing(plan: str) -> None:
    ids, _ = prompts((LENGTH,))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*nothing but the newest")
        prefilled(plan, ids)


@pytest.mark.parametrize("score", ["snapkv(window=8)", "snapkv(window=8) + adakv"])
def test_a_short_row_of_a_batch_holds_what_it_holds_alone(score: str) -> None:
    lengths = (100, 30, 2)
    ids, mask = prompts(lengths)
    with pytest.warns(UserWarning, match=r"in 2 of 3 rows nothing but the newest 6 of 30 tokens"):
        cache = prefilled(f"{score} @ keep=0.2", ids, mask)
    together = held_columns(cache)
    for row, length in enumerate(lengths):
        alone = held_columns(prefilled(f"{score} @ keep=0.2", ids[row : row + 1, -length:]))
        for layer, columns in alone.items():
            assert torch.equal(together[layer][row, :, -length:], columns[0])
    assert together[0][1].sum(-1).tolist() == [6, 6] and together[0][0].sum(-1).tolist() != [8, 8]


def test_a_short_row_that_holds_first_tokens_alone_is_told_of_once_and_how_it_stays_whole() -> None:
    ids, mask = prompts((100, 4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache = prefilled("streaming @ keep=0.25", ids, mask)
    [told] = [str(each.message) for each in said if "is held" in str(each.message)]
    assert "in 1 of 2 rows nothing but the first 1 of 4 tokens is held, none of the newest. tokens= in" in told
    assert len(told) < 180
    held = held_columns(cache)[0][1, :, -4:]
    assert held[:, 0].all() and not held[:, 1:].any()
    # The cure that it names.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is held")
        whole = prefilled("streaming @ tokens=25", ids, mask)
    assert held_columns(whole)[0][1, :, -4:].all()


def test_it_is_said_once_for_a_cache() -> None:
    ids, _ = prompts((LENGTH,))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache = kvtailor.prefill(build("llama"), ids, plan="snapkv @ keep=0.1", chunk=20)
    assert len([each for each in said if "nothing but the newest" in str(each.message)]) == 1
    assert cache.get_seq_length() == LENGTH


def test_what_is_held_still_answers(plan: str = "snapkv + kivi(bits=8, group=8, recent=8) @ keep=0.1") -> None:
    """The next token is decoded over what is left, on every path: here codes and a tail of the newest."""
    ids, _ = prompts((LENGTH,))
    model = build("llama")
    with pytest.warns(UserWarning, match="nothing but the newest"), torch.no_grad():
        plain, coded = (prefilled(each, ids, model=model) for each in ("snapkv @ keep=0.1", plan))
        logits = [model(ids[:, :1], **hand_cache(cache)).logits for cache in (plain, coded)]
    assert 0 < error(logits[1], logits[0]) < 0.1


@pytest.mark.parametrize("plan", ["snapkv", "snapkv + kivi(bits=4, group=8, recent=8)", "snapkv + adakv"])
def test_bytes_below_the_window_are_not_exceeded(plan: str) -> None:
    ids, _ = prompts((LENGTH,))
    full = prefilled("full", ids).ledger().full
    with pytest.warns(UserWarning, match="nothing but the newest"):
        cache = prefilled(f"{plan} @ bytes={full // 5}", ids)
    stages = cache.ledger().by_stage
    # What was observed is no part of what `bytes=` buys.
    assert 0.4 * full / 5 < stages["tail"] + stages.get("encode", 0) <= full / 5
