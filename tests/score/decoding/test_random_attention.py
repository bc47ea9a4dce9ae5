"""Random Attention: the prompt stays, and what was decoded is drawn anew each time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.held_rows import held_of, make_row
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.score.decoding.random_attention import RandomAttention
from kvtailor.types import Held, Needs


def held(tokens: int, prompt: int, heads: int = 4) -> Held:
    row = make_row(tokens, heads=heads, group=1, size=2, generator=torch.Generator().manual_seed(0))
    return dataclasses.replace(held_of([row], Needs()), prompt=prompt)


def test_the_prompt_lies_above_all_others_and_the_rest_is_uniform() -> None:
    scores = RandomAttention().score(held(8000, 63))
    assert scores[..., :63].min() >= 1 and scores[..., 63:].max() < 1 and scores[..., 63:].min() >= 0
    counts = torch.histc(scores[..., 63:], bins=20, min=0, max=1)
    assert ((counts - counts.mean()).abs() < 150).all()
    assert RandomAttention(prompt=False).score(held(80, 63)).max() < 1


def test_each_eviction_and_each_head_draws_apart() -> None:
    lanes = torch.cat([RandomAttention(prompt=False).score(held(n, 0))[0, :, :4000] for n in (4000, 4001, 4064)])
    agreement = torch.corrcoef(lanes) - torch.eye(lanes.shape[0])
    assert agreement.abs().max() < 0.08


def test_old_tokens_die_out_at_the_rate_of_the_paper() -> None:
    """Of K tokens and r new ones K stay: after m evictions a token is there with a chance of (K / (K + r))^m."""
    keep, new, times = 600, 200, 6
    here, seen = torch.arange(keep), keep
    for _ in range(times):
        seen += new
        whole = held(seen, 0, heads=1)
        here = torch.cat([here, torch.arange(seen - new, seen)])
        scores = RandomAttention(prompt=False, recent=0).score(whole)[0, 0][here]
        here = here[scores.topk(keep).indices.sort().values]
    left = int((here < keep).sum())
    assert abs(left - keep * (keep / (keep + new)) ** times) < 40, left
    assert not torch.equal(here[:5], torch.arange(5))


@torch.no_grad()
def test_in_a_model_the_prompt_stays_in_every_row_and_a_later_turn_does_not() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "random_attention(recent=4) @ tokens=48, slack=5")
    ids, mask = prompts((40, 23))
    model(ids, attention_mask=mask, **hand_cache(cache))
    assert {state.clock.prompt for state in cache.engine.states} == {40}

    def go_on(tokens: int) -> None:
        nonlocal mask
        mask = torch.cat([mask, mask.new_ones(2, tokens)], 1)
        model(torch.full((2, tokens), 7), attention_mask=mask, **hand_cache(cache))

    for _ in range(30):
        go_on(1)
    for columns in held_columns(cache).values():
        asked = columns[..., :40] if columns.shape[-1] >= 40 else columns
        assert torch.equal(asked, mask.bool()[:, None, :40].expand_as(asked))
        # Of what was decoded, some is gone, and each head has its own.
        decoded = columns[..., 40:]
        assert not bool(decoded[0].all()) and not torch.equal(decoded[0, 0], decoded[0, 1])
    go_on(6)
    assert {state.clock.prompt for state in cache.engine.states} == {40}
    with pytest.raises(ValueError, match="recent must be 0 or more"):
        RandomAttention(recent=-1)


@torch.no_grad()
def test_chunks_and_what_is_taken_back_leave_the_same_prompt() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    for chunk in (14, 40):
        cache = kvtailor.cache_for(model, "random_attention(recent=4) @ tokens=48")
        for first in range(0, 40, chunk):
            model(ids[:, first : first + chunk], **hand_cache(cache))
        assert {state.clock.prompt for state in cache.engine.states} == {40}
        cache.activate_past_recording()
        model(ids[:, :4], **hand_cache(cache))
        cache.crop(-4)
        assert {(state.clock.prompt, state.stored.seen) for state in cache.engine.states} == {(40, 40)}
