"""A Llama as GGUF: the order of rotary channels, the names, what is refused, and the file where `gguf` is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.peers.gguf_file import interleaved, interleaved_rows, llama_tensors, write_gguf
from kvtailor.errors import KvtailorError, UnsupportedModel

HEADS, KV_HEADS, SIZE = 4, 2, 8


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "vocab_size": 40,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | fields))).eval()


def turned_in_neighbours(states: Tensor, angles: Tensor) -> Tensor:
    """llama.cpp's rotation: channels 2i and 2i + 1 of (..., n, d) by angle i of (n, d / 2)."""
    even, odd = states[..., 0::2], states[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


def test_channels_of_both_halves_become_neighbours() -> None:
    assert interleaved(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    weight = torch.arange(8)[:, None].expand(8, 3)
    assert interleaved_rows(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rotated_keys_are_transformers_keys_in_another_order() -> None:
    states = torch.randn(1, KV_HEADS, 5, SIZE, generator=torch.Generator().manual_seed(1))
    angles = torch.arange(5.0)[:, None] * 10_000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    both = torch.cat([angles, angles], -1)[None]
    ours, _ = apply_rotary_pos_emb(states, states, both.cos(), both.sin())
    assert torch.allclose(interleaved(ours), turned_in_neighbours(interleaved(states), angles), atol=1e-6)


def test_every_weight_has_its_name_and_only_queries_and_keys_are_reordered() -> None:
    model = llama()
    own, found = model.state_dict(), dict(llama_tensors(model))
    assert len(found) == len(own) == 2 * 9 + 3
    assert torch.equal(found["output.weight"], own["lm_head.weight"])
    assert torch.equal(found["blk.1.attn_v.weight"], own["model.layers.1.self_attn.v_proj.weight"])
    assert torch.equal(found["blk.0.ffn_norm.weight"], own["model.layers.0.post_attention_layernorm.weight"])
    for kind, heads in (("q", HEADS), ("k", KV_HEADS)):
        expected = interleaved_rows(own[f"model.layers.1.self_attn.{kind}_proj.weight"], heads)
        assert torch.equal(found[f"blk.1.attn_{kind}.weight"], expected)
    assert "output.weight" not in dict(llama_tensors(llama(tie_word_embeddings=True)))


def test_names_are_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    model = llama()
    expected = [names.get_name(name, try_suffixes=(".weight",)) for name in model.state_dict()]
    assert [name for name, _ in llama_tensors(model)] == expected


def test_a_model_that_would_not_be_the_same_is_refused(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    for model, word in (
        (llama(rope_parameters=scaled), "rope_type is 'linear'"),
        (llama(attention_bias=True), "attention_bias is True"),
        (llama(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (
            GPTNeoXForCausalLM(
                GPTNeoXConfig(
                    hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, vocab_size=8
                )
            ),
            "model_type is 'gpt_neox'",
        ),
    ):
        with pytest.raises(UnsupportedModel, match=word):
            list(llama_tensors(model))
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    with pytest.raises(KvtailorError, match="float64"):
        write_gguf(llama(), tmp_path / "x.gguf", torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_file_holds_the_weights_and_the_configuration(dtype: torch.dtype, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    model = llama(rope_parameters={"rope_type": "default", "rope_theta": 50_000.0})
    reader = gguf.GGUFReader(write_gguf(model, tmp_path / "x.gguf", dtype))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    expected = dict(llama_tensors(model))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        wanted = expected[name].to(torch.float32 if expected[name].dim() == 1 else dtype)
        raw = torch.from_numpy(tensor.data.copy()).contiguous().view(torch.uint8).flatten()
        assert torch.equal(raw, wanted.contiguous().view(torch.uint8).flatten()), name
        # GGUF counts the fastest dimension first.
        assert tuple(tensor.shape.tolist()) == tuple(wanted.shape[::-1])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.rope.freq_base"] == 50_000.0 and fields["llama.attention.head_count_kv"] == KV_HEADS
    assert fields["llama.attention.key_length"] == SIZE and fields["tokenizer.ggml.model"] == "none"
    assert fields["llama.vocab_size"] == 40
