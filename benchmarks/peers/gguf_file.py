"""A Llama of transformers as a GGUF file, the format that llama.cpp reads.

llama.cpp turns the pair of neighbouring channels 2i and 2i + 1 of a head by one angle; transformers turns channels i
and i + d/2. So the rows of the query and key projections are reordered, and nothing else is changed: the products of
queries and keys are the same sums in another order. Values and the output keep their order.

The file has no tokenizer ("none"): what is compared gets token ids on both sides. Vectors (norms) are written in
float32, as llama.cpp's own converter does, and matrices in the dtype that is asked for.

Source: `convert_hf_to_gguf.py` of llama.cpp (`LlamaModel.permute`, `modify_tensors`). Writing needs the package `gguf`,
which is no dependency of kvtailor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import KvtailorError, UnsupportedModel

__all__ = ["interleaved", "interleaved_rows", "llama_tensors", "write_gguf"]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def interleaved(states: Tensor) -> Tensor:
    """Return states (..., d) with channel i at 2i and channel i + d/2 at 2i + 1: llama.cpp's order of a rotary head."""
    neighbours: Tensor = states.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return neighbours


def interleaved_rows(weight: Tensor, heads: int) -> Tensor:
    """Return a projection (heads * d, hidden) with the rows of each head in the order of `interleaved`."""
    return interleaved(weight.T.unflatten(-1, (heads, -1))).flatten(-2).T


def llama_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in GGUF, tensor) for every weight of a Llama of transformers.

    Raises:
        UnsupportedModel: the model is not one that this export reproduces exactly, and why.
    """
    config = _checked(model)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        in_layer = _LAYER.fullmatch(name)
        kind = None if in_layer is None else _OF_LAYERS.get(in_layer[2])
        if in_layer is not None and kind is not None:
            rows = interleaved_rows(tensor, heads[kind]) if kind in heads else tensor
            yield f"blk.{in_layer[1]}.{kind}.weight", rows
        elif name in _NAMES:
            yield _NAMES[name], tensor
        else:
            raise UnsupportedModel(f"asked to export {name}, which GGUF's llama does not have: export a plain Llama")


def write_gguf(model: Any, path: Path, dtype: torch.dtype) -> Path:
    """Write a Llama of transformers to a file, and return its path.

    Args:
        model: a `LlamaForCausalLM`.
        path: of the file, whose folder exists.
        dtype: of its matrices: float32, float16 or bfloat16.

    Raises:
        UnsupportedModel: see `llama_tensors`.
        KvtailorError: the package `gguf` is not installed, or the dtype is another.
    """
    try:
        import gguf
    except ImportError as error:
        raise KvtailorError(
            f"asked for a GGUF file, but gguf cannot be imported ({error}): pip install gguf"
        ) from error
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if dtype not in kinds:
        raise KvtailorError(f"asked for a GGUF file of {dtype}: give float32, float16 or bfloat16")
    config = _checked(model)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, tensor in llama_tensors(model):
        wanted = torch.float32 if tensor.dim() == 1 else dtype
        # numpy has no bfloat16, so every tensor goes as bytes with its type beside it.
        raw = tensor.detach().cpu().to(wanted).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kinds[wanted]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _checked(model: Any) -> Any:
    """The configuration of a model that the export reproduces exactly."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    faults = [
        f"{what} is {found!r} and not {wanted!r}"
        for what, found, wanted in (
            ("model_type", config.model_type, "llama"),
            ("hidden_act", getattr(config, "hidden_act", None), "silu"),
            ("attention_bias", getattr(config, "attention_bias", None), False),
            ("mlp_bias", getattr(config, "mlp_bias", None), False),
            ("rope_type", rope.get("rope_type"), "default"),
        )
        if found != wanted
    ]
    if faults:
        found = "; its ".join(faults)
        raise UnsupportedModel(f"asked to export a model as GGUF, but its {found}: export a plain Llama")
    return config
