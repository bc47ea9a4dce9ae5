"""Models with learned sinks or capped logits: the null plan gives what their own cache and eager attention give."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers
from torch import Tensor

import kvtailor
from kvtailor.hf.attention import NAME
from kvtailor.hf.model.attending import own_layers
from kvtailor.hf.versions import hand_cache, read_cache
from tests.seam.methods.test_identity import MODES, generated
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, SOFTMAX_FAMILIES, MaskedReference, build, error, prompts

every_family = pytest.mark.parametrize("family", SOFTMAX_FAMILIES)
WITH_SINKS = tuple(family for family in SOFTMAX_FAMILIES if family != "gemma2")


@every_family
@torch.no_grad()
def test_without_the_cap_or_the_sinks_the_logits_are_others(family: str) -> None:
    """The yardstick can fail: a reference that leaves out what these tests are about is off by more than a tenth."""
    ids, mask = prompts((56,))
    expected = build(family)(ids).logits
    assert error(MaskedReference(family)(ids, mask, {}), expected) < ROUNDING
    wrong = MaskedReference(family)
    wrong.ignores = ("softcap", "s_aux")
    assert error(wrong(ids, mask, {}), expected) > 0.1


@pytest.mark.parametrize(("family", "mode"), crossed(SOFTMAX_FAMILIES, list(MODES), each=2))
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


@every_family
@torch.no_grad()
def test_the_uncompressed_cache_has_the_bytes_of_the_models_own(family: str) -> None:
    """The windows of MiMo-V2-Flash have twice the heads of the other layers, and its values another size than keys."""
    own, ours = build(family), build(family)
    ids, _ = prompts((40, 40))
    cache = kvtailor.cache_for(ours, "full")
    ours(ids, **hand_cache(cache))
    theirs = read_cache(own(ids, use_cache=True))
    assert cache.ledger().full == sum(side.nbytes for layer in theirs.layers for side in (layer.keys, layer.values))


@every_family
def test_a_row_of_a_batch_gets_what_it_gets_alone(family: str) -> None:
    model = build(family)
    lengths = (40, 27, 33)
    ids, mask = prompts(lengths)
    together = generated(model, kvtailor.cache_for(model, "full"), ids, mask)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = generated(model, kvtailor.cache_for(model, "full"), ids[one, -length:], mask[one, -length:])
        assert torch.equal(alone.sequences[0, length:], together.sequences[row, 40:])
        for now, then in zip(together.logits, alone.logits, strict=True):
            assert error(now[row], then[0]) < ROUNDING


@every_family
def test_a_second_turn_equals_one_shot(family: str) -> None:
    own, ours = build(family), build(family)
    ids, mask = prompts((30, 22))
    cache = kvtailor.cache_for(ours, "full")
    first = generated(ours, cache, ids, mask).sequences
    more = torch.cat([first, prompts((9, 9), state=5)[0]], 1)
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], 1)
    found, expected = generated(ours, cache, more, mask), generated(own, None, more, mask)
    assert torch.equal(found.sequences, expected.sequences)
    assert max(error(a, b) for a, b in zip(found.logits, expected.logits, strict=True)) < ROUNDING


@pytest.mark.parametrize(("family", "how"), crossed(SOFTMAX_FAMILIES, ["prompt_lookup", "assisted"], each=2))
def test_assisted_decoding_crops_exactly(family: str, how: str) -> None:
    own, ours = build(family), build(family)
    ids = prompts((12,))[0].repeat(1, 3)
    helper = {"prompt_lookup_num_tokens": 3} if how == "prompt_lookup" else {"assistant_model": build(family)}
    try:
        own.generate(ids, max_new_tokens=16, do_sample=False, **helper)
    except RuntimeError as broken:
        pytest.skip(f"transformers {transformers.__version__} itself cannot do this with its own cache: {broken}")
    expected = own.generate(ids, max_new_tokens=16, do_sample=False)
    cache = kvtailor.cache_for(ours, "full")
    found = ours.generate(ids, **hand_cache(cache), max_new_tokens=16, do_sample=False, **helper)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("family", "dtype"), crossed(SOFTMAX_FAMILIES, [torch.bfloat16, torch.float16]), ids=str)
@torch.inference_mode()
def test_sixteen_bits(family: str, dtype: torch.dtype) -> None:
    own, ours = build(family, dtype=dtype), build(family, dtype=dtype)
    ids, mask = prompts((33, 21))
    expected = own(ids, attention_mask=mask).logits[:, -1]
    found = ours(ids, attention_mask=mask, **hand_cache(kvtailor.cache_for(ours, "full"))).logits[:, -1]
    wide = build(family)(ids, attention_mask=mask).logits[:, -1]
    # Both are rounded: ours may be as far from the exact logits as theirs, and twice that.
    assert found.dtype == dtype
    assert error(found.float(), wide) < 2 * error(expected.float(), wide) + {torch.bfloat16: 2e-2}.get(dtype, 2e-3)


@every_family
@torch.no_grad()
def test_a_long_prompt_goes_through_blocks_of_its_windows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_layers, "_BLOCK", 32)
    monkeypatch.setattr(own_layers, "_FEW", 8)
    own, ours = build(family), build(family)
    ids, mask = prompts((170, 99, 131))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = own(ids, attention_mask=mask, position_ids=positions).logits
    cache = kvtailor.cache_for(ours, "full")
    found = ours(ids, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits
    real = mask[..., None]
    assert error(found * real, expected * real) < ROUNDING
    alone = ours(ids[:1], use_cache=False).logits
    assert error(alone, expected[:1]) < ROUNDING


@every_family
@torch.no_grad()
def test_other_caches_of_a_switched_model_are_read_as_its_own_attention_reads_them(family: str) -> None:
    own, ours = build(family), build(family)
    before = ours.config._attn_implementation
    cache = kvtailor.cache_for(ours, "full")
    assert ours.config._attn_implementation == NAME
    ids, mask = prompts((40, 27))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for options in ({"use_cache": False}, {"use_cache": True}):
        how = {"attention_mask": mask, "position_ids": positions, **options}
        expected, found = own(ids, **how).logits, ours(ids, **how).logits
        assert error(found * mask[..., None], expected * mask[..., None]) < ROUNDING
    stock = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(ids, **stock), own.generate(ids, **stock))
    fixed = {**stock, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(ids, **fixed), own.generate(ids, **stock))
    del cache
    gc.collect()
    assert ours.config._attn_implementation == before == "eager"
    assert torch.equal(ours(ids, attention_mask=mask).logits, own(ids, attention_mask=mask).logits)


@every_family
def test_gradients_of_a_switched_model_without_our_cache_are_its_own(family: str) -> None:
    """Of the sinks too, which the attention function gets as an argument."""
    own, ours = build(family), build(family)
    cache = kvtailor.cache_for(ours, "full")
    ids, _ = prompts((24,))

    def gradients(model) -> dict[str, Tensor]:
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    expected, found = gradients(own), gradients(ours)
    assert expected.keys() == found.keys() and cache.seen == 0
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)) < 1e-3, name


@pytest.mark.parametrize("family", WITH_SINKS)
@torch.no_grad()
def test_sinks_are_read_at_each_forward(family: str) -> None:
    """Weights may be changed between two forwards: what a cache knew of them is not what counts."""
    own, ours = build(family), build(family)
    cache = kvtailor.cache_for(ours, "full")
    ids, _ = prompts((40,))
    ours(ids[:, :30], **hand_cache(cache))
    own_cache = read_cache(own(ids[:, :30], use_cache=True))
    for model in (own, ours):
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter += 3.0
    expected = own(ids[:, 30:], **hand_cache(own_cache)).logits
    assert error(ours(ids[:, 30:], **hand_cache(cache)).logits, expected) < ROUNDING
