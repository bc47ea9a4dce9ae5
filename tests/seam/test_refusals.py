"""What cannot be supported is refused in a sentence, before anything is changed."""

from __future__ import annotations

import pytest
import transformers
from transformers import AutoModelForCausalLM

import kvtailor
from kvtailor.errors import UnsupportedModel
from tests.seam.zoo import build

SNAP = "snapkv(window=6) @ tokens=16"
_TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def refused(config: transformers.PreTrainedConfig, auto=AutoModelForCausalLM) -> str:
    model = auto.from_config(config)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    with pytest.raises(UnsupportedModel) as caught:
        kvtailor.cache_for(model, SNAP)
    assert model.config.get_text_config(decoder=True)._attn_implementation == before, "refused, yet changed"
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_models_that_cannot_be_supported_are_refused_in_a_sentence() -> None:
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2)
    assert "encoder-decoder" in refused(t5, transformers.AutoModelForSeq2SeqLM)
    mamba = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    assert "recurrent" in refused(mamba)
    mla = transformers.DeepseekV2Config(
        **_TINY, kv_lora_rank=8, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        n_routed_experts=2, num_experts_per_tok=1, first_k_dense_replace=2, num_key_value_heads=2,
    )  # fmt: skip
    assert "MLA" in refused(mla)
    assert "softcap" in refused(transformers.Gemma2Config(**_TINY, head_dim=16, num_key_value_heads=1))


def test_a_second_attention_implementation_is_refused() -> None:
    model = build("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModel, match="flex_attention"):
        kvtailor.cache_for(model, SNAP)
