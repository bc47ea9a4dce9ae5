"""A session whose model runs on its own cache says so at its end: the plan did nothing there."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build, prompts

SNAP = "snapkv(window=6) @ tokens=16"
GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_plain_generate_inside_is_said(family: str) -> None:
    model = build(family)
    ids, _ = prompts((40,))
    with (
        pytest.warns(UserWarning, match="3 forwards .* own cache.*s.generate") as caught,
        kvtailor.session(model, SNAP),
    ):
        model.generate(ids, **GREEDY)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("plan", ["full", SNAP])
def test_all_else_is_silent(family: str, plan: str) -> None:
    """The session's caches, other models, forwards without a cache, an empty block; under `full` nothing is missed."""
    model, other = build(family), build(family)
    kvtailor.cache_for(other, "full")
    ids, mask = prompts((40, 31))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kvtailor.session(model, plan) as s:
            s.generate(ids, attention_mask=mask, **GREEDY)
            s.score(ids[:1, :30], ids[:1, 30:])
            model.generate(ids, attention_mask=mask, **hand_cache(s.cache()), **GREEDY)
            other.generate(ids, attention_mask=mask, **GREEDY)
            with torch.no_grad():
                model(ids, attention_mask=mask, use_cache=False)
            if plan == "full":
                model.generate(ids, attention_mask=mask, **GREEDY)
        with kvtailor.session(model, plan):
            pass
        model.generate(ids, attention_mask=mask, **GREEDY)


def test_a_few_plain_forwards_among_others_are_counted_alone() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    with pytest.warns(UserWarning, match="^3 forwards"), kvtailor.session(model, SNAP) as s:
        s.generate(ids, **GREEDY)
        model.generate(ids, **GREEDY)
        s.generate(ids, **GREEDY)


def test_an_error_inside_is_not_drowned() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="mine"), kvtailor.session(model, SNAP):
            model.generate(ids, **GREEDY)
            raise KeyError("mine")
    assert model.config._attn_implementation == "sdpa"


def test_sessions_of_two_models_count_their_own() -> None:
    one, two = build("llama"), build("llama", state=3)
    ids, _ = prompts((40,))
    with (
        pytest.warns(UserWarning, match="^3 forwards") as caught,
        kvtailor.session(one, SNAP),
        kvtailor.session(two, SNAP),
    ):
        one.generate(ids, **GREEDY)
    assert len(caught) == 1
