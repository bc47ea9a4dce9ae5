"""Long rope: beyond so many tokens keys are turned otherwise, and the cache reads the text anew as the model would."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.model.rope_border import RopeBorder
from kvtailor.hf.versions import hand_cache
from tests.support.seam.long_rope import BORDER, FAMILIES, LONG_ROPE, long_rope_model
from tests.support.seam.zoo import prompts

SNAP = "snapkv(window=6) @ tokens=16"


def without_cache(model, ids: Tensor, mask: Tensor | None = None, **how) -> Tensor:
    """The model's own text, each token of it from all that stands before; Phi-4 with its own cache loses the text."""
    return model.generate(ids, attention_mask=mask, use_cache=False, do_sample=False, **how)


def mixed_keys(model, ids: Tensor, count: int) -> Tensor:
    """The text where nothing is read anew at the border."""
    cache = transformers.DynamicCache(config=model.config)
    text, new = ids, ids
    with torch.no_grad():
        for _ in range(count):
            new = model(new, **hand_cache(cache)).logits[:, -1:].argmax(-1)
            text = torch.cat([text, new], 1)
    return text


@pytest.mark.parametrize("family", FAMILIES)
class TestLongRope:
    """Beyond so many tokens these models turn keys otherwise, and transformers drops whatever cache there is."""

    def test_the_border_is_asked_of_the_model(self, family: str) -> None:
        border = kvtailor.cache_for(long_rope_model(family), "full").guard.border
        assert border == RopeBorder(tokens=BORDER, turns=True)

    @pytest.mark.parametrize("length", [BORDER - 8, BORDER - 1, BORDER, BORDER + 1, BORDER + 30])
    def test_before_across_and_beyond_the_border_is_the_models_own_text(self, family: str, length: int) -> None:
        model = long_rope_model(family)
        ids, _ = prompts((length,))
        how = {"max_new_tokens": 14, "do_sample": False}
        expected = without_cache(model, ids, max_new_tokens=14)
        cache = kvtailor.cache_for(model, "full")
        assert torch.equal(model.generate(ids, **hand_cache(cache), **how), expected)
        assert cache.seen == length + 13
        ours = kvtailor.generate(model, ids, plan="full", max_new_tokens=14)
        assert torch.equal(ours.sequences, expected) and ours.cache.seen == length + 13
        with kvtailor.session(model, "full") as s:
            assert torch.equal(s.generate(ids, **how), expected)
            assert s.last.seen == length + 13
        if length <= BORDER:
            assert not torch.equal(mixed_keys(model, ids, 14), expected)

    def test_beyond_it_a_plan_compresses_the_text_as_a_prompt(self, family: str) -> None:
        model = long_rope_model(family)
        ids, _ = prompts((BORDER - 3,))
        how = {"max_new_tokens": 12, "do_sample": False}
        cache = kvtailor.cache_for(model, SNAP)
        found = model.generate(ids, **hand_cache(cache), **how)
        anew = kvtailor.cache_for(model, SNAP)
        again = model.generate(found[:, : BORDER + 1], **hand_cache(anew), max_new_tokens=8, do_sample=False)
        assert torch.equal(found, again)
        assert cache.seen == anew.seen == BORDER + 8 and torch.equal(cache.held(), anew.held())
        assert cache.held().max() < cache.seen
        assert cache.ledger().total == cache.ledger().closed_form
        assert torch.equal(kvtailor.generate(model, ids, plan=SNAP, max_new_tokens=12).sequences, found)

    def test_padded_rows_and_beams_cross_it(self, family: str) -> None:
        model = long_rope_model(family)
        ids, mask = prompts((BORDER - 4, BORDER - 9))
        expected = without_cache(model, ids, mask, max_new_tokens=12)
        cache = kvtailor.cache_for(model, "full")
        how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(model.generate(ids, **hand_cache(cache), **how), expected)
        assert torch.equal(kvtailor.generate(model, ids, mask, plan="full", max_new_tokens=12).sequences, expected)
        beams = without_cache(model, ids, mask, max_new_tokens=12, num_beams=3)
        wide = kvtailor.cache_for(model, "full")
        assert torch.equal(model.generate(ids, **hand_cache(wide), **how, num_beams=3), beams)
        with kvtailor.session(model, "full") as s:
            assert torch.equal(s.generate(ids, **how, num_beams=3), beams)

    @pytest.mark.parametrize("length", [BORDER - 12, BORDER - 6, BORDER + 3])
    def test_a_second_turn_crosses_it_or_goes_on_beyond(self, family: str, length: int) -> None:
        model = long_rope_model(family)
        how = {"max_new_tokens": 4, "do_sample": False}
        cache = kvtailor.cache_for(model, "full")
        first = model.generate(prompts((length,))[0], **hand_cache(cache), **how)
        whole = torch.cat([first, prompts((9,), state=8)[0]], 1)
        second = model.generate(whole, **hand_cache(cache), **how)
        assert torch.equal(second, without_cache(model, whole, max_new_tokens=4))
        with pytest.raises(CacheMisuse, match="another conversation"):
            changed = second.clone()
            changed[:, BORDER] = 7 + changed[:, BORDER] % 50
            model.generate(torch.cat([changed, changed], 1), **hand_cache(cache), **how)

    @pytest.mark.parametrize("length", [BORDER, BORDER - 5])
    def test_what_cannot_be_read_anew_is_refused_before_any_forward(self, family: str, length: int) -> None:
        model = long_rope_model(family)
        ids, _ = prompts((length,))
        long_ids, _ = prompts((BORDER + 10,))
        how = {"max_new_tokens": 12, "do_sample": False}
        embedded = model.get_input_embeddings()(ids).detach()
        forwards = []
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        with kvtailor.session(model, "full") as s:
            for call in (
                lambda: s.score(ids, prompts((12,))[0]),
                lambda: kvtailor.generate(model, ids, draft_plan=SNAP, max_new_tokens=12),
                lambda: kvtailor.generate(model, ids, plan="kvzip @ tokens=16", max_new_tokens=12),
                lambda: kvtailor.generate(model, long_ids, plan=SNAP, chunk=10, max_new_tokens=2),
                lambda: kvtailor.prefill(model, long_ids, plan=SNAP, chunk=10),
                lambda: kvtailor.prefill(model, ids, plan="kvzip @ tokens=16"),
                lambda: model.generate(ids, **hand_cache(s.cache()), prompt_lookup_num_tokens=2, **how),
                lambda: model.generate(inputs_embeds=embedded, **hand_cache(s.cache()), **how),
            ):
                with pytest.raises(CacheMisuse, match=f"beyond {BORDER} tokens"):
                    call()
        assert not forwards

    def test_a_forward_that_crosses_it_is_refused_and_nothing_has_changed(self, family: str) -> None:
        model = long_rope_model(family)
        cache = kvtailor.prefill(model, prompts((BORDER - 2,))[0], plan="full")
        with torch.no_grad(), pytest.raises(CacheMisuse, match=f"beyond {BORDER} tokens"):
            model(prompts((5,))[0], **hand_cache(cache))
        assert cache.seen == BORDER - 2
        for new, count in ((5, 2), (1, 6)):
            mask = torch.ones((1, BORDER - 2 + new), dtype=torch.int64)
            with pytest.raises(CacheMisuse, match=f"new tokens alone.* Stay within {BORDER} tokens"):
                model.generate(prompts((new,))[0], attention_mask=mask, **hand_cache(cache), max_new_tokens=count)
        assert cache.seen == BORDER - 2
        with torch.no_grad():
            model(prompts((2,))[0], **hand_cache(cache))
        assert cache.seen == BORDER


def test_a_cache_that_is_dropped_though_its_keys_stay_what_they_are_is_kept() -> None:
    """Phi-3 has a border without long rope, too, and transformers reads everything anew for nothing."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(transformers.Phi3Config(**LONG_ROPE)).eval()
    cache = kvtailor.cache_for(model, "full")
    assert cache.guard.border == RopeBorder(tokens=BORDER, turns=False)
    ids, _ = prompts((BORDER - 3,))
    read = []
    model.register_forward_pre_hook(lambda _, args, more: read.append(more["input_ids"].shape[1]), with_kwargs=True)
    found = model.generate(ids, **hand_cache(cache), max_new_tokens=9, do_sample=False)
    assert read == [BORDER - 3] + [1] * 8 and cache.seen == BORDER + 5
    assert torch.equal(found, without_cache(model, ids, max_new_tokens=9))
