"""Where features meet: recordings and resets, windows and refusals, beams and turns, two models and one cache."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build, prompts

SNAP = "snapkv(window=6) @ tokens=16"
GREEDY = {"do_sample": False, "max_new_tokens": 8}
REPEATED = prompts((20,))[0].repeat(1, 3)


@pytest.mark.parametrize("how", ["generate", "session", "config"])
def test_generation_without_a_cache_over_a_cache_is_refused(how: str) -> None:
    """Each token would feed the whole text once more."""
    model, ids = build("llama"), prompts((40,))[0]
    with pytest.raises(CacheMisuse, match="use_cache=False.* feeds the whole text again"):
        if how == "session":
            with kvtailor.session(model, SNAP) as s:
                s.generate(ids, use_cache=False, **GREEDY)
        else:
            told = {"use_cache": False}
            given = told if how == "generate" else {"generation_config": GenerationConfig(**told, pad_token_id=0)}
            model.generate(ids, **hand_cache(kvtailor.cache_for(model, SNAP)), **given, **GREEDY)


@torch.no_grad()
def test_a_prefill_that_breaks_off_on_a_used_cache_leaves_no_empty_one() -> None:
    model, ids = build("llama"), prompts((40,))[0]
    cache = kvtailor.prefill(model, ids, plan=SNAP)
    calls = []

    def second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(second)
    with pytest.raises(KeyboardInterrupt):
        kvtailor.prefill(model, prompts((12,), state=5)[0], cache=cache, chunk=4)
    handle.remove()
    with pytest.raises(CacheMisuse, match=r"kvtailor.prefill added to this cache did not come to its end.*reset\(\)"):
        model(prompts((12,), state=5)[0], **hand_cache(cache))


def test_a_draft_that_was_not_judged_is_no_part_of_the_text() -> None:
    """An error between a forward and its crop."""
    model, calls = build("llama"), []

    def processor(ids, scores):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("a processor of the user's")
        return scores

    cache = kvtailor.cache_for(model, SNAP)
    with pytest.raises(RuntimeError, match="of the user's"):
        model.generate(
            REPEATED,
            **hand_cache(cache),
            prompt_lookup_num_tokens=4,
            logits_processor=LogitsProcessorList([processor]),
            **GREEDY,
        )
    more = torch.cat([REPEATED, prompts((10,), state=4)[0]], 1)
    for use in (lambda: model.generate(more, **hand_cache(cache), **GREEDY), lambda: cache.save("nowhere")):
        with pytest.raises(CacheMisuse, match="broken off before it had judged its last draft"):
            use()
    cache.reset()
    found = model.generate(more, **hand_cache(cache), **GREEDY)
    assert torch.equal(found, model.generate(more, **hand_cache(kvtailor.cache_for(model, SNAP)), **GREEDY))


def test_turn_two_after_beams_is_refused(tmp_path: Path) -> None:
    """The rows are running beams, and not the sequences that were returned."""
    model, ids = build("llama"), prompts((40,), state=3)[0]
    with kvtailor.session(model, "full") as s:
        out = s.generate(ids, num_beams=2, num_return_sequences=2, **GREEDY)
        more = torch.cat([out, prompts((5,), state=9)[0].expand(2, -1)], 1)
        s.last.save(tmp_path / "beams.safetensors")
        for cache in (s.last, kvtailor.load_cache(model, tmp_path / "beams.safetensors")):
            for generate in (s.generate, model.generate):
                with pytest.raises(CacheMisuse, match="beam search has left its beams"):
                    generate(more, **hand_cache(cache), **GREEDY)


def test_another_conversation_after_prompt_lookup_is_refused() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    out = model.generate(REPEATED, **hand_cache(cache), prompt_lookup_num_tokens=4, **GREEDY)
    # What was drafted and taken back is known no more.
    assert cache.conversation.columns == cache.seen == 67
    cache.check_ids(torch.cat([out, prompts((9,), state=2)[0]], 1))
    with pytest.raises(CacheMisuse, match="another conversation"):
        model.generate(prompts((90,), state=99)[0], **hand_cache(cache), **GREEDY)


def test_a_crop_keeps_what_is_known_of_the_conversation() -> None:
    model, ids = build("llama"), prompts((40,))[0]
    cache = kvtailor.prefill(model, ids, plan="full")
    cache.crop(-2)
    assert cache.conversation.columns == cache.seen == 38
    with pytest.raises(CacheMisuse, match="another conversation"):
        model.generate(prompts((60,), state=99)[0], **hand_cache(cache), **GREEDY)
    cache.check_ids(torch.cat([ids[:, :38], prompts((9,), state=2)[0]], 1))


def test_two_models_of_one_configuration_do_not_share_a_cache() -> None:
    one, two, ids = build("llama"), build("llama", state=1), prompts((40,))[0]
    two.config = one.config
    for module in two.modules():
        if hasattr(module, "config"):
            module.config = one.config
    cache = kvtailor.cache_for(one, SNAP)
    with pytest.raises(CacheMisuse, match="made for another model"):
        two.generate(ids, **hand_cache(cache), **GREEDY)
    # Nothing of it was taken.
    fresh = kvtailor.cache_for(one, SNAP)
    found = one.generate(ids, **hand_cache(cache), **GREEDY)
    assert torch.equal(found, one.generate(ids, **hand_cache(fresh), **GREEDY))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_recording_ends_with_its_loop_and_with_a_reset(family: str) -> None:
    model, ids = build(family), prompts((40,))[0]
    fresh = kvtailor.prefill(model, ids, plan=SNAP)
    cache = kvtailor.cache_for(model, SNAP)
    model.generate(REPEATED, **hand_cache(cache), prompt_lookup_num_tokens=4, **GREEDY)
    cache.reset()
    kvtailor.prefill(model, ids, cache=cache)
    assert torch.equal(cache.held(), fresh.held()) and cache.ledger().total == fresh.ledger().total
    again, plain = kvtailor.cache_for(model, SNAP), kvtailor.cache_for(model, SNAP)
    out = model.generate(REPEATED, **hand_cache(again), prompt_lookup_num_tokens=4, **GREEDY)
    model.generate(REPEATED, **hand_cache(plain), **GREEDY)
    more = torch.cat([out, prompts((100,), state=7)[0]], 1)
    texts = [model.generate(more, **hand_cache(each), **GREEDY) for each in (again, plain)]
    assert torch.equal(*texts)
    assert again.ledger().by_stage == plain.ledger().by_stage


@torch.no_grad()
def test_a_refusal_behind_a_window_changes_nothing() -> None:
    """gemma3's first layer has a window of its own, which takes new tokens before a mask can be refused."""
    model, (ids, mask) = build("gemma3"), prompts((40, 31))
    cache = kvtailor.cache_for(model, SNAP)
    model(ids, attention_mask=mask, **hand_cache(cache))
    same = copy.deepcopy(cache)
    token, more = prompts((1, 1), state=7)[0], torch.cat([mask, mask.new_ones(2, 1)], 1)
    with pytest.raises(CacheMisuse, match="tokens that were padding"):
        model(token, attention_mask=torch.ones_like(more), **hand_cache(cache))
    with pytest.raises(CacheMisuse, match="holds 2 rows"):
        model(token[:1], **hand_cache(cache))
    with pytest.raises(CacheMisuse, match="tokens that were padding"):
        kvtailor.prefill(model, token, torch.ones_like(more), cache=cache)
    assert cache.seen == 40
    found = model(token, attention_mask=more, **hand_cache(cache)).logits
    assert torch.equal(found, model(token, attention_mask=more, **hand_cache(same)).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_attention_that_was_not_ours_is_said_once_and_then_forgiven(family: str) -> None:
    model, ids = build(family), prompts((40,))[0]
    with kvtailor.session(model, SNAP) as s:
        cache = s.prefill(ids)
    same, whole = copy.deepcopy(cache), torch.cat([ids, prompts((5,), state=2)[0]], 1)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(CacheMisuse, match="its attention never used it"):
        model.generate(whole, **hand_cache(cache), **GREEDY)
    model.set_attn_implementation("kvtailor")
    found = model.generate(whole, **hand_cache(cache), **GREEDY)
    assert torch.equal(found, model.generate(whole, **hand_cache(same), **GREEDY))


@torch.no_grad()
def test_dropout_is_refused_and_nothing_is_lost() -> None:
    model, ids = build("gpt2"), prompts((40,))[0]
    cache = kvtailor.cache_for(model, "full")
    model.train()
    with pytest.raises(CacheMisuse, match="call model.eval"):
        model(ids, **hand_cache(cache))
    model.eval()
    fresh = kvtailor.cache_for(model, "full")
    assert torch.equal(model(ids, **hand_cache(cache)).logits, model(ids, **hand_cache(fresh)).logits)


def test_the_rows_without_padding_of_a_padded_batch_go_on() -> None:
    model, (ids, mask) = build("llama"), prompts((40, 31))
    cache = kvtailor.prefill(model, ids, mask, plan=SNAP)
    cache.batch_select_indices(torch.tensor([0]))
    whole = torch.cat([ids[:1], prompts((5,), state=2)[0]], 1)
    alone = kvtailor.prefill(model, ids[:1], plan=SNAP)
    found = model.generate(whole, **hand_cache(cache), **GREEDY)
    assert torch.equal(found, model.generate(whole, **hand_cache(alone), **GREEDY))


def test_a_session_takes_a_positional_generation_config() -> None:
    model, (ids, mask) = build("llama"), prompts((40, 31))
    config = GenerationConfig(num_beams=2, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with kvtailor.session(model, SNAP) as s:
        found = s.generate(ids, config, attention_mask=mask)
        assert torch.equal(found, s.generate(ids, generation_config=config, attention_mask=mask))
