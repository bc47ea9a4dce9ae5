"""What is read of a model's modules is what the model does with them."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import kvtailor
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.modules import attention_modules, rotation_of
from kvtailor.hf.model.projection import output_weight
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.lanes.rotate import turn
from kvtailor.types import Rotation
from tests.support.seam.zoo import COMPRESSIBLE, build

ROTARY = tuple(family for family in COMPRESSIBLE if family not in ("gpt2", "opt"))


@pytest.mark.parametrize("family", ROTARY)
@torch.no_grad()
def test_keys_turned_back_are_the_same_at_every_position(family: str) -> None:
    """One token repeated: the first layer sees equal keys but for their rotation."""
    model = build(family)
    cache = kvtailor.cache_for(model, "full")
    model(torch.full((1, 24), 7), **hand_cache(cache))
    state = cache.engine.states[0]
    keys = state.parts()[0].decode()[0]
    geometry = Geometry.of(model.config)
    layer = geometry.compressed[0]
    rotation = rotation_of(model, attention_modules(model)[layer], geometry.shapes[layer].kind, geometry.head_dim)
    before = turn(keys, -torch.arange(24), rotation)
    assert (before - before[:, :1]).abs().max() < 1e-5
    assert (keys - keys[:, :1]).abs().max() > 1e-2, "nothing was turned, so this test has shown nothing"


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_keeps_what_attention_sees_relative(interleaved: bool) -> None:
    rotation = Rotation(frequencies=torch.tensor([1.0, 0.3, 0.01]), interleaved=interleaved)
    query, key = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    here, there = torch.arange(9), torch.arange(9) + 1000
    one = turn(query, here + 5, rotation) @ turn(key, here, rotation).transpose(1, 2)
    two = turn(query, there + 5, rotation) @ turn(key, there, rotation).transpose(1, 2)
    assert torch.allclose(one, two, atol=1e-3)
    assert torch.equal(turn(query, here, rotation)[..., 6:], query[..., 6:])
    assert torch.allclose(turn(turn(query, there, rotation), -there, rotation), query, atol=1e-5)


def test_a_rotation_of_more_channels_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="6 channels"):
        turn(torch.zeros(1, 2, 4), torch.zeros(2), Rotation(frequencies=torch.ones(3)))


@pytest.mark.parametrize("family", COMPRESSIBLE)
@torch.no_grad()
def test_the_output_weight_maps_heads_to_the_hidden_state(family: str) -> None:
    model = build(family)
    module = attention_modules(model)[0]
    heads = Geometry.of(model.config).q_heads
    weight = output_weight(module, heads, Geometry.of(model.config).head_dim)
    projection = next(
        getattr(module, name) for name in ("o_proj", "dense", "out_proj", "c_proj") if hasattr(module, name)
    )
    values = torch.randn(5, heads, weight.shape[1])
    expected = projection(values.flatten(1)) - projection(torch.zeros(5, heads * weight.shape[1]))
    assert torch.allclose(torch.einsum("nqd,qdo->no", values, weight), expected, atol=1e-5)
    assert weight.untyped_storage().data_ptr() == projection.weight.untyped_storage().data_ptr(), (
        "a copy of the weights"
    )


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_model_without_rotation_is_refused_in_a_sentence(family: str) -> None:
    model = build(family)
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        rotation_of(model, attention_modules(model)[0], None, 16)


def test_a_rotation_that_changes_with_the_length_is_refused() -> None:
    model = build("llama")
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UnsupportedModel, match="depend on the length"):
        rotation_of(model, attention_modules(model)[0], None, 16)


def test_modules_of_a_picture_encoder_are_no_attention_of_the_decoder() -> None:
    model = build("llama")
    model.tower = torch.nn.Module()
    model.tower.layer_idx, model.tower.config = 0, transformers.LlamaConfig()
    model.tower.o_proj = torch.nn.Linear(2, 2)
    model._modules = {"tower": model._modules.pop("tower"), **model._modules}
    assert [type(module).__name__ for module in attention_modules(model)] == ["LlamaAttention"] * 3


_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "pad_token_id": 0,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
# By family: a configuration, and for each layer that sees all whether its keys are turned.
_SOME_UNTURNED = {
    "smollm3": (lambda: transformers.SmolLM3Config(**_TINY, no_rope_layers=[1, 0, 1, 0]), (True, False, True, False)),
    "cohere2": (
        lambda: transformers.Cohere2Config(**_TINY, sliding_window=8, layer_types=_WINDOWS, bos_token_id=1),
        (False, False),
    ),
    "exaone4": (
        lambda: transformers.Exaone4Config(**_TINY, sliding_window=8, layer_types=_WINDOWS),
        (False, False),
    ),
    "gemma3": (
        lambda: transformers.Gemma3TextConfig(**_TINY, head_dim=16, sliding_window=8, layer_types=_WINDOWS),
        (True, True),
    ),
}


@pytest.mark.parametrize("family", _SOME_UNTURNED)
def test_a_layer_that_turns_no_keys_is_refused_where_a_plan_would_turn_them(family: str) -> None:
    """Several families leave the rotary embedding out in some layers."""
    make, turned = _SOME_UNTURNED[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make()).eval()
    geometry = Geometry.of(model.config)
    modules = attention_modules(model)
    for layer, expected in zip(geometry.compressed, turned, strict=True):
        if expected:
            rotation_of(model, modules[layer], geometry.shapes[layer].kind, geometry.head_dim)
            continue
        with pytest.raises(UnsupportedModel, match=f"layer {layer} of this {family}.* does not turn its own"):
            rotation_of(model, modules[layer], geometry.shapes[layer].kind, geometry.head_dim)
    if not all(turned):
        with pytest.raises(UnsupportedModel, match="does not turn its own"):
            kvtailor.cache_for(model, "position + rolling @ tokens=16, slack=3")


def test_angles_that_a_model_withholds_are_refused_too() -> None:
    """Some models hand no angles on to a layer, and some have none for its kind."""
    model = build("llama")
    model.config.layer_rope_theta = [10000.0, 0, 10000.0]
    modules = attention_modules(model)
    rotation_of(model, modules[0], None, 16)
    with pytest.raises(UnsupportedModel, match="layer 1 of this llama does not turn"):
        rotation_of(model, modules[1], None, 16)
    model = build("gemma3")
    del model.model.rotary_emb.rope_type["full_attention"]
    with pytest.raises(UnsupportedModel, match="does not turn"):
        rotation_of(model, attention_modules(model)[1], "full_attention", 16)


def test_an_attention_that_cannot_be_asked_is_refused() -> None:
    model = build("llama")
    module = attention_modules(model)[0]
    module.forward = lambda hidden_states, position_embeddings, something: None
    with pytest.raises(UnsupportedModel, match="cannot be told: TypeError"):
        rotation_of(model, module, None, 16)
