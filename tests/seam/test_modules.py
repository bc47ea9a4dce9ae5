"""What is read of a model's modules is what the model does with them."""

from __future__ import annotations

import pytest
import torch

import kvtailor
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.geometry import Geometry
from kvtailor.hf.modules import attention_modules, output_weight, rotation_of
from kvtailor.ops.rotate import turn
from kvtailor.types import Rotation
from tests.seam.zoo import COMPRESSIBLE, build

ROTARY = tuple(family for family in COMPRESSIBLE if family not in ("gpt2", "opt"))


@pytest.mark.parametrize("family", ROTARY)
@torch.no_grad()
def test_keys_turned_back_are_the_same_at_every_position(family: str) -> None:
    """One token repeated: the first layer sees equal keys but for their rotation."""
    model = build(family)
    cache = kvtailor.cache_for(model, "full")
    model(torch.full((1, 24), 7), past_key_values=cache)
    state = cache.route.states[0]
    keys = state.parts()[0].decode()[0]
    geometry = Geometry.of(model.config)
    layer = geometry.compressed[0]
    rotation = rotation_of(model, attention_modules(model)[layer], geometry.layer_types[layer], geometry.head_dim)
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
    weight = output_weight(module, heads)
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
