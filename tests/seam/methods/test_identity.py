"""The null plan is the identity: the same tokens and logits as the model's own cache, for every family and mode."""

from __future__ import annotations

import pytest
import torch
import transformers

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.support.crossed import crossed
from tests.support.seam.zoo import FAMILIES, ROUNDING, build, error, prompts

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beam": {"num_beams": 3},
    "several_sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 16},
}


def generated(model, cache, ids, mask, **options):
    torch.manual_seed(7)
    return model.generate(
        ids,
        attention_mask=mask,
        **hand_cache(cache),
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_logits=True,
        **{"do_sample": False, **options},
    )


@pytest.mark.filterwarnings("ignore:all . layers of this")
@pytest.mark.parametrize(("family", "mode"), crossed(FAMILIES, list(MODES), each=2))
def test_full_equals_the_models_own_cache(family: str, mode: str) -> None:
    own, ours = build(family), build(family)
    ids, mask = prompts((40, 27, 33))
    expected = generated(own, None, ids, mask, **MODES[mode])
    cache = kvtailor.cache_for(ours, "full")
    found = generated(ours, cache, ids, mask, **MODES[mode])
    assert torch.equal(found.sequences, expected.sequences)
    for now, then in zip(found.logits, expected.logits, strict=True):
        assert error(now, then) < ROUNDING
    assert cache.seen == ids.shape[1] + 11


@pytest.mark.filterwarnings("ignore:all . layers of this")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_through_plain_generate(family: str) -> None:
    own, ours = build(family), build(family)
    ids, mask = prompts((30, 22))
    cache = kvtailor.cache_for(ours, "full")
    first = generated(ours, cache, ids, mask).sequences
    more = torch.cat([first, prompts((9, 9), state=5)[0]], 1)
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], 1)
    found = generated(ours, cache, more, mask)
    expected = generated(own, None, more, mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert max(error(a, b) for a, b in zip(found.logits, expected.logits, strict=True)) < ROUNDING


@pytest.mark.filterwarnings("ignore:all . layers of this")
@pytest.mark.parametrize(("family", "how"), crossed(FAMILIES, ["prompt_lookup", "assisted"]))
def test_assisted_decoding_crops_exactly(family: str, how: str) -> None:
    own, ours = build(family), build(family)
    ids = prompts((12,))[0].repeat(1, 3)
    helper = {"prompt_lookup_num_tokens": 3} if how == "prompt_lookup" else {"assistant_model": build(family, state=0)}
    try:
        own.generate(ids, max_new_tokens=16, do_sample=False, **helper)
    except RuntimeError as broken:
        pytest.skip(f"transformers {transformers.__version__} itself cannot do this with its own cache: {broken}")
    expected = own.generate(ids, max_new_tokens=16, do_sample=False)
    cache = kvtailor.cache_for(ours, "full")
    found = ours.generate(ids, **hand_cache(cache), max_new_tokens=16, do_sample=False, **helper)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("family", "dtype"), crossed(["llama", "gpt_neox", "gemma3"], [torch.float32, torch.bfloat16, torch.float16])
)
def test_every_dtype(family: str, dtype: torch.dtype) -> None:
    own, ours = build(family, dtype=dtype), build(family, dtype=dtype)
    ids, mask = prompts((33, 21))
    cache = kvtailor.cache_for(ours, "full")
    with torch.inference_mode():
        expected = own(ids, attention_mask=mask).logits[:, -1]
        found = ours(ids, attention_mask=mask, **hand_cache(cache)).logits[:, -1]
    assert found.dtype == dtype
    assert (
        error(found.float(), expected.float()) < {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    )


@torch.no_grad()
def test_prefill_in_inference_mode_then_decoding_outside() -> None:
    own, ours = build("llama"), build("llama")
    ids, _ = prompts((33,))
    cache = kvtailor.cache_for(ours, "full")
    with torch.inference_mode():
        ours(ids[:, :-2], **hand_cache(cache))
    ours(ids[:, -2:-1], **hand_cache(cache))
    found = ours(ids[:, -1:], **hand_cache(cache)).logits
    assert error(found[:, -1], own(ids).logits[:, -1]) < ROUNDING


@torch.no_grad()
def test_a_users_own_4d_mask() -> None:
    own, ours = build("llama"), build("llama")
    ids, _ = prompts((20, 20))
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    allowed[10:, 3:6] = False
    mask = allowed[None, None].expand(2, 1, 20, 20)
    found = ours(ids, attention_mask=mask, **hand_cache(kvtailor.cache_for(ours, "full"))).logits
    assert error(found, own(ids, attention_mask=mask).logits) < ROUNDING


@torch.no_grad()
def test_without_a_cache_the_attention_is_transformers_own() -> None:
    own, ours = build("llama"), build("llama")
    kvtailor.cache_for(ours, "full")
    ids, mask = prompts((20, 14))
    found = ours(ids, attention_mask=mask, use_cache=False).logits
    expected = own(ids, attention_mask=mask, use_cache=False).logits
    assert torch.equal(found[0], expected[0])
    stock = ours.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(stock, own.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False))
