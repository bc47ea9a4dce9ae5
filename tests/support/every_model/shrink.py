"""A configuration of any family, made tiny by its attributes' names.

A family's default configuration tells which attributes there are. Those that size something become small, and lists
with an entry for each layer keep the entries of a few layers, so that every kind of layer stays. What these rules
cannot know stands in `families.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from tests.support.every_model.families import CHANGES
from transformers import AutoConfig, PreTrainedConfig

__all__ = ["FIRST_SPECIAL", "VOCABULARY", "shrunk"]

VOCABULARY = 131
FIRST_SPECIAL = 100
"""Tokens from here on may mean an image or a sound to a model; prompts have smaller ones."""
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 4

# Attributes by what they size. Each is set where the default is a larger number.
_SIZES: tuple[tuple[int, str], ...] = (
    (
        HIDDEN,
        """
        hidden_size d_model n_embd dim embed_dim embedding_size embedding_dim emb_dim word_embed_proj_dim d_inner
        intermediate_size ffn_dim d_ff dff dim_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim feed_forward_size
        moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size intermediate_size_mlp
        moe_hidden_size share_expert_dim router_hidden_size attention_hidden_size hidden_size_global lru_width
        mlp_dim out_hidden_size output_dim projection_dim projection_hidden_dim projection_hidden_size text_hidden_size
        projection_intermediate_size projector_hidden_size projector_input_dim projector_output_dim vision_hidden_size
        vision_output_dim encoder_hidden_size decoder_hidden_size backbone_hidden_size merged_hidden_size
        image_text_hidden_size patch_embed_hidden_size pooler_output_size output_channels downsample_hidden_size
        alignment_intermediate_size centroid_intermediate_top_k adapter_in_dim adapter_out_dim adapter_input_size
        mamba_d_ssm input_embedding_size output_embedding_size image_token_embed_dim classifier_proj_size
        prompt_mid_dim ple_embed_dim position_embedding_size codebook_dim base_channels latent_channels num_filters
        vector_quantization_hidden_dimension shape_embed_dim pronunciation_embed_dim conv_output_size
        conv_hidden_size intermediate_dim max_img_size attention_window_size local_attention_window_len
        max_2d_position_embeddings num_centroids codebook_size num_embeddings max_temporal_embeddings
        conv_dim dim_model_base
        """,
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_sliding_attention_heads
        conf_num_attention_heads resampler_heads resampler_n_heads index_n_heads linear_num_value_heads linear_num_heads
        mamba_n_heads mamba_num_heads n_mamba_heads num_experts num_local_experts n_routed_experts moe_num_experts
        zero_expert_num index_topk_blocks hc_lowrank num_query_tokens latent_query_num resampler_n_latents
        resampler_num_latents num_mem_blocks
        """,
    ),
    (
        KV_HEADS,
        """
        num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads num_query_groups
        num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k
        conf_num_hidden_layers aligner_num_add_layers num_codebooks resampler_depth expert_layer_period
        attn_layer_period num_lstm_layers num_global_layers heads_per_ngram o_groups num_res_blocks
        """,
    ),
    (
        HEAD_DIM,
        """
        head_dim d_head d_kv dim_head attention_head_dim attention_head_size kv_channels swa_head_dim qk_nope_head_dim
        v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim kv_lora_rank resampler_head_dim
        resampler_dim_head query_pre_attn_scalar index_head_dim mamba_d_state mamba_head_dim mamba_d_head ssm_state_size
        state_size sliding_window sliding_window_size attention_chunk_size mamba_dt_rank time_step_rank laurel_rank
        adapter_rank gated_norm_rank o_lora_rank hidden_size_per_layer_input rotary_dim index_block_size
        chunk_size mamba_chunk_size split_ngram_parts num_buckets prompt_types
        """,
    ),
    (8, "qk_rope_head_dim num_local_blocks num_quantizers"),
    (24, "q_lora_rank qk_head_dim"),
    (32, "index_topk block_multiple_of block_size"),
    (
        1,
        """
        n_group topk_group n_groups num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
        attn_layer_offset first_k_dense_replace num_nextn_predict_layers num_dense_layers moe_layer_start_index
        decoder_sparse_step
        """,
    ),
    (3, "moe_layer_end_index"),
    (
        LAYERS,
        """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers layers max_window_layers
        """,
    ),
    (
        512,
        """
        max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions seq_len
        model_max_length context_length rel_extent max_vit_seq_len
        """,
    ),
    (
        VOCABULARY,
        """
        vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size mel_vocab_size unpadded_vocab_size
        encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size ngram_vocab_size_base
        """,
    ),
)
_SIZE = {name: size for size, names in _SIZES for name in names.split()}
# Of a part that does not read text.
_OF_OTHER_PARTS = {"depth": 2, "num_hidden_layers": 2, "num_layers": 2, "layers": 2, "image_size": 64, "num_heads": 4}
_INDEXES = frozenset(
    [
        "full_attn_idxs",
        "hybrid_layer_ids",
        "moe_layers",
        "rope_scaling_layers",
        "cross_attention_layers",
        "deepstack_visual_indexes",
        "fullatt_block_indexes",
        "global_attn_indexes",
        "mlp_only_layers",
        "intermediate_layers_indices",
    ]  # noqa: SIM905
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth")
_TOKEN = re.compile(r"(_id|_token_index|_ids|_index)$")


def shrunk(config_class: type[PreTrainedConfig], changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Return a tiny configuration of a class.

    Args:
        config_class: of transformers.
        changes: attributes that replace what the rules find; those of a part stand under the part's name, as a dict.
    """
    special: dict[int, int] = {}
    return _shrunk(_default(config_class), special, reads_text=True, changes=changes or {})


def _default(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    return config_class(**CHANGES.get(config_class.model_type, {}).get("default", {}))


def _shrunk(
    default: PreTrainedConfig, special: dict[int, int], *, reads_text: bool, changes: dict[str, Any]
) -> PreTrainedConfig:
    own = {k: v for k, v in CHANGES.get(default.model_type, {}).items() if k != "default"}
    changes = {**own, **changes}
    parts = {name: getattr(default, name, None) for name in default.sub_configs}
    if default.model_type == "timm_wrapper":
        return default
    values: dict[str, Any] = {}
    layers = next((getattr(default, n) for n in _LAYER_COUNTS if isinstance(getattr(default, n, None), int)), 0)
    kept = _kept_layers(default, layers, reads_text)
    # A part may have other defaults than its class.
    of_class = vars(_default(type(default)))
    for name, value in _attributes(default):
        if name in parts:
            continue
        small = _small(name, value, layers, kept, reads_text)
        if small is not None:
            values[name] = small
        elif _TOKEN.search(name) or name in ("bos_token", "eos_token"):
            values |= _special_token(name, value, special)
        elif name in of_class and not isinstance(value, dict) and value != of_class[name]:
            values[name] = value
    values |= _small_latents(default)
    for name, part in parts.items():
        if isinstance(part, PreTrainedConfig):
            inner = changes.pop(name, {})
            text = reads_text and (
                name in ("text_config", "language_config", "llm_config", "thinker_config", "decoder")
            )
            if isinstance(inner, dict):
                values[name] = _shrunk(part, special, reads_text=text, changes=inner)
            else:
                values[name] = inner
    values |= changes
    made = _made(default, values)
    return made


def _small_latents(default: PreTrainedConfig) -> dict[str, Any]:
    """Heads and sizes of multi-head latent attention, which depend on each other."""
    given = vars(default)
    if not given.get("kv_lora_rank"):
        return {}
    rotary = min(given.get("qk_rope_head_dim") or 0, 8)
    sizes = {given.get("qk_rope_head_dim"): rotary, given.get("qk_head_dim"): rotary + HEAD_DIM}
    found: dict[str, Any] = {"num_key_value_heads": HEADS} if given.get("num_key_value_heads") else {}
    if given.get("head_dim") in sizes:
        found["head_dim"] = sizes[given["head_dim"]]
    return found


def _made(default: PreTrainedConfig, values: dict[str, Any]) -> PreTrainedConfig:
    rope = _small_rope(default, values)
    if rope is not None and "rope_parameters" not in values:
        values["rope_parameters"] = rope
    for name in ("pad_token_id", "bos_token_id"):
        if hasattr(default, name):
            values.setdefault(name, 0 if name == "pad_token_id" else 1)
    return type(default)(**values)


def _attributes(config: PreTrainedConfig) -> Iterable[tuple[str, Any]]:
    return [(name, value) for name, value in vars(config).items() if not name.startswith("_")]


def _kept_layers(config: PreTrainedConfig, layers: int, reads_text: bool) -> list[int]:
    """Indexes of layers such that each kind of layer is there, and full attention twice where it is."""
    if not layers:
        return []
    per_layer = [v for _, v in _attributes(config) if isinstance(v, list | tuple) and len(v) == layers]
    wanted = LAYERS if reads_text else 2
    kinds = [v for v in per_layer if all(isinstance(each, str) for each in v)]
    kept: list[int] = []
    for values in kinds:
        for kind in dict.fromkeys(values):
            if not any(values[i] == kind for i in kept):
                kept.append(values.index(kind))
    for values in kinds:
        full = [i for i, kind in enumerate(values) if kind in ("full_attention", "hybrid")]
        if full and sum(i in kept for i in full) < 2:
            kept += [i for i in full if i not in kept][:1]
    kept += [i for i in range(layers) if i not in kept][: max(0, wanted - len(kept))]
    return sorted(kept)


def _small(name: str, value: Any, layers: int, kept: list[int], reads_text: bool) -> Any:
    """The value of an attribute in the tiny configuration; None where it stays."""
    if isinstance(value, bool):
        return None
    if name in _INDEXES and isinstance(value, list | tuple):
        found = [kept.index(i) for i in value if i in kept]
        return type(value)(found if found or not value else [len(kept) - 1])
    if isinstance(value, list | tuple) and layers and len(value) == layers and layers != len(kept):
        picked = [value[i] for i in kept]
        size = _SIZE.get(name)
        if size is not None and all(isinstance(each, int) for each in picked):
            picked = [min(each, size) for each in picked]
        return type(value)(picked)
    if not isinstance(value, int):
        return None
    if name in _LAYER_COUNTS and value == layers:
        return len(kept)
    size = _SIZE.get(name) if reads_text else _OF_OTHER_PARTS.get(name, _SIZE.get(name))
    return size if size is not None and value > size else None


def _special_token(name: str, value: Any, special: dict[int, int]) -> dict[str, Any]:
    if name == "eos_token_id":
        return {name: 2}
    if name == "pad_token_id":
        return {name: 0}
    if name == "bos_token_id":
        return {name: 1}
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
        return {name: [_renamed(each, special) for each in value]}
    if not isinstance(value, int) or isinstance(value, bool) or value < FIRST_SPECIAL:
        return {}
    return {name: _renamed(value, special)}


def _renamed(token: int, special: dict[int, int]) -> int:
    if token < FIRST_SPECIAL:
        return token
    return special.setdefault(token, FIRST_SPECIAL + len(special) % (VOCABULARY - FIRST_SPECIAL))


def _small_rope(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any] | None:
    rope = getattr(default, "rope_parameters", None)
    if not isinstance(rope, dict):
        return None
    rope = copy.deepcopy(rope)

    def size(name: str) -> Any:
        # Not getattr: of an attribute that differs between layers there is no one value.
        return values.get(name, vars(default).get(name))

    head_dim = size("head_dim") or (size("hidden_size") or HIDDEN) // (size("num_attention_heads") or HEADS)
    changed = False
    for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        half = int(head_dim * (each.get("partial_rotary_factor") or 1.0)) // 2
        for name in ("long_factor", "short_factor"):
            if name in each:
                each[name], changed = each[name][:half], True
        section = each.get("mrope_section")
        if section:
            first = half // len(section)
            each["mrope_section"] = [half - first * (len(section) - 1), *[first] * (len(section) - 1)]
            changed = True
    return rope if changed else None


def config_class_of(model_type: str) -> type[PreTrainedConfig]:
    """Return the configuration class of a model type."""
    return type(AutoConfig.for_model(model_type, **CHANGES.get(model_type, {}).get("default", {})))
