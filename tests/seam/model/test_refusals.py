"""What cannot be supported is refused in a sentence, before anything is changed."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.mask import lazy_mask
from kvtailor.hf.model.geometry import refusal
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build

SNAP = "snapkv(window=6) @ tokens=16"
_TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def refused(
    config: transformers.PreTrainedConfig, make=AutoModelForCausalLM.from_config, ids: torch.Tensor | None = None
) -> str:
    """The sentence; the model is as it was, and with `ids` (b, n) its own generation gives the same bits as before."""
    torch.manual_seed(0)
    model = make(config).eval()
    before = model.config.get_text_config(decoder=True)._attn_implementation

    def generated() -> torch.Tensor | None:
        if ids is None:
            return None
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model.generate(ids, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)

    own = generated()
    with pytest.raises(UnsupportedModel) as caught:
        kvtailor.cache_for(model, SNAP)
    assert model.config.get_text_config(decoder=True)._attn_implementation == before, "refused, yet changed"
    if own is not None:
        assert all(torch.equal(a, b) for a, b in zip(own.logits, generated().logits, strict=True))
    message = str(caught.value)
    assert "\n" not in message
    return message


def dots3_note() -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(
        "dots3_note_text",
        **{**_TINY, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        pad_token_id=0,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=16,
    )


def blt() -> transformers.PreTrainedConfig:
    part = {**_TINY, "num_key_value_heads": 2}
    return transformers.BltConfig(
        vocab_size=64,
        patch_in_forward=False,
        encoder_hash_byte_group_size=[2],
        encoder_hash_byte_group_vocab=50,
        encoder_hash_byte_group_nb_functions=1,
        patcher_config=part,
        encoder_config={**part, "hidden_size_global": 32},
        decoder_config={**part, "hidden_size_global": 32},
        global_config=part,
    )


REFUSED = {
    "dots3_note": (dots3_note, "lets an indexer choose the tokens that each query sees"),
    "mllama": (
        lambda: transformers.AutoConfig.for_model(
            "mllama_text_model", **_TINY, num_key_value_heads=1, cross_attention_layers=[1], pad_token_id=0
        ),
        r"cross-attention layers \(1\)",
    ),
    "doge": (
        lambda: transformers.DogeConfig(**_TINY, num_key_value_heads=1),
        "makes an attention mask of its own from the values",
    ),
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
        r"BloomForCausalLM computes its attention itself \(BloomAttention\) and does not ask transformers' Attention",
    ),
    "bert": (lambda: transformers.BertConfig(**_TINY), "configured as an encoder.*set is_decoder=True"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_would_crash_or_break_are_refused_and_generate_as_before(family: str) -> None:
    make, sentence = REFUSED[family]
    if family == "dots3_note" and "dots3_note_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of transformers does not have it")
    # transformers' own mapping has the type of the whole Mllama only.
    new = transformers.MllamaForCausalLM._from_config if family == "mllama" else AutoModelForCausalLM.from_config
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    assert re.search(sentence, refused(make(), new, ids))


def test_a_model_of_several_transformers_is_not_called_recurrent_alone() -> None:
    assert "made of several transformers" in refused(blt())


def test_what_reads_another_models_keys_or_decodes_blocks_is_refused_by_its_configuration() -> None:
    """Of the Gemma 4 family these; the others work, see `tests/seam/kinds`."""
    assistant = transformers.AutoConfig.for_model("gemma4_unified_assistant")
    # In transformers 5.17 its configuration does not show the layers that it has.
    known = hasattr(assistant.get_text_config(decoder=True), "num_hidden_layers")
    sentence = "read those of the model for which it drafts" if known else "does not say in its configuration how many"
    assert sentence in str(refusal(assistant))
    assert "denoises whole blocks" in str(refusal(transformers.AutoConfig.for_model("diffusion_gemma")))
    assert refusal(transformers.AutoConfig.for_model("gemma4")) is None


def test_an_encoder_that_is_configured_as_a_decoder_is_supported() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.BertConfig(**_TINY, is_decoder=True)).eval()
    ids = torch.randint(3, 64, (1, 12))
    with torch.no_grad():
        own, ours = model(ids).logits, model(ids, **hand_cache(kvtailor.cache_for(model, "full"))).logits
    assert torch.allclose(own, ours, atol=1e-5)


def test_a_mask_that_a_model_computes_with_says_so() -> None:
    """A family that we do not know of: no attribute error without a reason."""
    mask = lazy_mask(1, 4, 4)
    assert not hasattr(mask, "dtype")
    with pytest.raises(AttributeError, match="reads 'dtype' of its attention mask"):
        _ = mask.dtype


def test_models_that_cannot_be_supported_are_refused_in_a_sentence() -> None:
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2)
    assert "encoder-decoder" in refused(t5, transformers.AutoModelForSeq2SeqLM.from_config)
    mamba = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    assert "recurrent" in refused(mamba)


def test_a_second_attention_implementation_is_refused() -> None:
    model = build("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModel, match="flex_attention"):
        kvtailor.cache_for(model, SNAP)


def test_a_prompt_that_transformers_own_forms_read_differently_is_refused() -> None:
    """PaliGemma without `token_type_ids`: sdpa reads the prompt in both directions, eager does not."""
    text = {**_TINY, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        projection_dim=32,
        image_token_index=60,
    )
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    ids = torch.randint(3, 50, (1, 12))
    cache = kvtailor.cache_for(model, "full")
    with torch.no_grad():
        with pytest.raises(CacheMisuse, match="pass token_type_ids"):
            model(ids, **hand_cache(cache))
        prefix = torch.zeros_like(ids)
        ours = model(ids, **hand_cache(cache), token_type_ids=prefix).logits
        assert torch.allclose(ours, model(ids, token_type_ids=prefix).logits, atol=1e-5)


def test_a_mask_that_adds_numbers_to_logits_is_refused() -> None:
    """A bias in a 4-D mask would be dropped without a word."""
    model, ids = build("llama"), torch.randint(3, 64, (1, 6))
    hidden = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        own = model(ids, attention_mask=hidden).logits
        ours = model(ids, attention_mask=hidden, **hand_cache(kvtailor.cache_for(model, "full"))).logits
        assert torch.allclose(own, ours, atol=1e-5)
        with pytest.raises(CacheMisuse, match="adds other numbers to logits"):
            model(ids, attention_mask=hidden - 0.5, **hand_cache(kvtailor.cache_for(model, "full")))
