"""Caches that share a prefill, or are made of what another holds, are as if they had read the text themselves."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.hf.run.sharing import can_follow, can_remake, keep_queries, remake, sharing_prefill
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.seam.test_speculation import assert_same_state
from tests.support.seam.zoo import build, error, prompts

PLANS = [
    "snapkv(window=4) @ tokens=20",
    "retrieval(chunk=4) + adakv @ tokens=20",
    "streaming @ tokens=12, slack=5",
    "kivi(bits=4, recent=32)",
    "h2o(recent=4) + kivi(recent=32) @ keep=0.5",
    "expected @ tokens=24",
    "indexed(page=4) + quest(tokens=16)",
    "minicache(start=0, block_size=10)",
    "tova + pyramid @ tokens=24",
]


@pytest.mark.parametrize(
    ("plan", "family"), [*((plan, "llama") for plan in PLANS), (PLANS[0], "gemma3"), (PLANS[4], "gemma3")]
)
@torch.no_grad()
def test_a_shared_prefill_is_as_if_each_cache_had_read_it(plan: str, family: str) -> None:
    model = build(family)
    ids, mask = prompts((50, 33))
    source, mine, own = (kvtailor.cache_for(model, each) for each in ("vector(bits=8)", plan, plan))
    with sharing_prefill(source, [mine]):
        kvtailor.prefill(model, ids, mask, cache=source)
    kvtailor.prefill(model, ids, mask, cache=own)
    assert_same_state(mine, own)
    assert mine.ledger().total == own.ledger().total
    token, longer = torch.tensor([[7], [9]]), torch.cat([mask, mask.new_ones(2, 1)], 1)
    asked = {"attention_mask": longer, "position_ids": (longer.cumsum(-1) - 1)[:, -1:]}
    expected = model(token, **hand_cache(own), **asked).logits
    assert torch.equal(model(token, **hand_cache(mine), **asked).logits, expected)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if can_remake(Plan.parse("full"), Plan.parse(plan))])
@torch.no_grad()
def test_what_is_made_of_all_that_another_holds_is_what_is_read(plan: str) -> None:
    """The other has written some tokens one by one; what is made of it has them all as a prompt."""
    model = build("llama")
    ids, mask = prompts((50, 33))
    source, own = kvtailor.cache_for(model, "full"), kvtailor.cache_for(model, plan)
    keep_queries(source, own.plan)
    kvtailor.prefill(model, ids[:, :44], mask[:, :44], cache=source)
    for column in range(44, 50):
        kvtailor.prefill(model, ids[:, column : column + 1], mask[:, : column + 1], cache=source)
    kvtailor.prefill(model, ids, mask, cache=own)
    mine = kvtailor.cache_for(model, plan)
    remake(mine, source, mask)
    assert_same_state(mine, own, mask)
    token, longer = torch.tensor([[7], [9]]), torch.cat([mask, mask.new_ones(2, 1)], 1)
    asked = {"attention_mask": longer, "position_ids": (longer.cumsum(-1) - 1)[:, -1:]}
    expected = model(token, **hand_cache(own), **asked).logits
    assert error(model(token, **hand_cache(mine), **asked).logits, expected) < 1e-4


@torch.no_grad()
def test_a_quantised_cache_of_padded_rows_hands_its_tokens_on() -> None:
    model = build("llama")
    ids, mask = prompts((50, 33))
    source, own, mine = (kvtailor.cache_for(model, each) for each in ("vector(bits=8)", "full", "full"))
    for cache in (source, own):
        kvtailor.prefill(model, ids, mask, cache=cache)
    remake(mine, source, mask)
    for one, two in zip(mine.engine.states, own.engine.states, strict=True):
        keys, expected = (state.stored.tail.as_segment().keys.view(2, 2, 50, -1) for state in (one, two))
        assert error(keys[0], expected[0]) < 0.02 and error(keys[1, :, 17:], expected[1, :, 17:]) < 0.02


def test_what_cannot_be_shared() -> None:
    full = Plan.parse("full")
    assert not can_follow(Plan.parse("kvzip @ keep=0.5")) and can_follow(Plan.parse("h2o @ keep=0.5"))
    assert not can_remake(full, Plan.parse("h2o @ keep=0.5"))
    assert not can_remake(Plan.parse("snapkv @ keep=0.5"), Plan.parse("snapkv @ keep=0.25"))
    assert can_remake(Plan.parse("kivi4"), Plan.parse("snapkv @ keep=0.25"))


@pytest.mark.parametrize("draft", ["retrieval(chunk=4) @ tokens=20", "h2o(recent=4) @ tokens=20"])
def test_the_prompt_is_read_once_and_again_only_where_it_must_be(draft: str) -> None:
    model = build("llama")
    ids, _ = prompts((50,))
    lengths: list[int] = []
    forward = model.forward

    def counted(*args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.forward = counted
    kvtailor.generate(model, ids, draft_plan=draft, gamma=3, min_gain=None, refresh=10, max_new_tokens=25)
    again = [length for length in lengths if length >= 50]
    assert len(again) == (1 if "retrieval" in draft else 3)
