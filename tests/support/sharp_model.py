"""A small model whose attention prefers some keys, with heads as wide as the kernels that choose tokens want them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["sharp_model"]


def sharp_model(dtype: torch.dtype = torch.float32, vocabulary: int = 128) -> LlamaForCausalLM:
    """Heads of 32 channels, which fill vectors in every variant, and queries that prefer some keys."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=vocabulary,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 40
    return model.to(dtype)
