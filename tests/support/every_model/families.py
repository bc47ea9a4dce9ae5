"""What the rules of `shrink.py` cannot know of a family: attributes by the type of the configuration.

`default` has arguments without which the family's own default configuration cannot be made.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CHANGES"]

# 64 channels, twice expanded, are 8 heads of 16.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"] * 3
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": _LOCAL_AND_GLOBAL,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 2,
    "rope_parameters": None,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_SHORTER_SECTIONS = {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_VOCABULARY_MAP = {"<image>": 100, "<|extra_200|>": 101, "IMGIMGA": 102, "IMGIMGB": 103}
_QWEN_OMNI = {"vision_start_token_id": 120, "vision_end_token_id": 121, "audio_start_token_id": 122}

CHANGES: dict[str, dict[str, Any]] = {
    # A window on every layer would leave nothing to compress; most published weights have none.
    "mistral": {"sliding_window": None},
    # A scale of 1 on products of 16 channels makes a softmax that rounding alone moves.
    "granite_swa": {"attention_multiplier": 0.25},
    "granitemoe_swa": {"attention_multiplier": 0.25},
    "granite": {"attention_multiplier": 0.25},
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA,
        "attention_multiplier": 0.25,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    # One stack is applied eight times for each of its layers, which multiplies rounding.
    # Its linear attention multiplies rounding from layer to layer.
    "minimax": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_hidden_layers": 1},
    # One layer before the loop, two in it, one behind; twice as many in what is written to a configuration's file.
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": _LOCAL_AND_GLOBAL[:4],
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "rope_parameters": None,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": _LOCAL_AND_GLOBAL,
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    "gemma4_unified_text": _GEMMA4,
    "diffusion_gemma_text": {
        **_GEMMA4,
        "num_experts": 4,
        "top_k_experts": 2,
        "num_global_key_value_heads": 1,
        "moe_intermediate_size": 64,
    },
    "gemma4_assistant": {
        "default": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 6},
    },
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 6}},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _SECTIONS},
    "ministral": {"head_dim": 16, "layer_types": _LOCAL_AND_GLOBAL[:4]},
    "moshi": {"sliding_window": 512},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_embed_dim": 64,
    },
    "chameleon": {"vocabulary_map": _VOCABULARY_MAP},
    "emu3": {"vocabulary_map": _VOCABULARY_MAP},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
    "florence_vision": {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "embed_dim": [32, 64],
        "patch_prenorm": [False, True],
        "num_heads": [2, 4],
        "num_groups": [2, 4],
    },
    "glm4v_text": {"rope_parameters": _SECTIONS},
    "glm4v_moe_text": {"rope_parameters": _SHORTER_SECTIONS},
    "glm46v_text": {"rope_parameters": _SECTIONS},
    "glm_ocr_text": {"rope_parameters": _SECTIONS},
    "paddleocr_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]}},
    "glm5_next_text": {"num_key_value_heads": 4},
    "granite4_vision": {"deepstack_layer_map": [[0, 1]], "downsample_rate": "4/8", "spatial_target_layers": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "radio": {"video_temporal_patch_size": 2},
    "qwen2_5_omni_text": {"rope_parameters": _SECTIONS},
    "qwen2_5_omni_thinker": _QWEN_OMNI,
    "qwen3_omni_moe_thinker": _QWEN_OMNI,
    "step3p5": {"sliding_window": 16},
    # The shared attention reads the embeddings beside the hidden states: twice the width.
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    # transformers counts a decoder's layers of this family by its encoder's.
    "blenderbot": {"encoder_layers": 4},
}
# Encoders by default; as a causal language model each is used with `is_decoder=True`.
for _name in (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
):
    CHANGES[_name] = {"is_decoder": True, "add_cross_attention": False}
CHANGES["xmod"]["default_language"] = "en_XX"
