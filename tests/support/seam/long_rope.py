"""Tiny models with long rope, which have two sets of factors and drop whatever cache there is between them."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM

__all__ = ["BORDER", "FAMILIES", "LONG_ROPE", "long_rope_model"]

BORDER = 24
LONG_ROPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4 * BORDER,
    "original_max_position_embeddings": BORDER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": None,
}


FAMILIES = ["phi3", "phimoe", "phi4_multimodal"]


def long_rope_model(family: str):
    """A tiny model with long rope whose two sets of factors are far apart, and whose attention is not flat."""
    kinds = {
        "phi3": transformers.Phi3Config,
        "phimoe": transformers.PhimoeConfig,
        "phi4_multimodal": transformers.Phi4MultimodalConfig,
    }
    half = LONG_ROPE["hidden_size"] // LONG_ROPE["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + 3.0 * index for index in range(half)],
        "original_max_position_embeddings": BORDER,
        "factor": 4.0,
    }
    more = {}
    if family == "phimoe":
        rope |= {"short_mscale": 1.0, "long_mscale": 1.5}
        more = {"num_local_experts": 2, "num_experts_per_tok": 2}
    if family == "phi4_multimodal":
        small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        channels = dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 32)
        more = {
            "vision_config": {**small, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "crop_size": 28},
            "audio_config": {**small, "num_blocks": 1, **channels},
        }
    torch.manual_seed(2)
    config = kinds[family](**LONG_ROPE, **more, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model
