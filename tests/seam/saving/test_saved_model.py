"""A saved cache names the model that it was made with, and no other one takes it."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import nn

import kvtailor
from kvtailor.encode.centred import CentredSegment
from kvtailor.errors import CacheFileError, CacheMisuse
from kvtailor.hf.model.fingerprint import weight_fingerprint
from kvtailor.hf.model.loading import new_model
from kvtailor.hf.versions import hand_cache
from tests.seam.saving.test_saving import continued, saved
from tests.support.seam.zoo import FAMILIES, build, configs, prompts

PLAN = "snapkv(window=6) @ tokens=16"


def first_projection(model) -> nn.Parameter:
    return model.model.layers[0].self_attn.q_proj.weight


def flip_one_bit(model) -> None:
    """Of one weight that no sample meets."""
    with torch.no_grad():
        first_projection(model).view(torch.int32).view(-1)[5] ^= 1


def merge_low_rank(model) -> None:
    with torch.no_grad():
        weight = first_projection(model)
        weight += 1e-3 * torch.randn(weight.shape[0], 1) @ torch.randn(1, weight.shape[1])


def swap_two_heads(model) -> None:
    with torch.no_grad():
        weight = first_projection(model)
        weight.copy_(torch.cat([weight[16:32], weight[:16], weight[32:]]))


class Adapted(nn.Module):
    """A projection with an adapter beside it, with the attributes of peft's layers."""

    def __init__(self, base: nn.Linear, **attributes):
        super().__init__()
        self.base_layer, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.constant_(self.down.weight, 0.01)
        nn.init.constant_(self.up.weight, 0.01)
        self.disable_adapters, self.active_adapters, self.merged_adapters = False, ["default"], []
        self.scaling = {"default": 1.0}
        vars(self).update(attributes)

    def forward(self, states):
        return self.base_layer(states) + self.scaling["default"] * self.up(self.down(states))


def adapt(model, **attributes) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj, **attributes)


def slow_down(model) -> None:
    model.model.rotary_emb.inv_freq *= 0.9


CHANGES = {
    "trained again": (lambda model: model.load_state_dict(build("llama", state=1).state_dict()), "weights"),
    "one bit": (flip_one_bit, "weights"),
    "merged adapter": (merge_low_rank, "weights"),
    "swapped heads": (swap_two_heads, "weights"),
    "adapter": (adapt, "weights"),
    "rotary frequencies": (slow_down, r"rotary frequencies model.rotary_emb.inv_freq differ \(1 there and 0.9 here\)"),
    "config": (lambda model: setattr(model.config, "rms_norm_eps", 1e-3), "rms_norm_eps is 1e-06 there and 0.001 here"),
    "dtype": (lambda model: model.to(torch.bfloat16), "dtype is float32 there and bfloat16 here"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_of_the_same_shape_is_refused(change: str, tmp_path) -> None:
    path = tmp_path / "cache.safetensors"
    _, _, _ = saved("llama", PLAN, path)
    apply, sentence = CHANGES[change]
    other = build("llama")
    apply(other)
    with pytest.raises(CacheFileError, match=f"cache.safetensors.*another model.*{sentence}"):
        kvtailor.load_cache(other, path)


def test_centred_codes_are_refused_by_a_model_with_another_key_bias(tmp_path) -> None:
    """The file has the codes of keys without their constant, and not the constant: that is read from the model."""
    path = tmp_path / "cache.safetensors"
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    made = new_model("qwen2", **sizes, num_attention_heads=4, num_key_value_heads=2).eval()
    with torch.no_grad():
        made.model.layers[0].self_attn.k_proj.bias.fill_(3.0)
    cache = kvtailor.prefill(made, torch.arange(40)[None] + 3, plan="centred(of=vector(bits=4))")
    assert isinstance(cache.engine.states[0].stored.segments[0], CentredSegment)
    cache.save(path)
    assert kvtailor.load_cache(made, path).seen == 40
    with torch.no_grad():
        made.model.layers[0].self_attn.k_proj.bias[5] = 3.5
    with pytest.raises(CacheFileError, match="another model.*weights"):
        kvtailor.load_cache(made, path)


def test_another_rope_theta_is_refused(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    path = tmp_path / "cache.safetensors"
    model, _, _ = saved("llama", PLAN, path)
    config = copy.deepcopy(configs()["llama"])
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(CacheFileError, match=r"rope_parameters is .*10000.* there and .*500.* here"):
        kvtailor.load_cache(other, path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error")
def test_the_same_model_loaded_anew_is_taken(family: str, tmp_path) -> None:
    plan = PLAN if family != "mistral_window" else "full"
    path = tmp_path / "cache.safetensors"
    model, cache, mask = saved(family, plan, path)
    if family == "opt":
        assert kvtailor.load_cache(build(family), path).seen == cache.seen
        return
    again = build(family)
    again.config._name_or_path = "elsewhere"
    again.config.use_cache = False
    again.generation_config.max_length = 77
    loaded = kvtailor.load_cache(again, path)
    assert torch.equal(continued(again, loaded, mask)[0], continued(model, cache, mask)[0])


def test_a_copy_and_a_reset_cache_name_their_model(tmp_path) -> None:
    path = tmp_path / "cache.safetensors"
    model, cache, _ = saved("llama", PLAN, path)
    first = path.read_bytes()
    copy.deepcopy(cache).save(path)
    assert path.read_bytes() == first
    cache.reset()
    cache.save(path)
    with pytest.raises(CacheFileError, match="weights"):
        kvtailor.load_cache(build("llama", state=1), path)
    assert kvtailor.load_cache(model, path).seen == 0


def test_adapters_count_by_their_state() -> None:
    found = []
    for attributes in ({}, {"disable_adapters": True}, {"scaling": {"default": 2.0}}, {"active_adapters": []}):
        model = build("llama")
        adapt(model, **attributes)
        found.append(weight_fingerprint(model))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (1025,), (70, 300), (3, 64, 128), (0, 4)])
def test_every_value_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One value among any number, in any dtype; and where it lies does."""
    values = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def of(tensor: torch.Tensor) -> str | None:
        module = nn.Module()
        module.register_parameter("held", nn.Parameter(tensor, requires_grad=False))
        return weight_fingerprint(module)

    assert of(values) == of(values.clone())
    assert of(values) == of(values.repeat_interleave(2, -1)[..., ::2] if shape else values.clone())
    if not values.numel():
        return
    for at in {0, math.prod(shape) // 2, math.prod(shape) - 1}:
        other = values.clone()
        other.view(-1)[at] += 1
        assert of(other) != of(values), at
    if values.numel() > 64:
        assert of(values.flatten().roll(1).view(shape)) != of(values)


def test_a_model_that_is_gone_or_not_in_memory_is_warned_of(tmp_path) -> None:
    path = tmp_path / "cache.safetensors"
    model = build("llama")
    cache = kvtailor.cache_for(model, PLAN)
    with torch.no_grad():
        model(prompts((30,))[0], **hand_cache(cache))
    assert weight_fingerprint(copy.deepcopy(model).to("meta")) is None
    for layer in cache.layers:
        layer._module = None
    del model
    gc.collect()
    with pytest.warns(UserWarning, match="model of this cache is gone"):
        cache.save(path)
    with pytest.warns(UserWarning, match="has no fingerprint of its model"):
        kvtailor.load_cache(build("llama"), path)
    with pytest.raises(CacheMisuse, match="model_type"):
        kvtailor.load_cache(build("qwen2"), path)
