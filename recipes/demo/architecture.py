"""The two embedded models, as fields of transformers' configurations."""

from __future__ import annotations

from typing import Any

__all__ = ["ARCHITECTURES"]

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "demo": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 100_000.0,
        **TOKENS,
    },
    "demo-draft": {
        "model_type": "gpt_neox",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "rope_theta": 100_000.0,
        "partial_rotary_factor": 0.5,
        **TOKENS,
    },
}
