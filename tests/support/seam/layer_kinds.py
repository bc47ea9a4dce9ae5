"""Tiny models whose layers are not all alike: states beside keys, shared keys, sizes by layer, chunks."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from transformers import AutoConfig

_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LINEAR = ["linear_attention", "full_attention"] * 2
_WINDOWED = ["sliding_attention", "full_attention"] * 3
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": _LINEAR,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
# All experts at once: rounding would otherwise choose others here and there.
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "layer_types": _WINDOWED,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
}


def _of(model_type: str, layers: int, **given: Any) -> transformers.PreTrainedConfig:
    return AutoConfig.for_model(model_type, **_SHAPE, num_hidden_layers=layers, **given)


@cache
def hybrid_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families with layers that keep states."""
    return {
        "qwen3_next": _of("qwen3_next", 4, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=32),
        "falcon_h1": _of("falcon_h1", 3, **_MAMBA2, head_dim=16, mamba_d_ssm=128),
        "lfm2": _of("lfm2", 4, layer_types=["conv", "full_attention"] * 2),
        "jamba": _of(
            "jamba",
            4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        "qwen3_5": _of("qwen3_5_text", 4, **_DELTA),
        "olmo_hybrid": _of("olmo_hybrid", 4, **{**_DELTA, "linear_num_key_heads": 4}),
        # The last layer keeps a state alone.
        "bamba": _of("bamba", 5, **_MAMBA2, attn_layer_indices=[1, 3]),
        "granitemoehybrid": _of(
            "granitemoehybrid",
            4,
            **_MAMBA2,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=2,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
        ),
        "nemotron_h": _of(
            "nemotron_h",
            5,
            hybrid_override_pattern="M*-*M",
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=1,
        ),
        "zamba": _of(
            "zamba",
            4,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            mamba_dt_rank=8,
            n_mamba_heads=2,
            use_mamba_kernels=False,
        ),
        "zamba2": _of(
            "zamba2",
            4,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            n_mamba_heads=8,
            mamba_headdim=16,
            mamba_ngroups=1,
            num_mem_blocks=1,
        ),
        "minimax": _of(
            "minimax", 4, head_dim=16, layer_types=_LINEAR, num_local_experts=2, num_experts_per_tok=2, block_size=16
        ),
    }


@cache
def mixed_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families with chunks, with sizes of their own in some layers, or with layers that read what others keep."""
    return {
        "gemma4_shared": _of("gemma4_text", 6, **_GEMMA4, num_kv_shared_layers=4),
        "gemma3n": _of(
            "gemma3n_text",
            6,
            head_dim=16,
            sliding_window=16,
            layer_types=_WINDOWED,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=131,
            num_kv_shared_layers=2,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * 6,
        ),
        # Its full layers have one kv head of 32, whose values are its keys; the others two of 16.
        "gemma4": _of(
            "gemma4_text", 6, **_GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, num_kv_shared_layers=0
        ),
        "llama4": _of(
            "llama4_text",
            4,
            head_dim=16,
            attention_chunk_size=16,
            intermediate_size_mlp=96,
            num_local_experts=2,
            no_rope_layers=[1, 0, 1, 0],
            moe_layers=[],
        ),
        "laguna": _of(
            "laguna",
            2,
            head_dim=16,
            num_attention_heads_per_layer=[2, 4],
            mlp_layer_types=["dense", "dense"],
            **_EXPERTS,
        ),
    }


HYBRIDS = tuple(hybrid_configs())
MIXED = tuple(mixed_configs())
# In the default run; `make test-all` has all of them.
FEW = ("qwen3_next", "falcon_h1", "lfm2", "gemma4_shared", "llama4")
