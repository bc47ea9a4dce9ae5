"""Models with adapters: what LoRA adds to a projection is part of it, and a wrapped model is found inside its wrapper.

The stand-ins nest as PEFT's do, so that these tests run without it; the last one is with PEFT itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvtailor
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.modules import attention_modules, rotation_of
from kvtailor.hf.model.projection import output_weight
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build, prompts

CRITICAL = "critical(of=snapkv(window=6)) @ tokens=12"


class Adapted(nn.Module):
    """A linear layer and its LoRA adapters, with the names and the formula of PEFT's."""

    def __init__(self, base: nn.Module, rank: int = 4, scaling: float = 2.0):
        super().__init__()
        turned = type(base).__name__ == "Conv1D"
        rows, columns = base.weight.shape[::-1] if turned else base.weight.shape
        self.base_layer, self.active_adapters, self.disable_adapters, self.merged = base, ["one"], False, False
        self.lora_A = nn.ModuleDict({name: nn.Linear(columns, rank, bias=False) for name in ("one", "two")})
        self.lora_B = nn.ModuleDict({name: nn.Linear(rank, rows, bias=False) for name in ("one", "two")})
        self.scaling = {"one": scaling, "two": -1.0}
        self.lora_variant: dict[str, object] = {}

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        for name in self.active_adapters if not (self.disable_adapters or self.merged) else ():
            if name in self.lora_A:
                result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


class Inner(nn.Module):
    """As PEFT's LoraModel: what it lacks is the wrapped model's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class Wrapped(Inner):
    """As PEFT's PeftModel: its base model is the LoraModel."""

    def __init__(self, model: nn.Module):
        nn.Module.__init__(self)
        self.base_model = Inner(model)

    def __getattr__(self, name: str):
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def adapted(family: str = "llama", kind: type[Adapted] = Adapted) -> tuple[Wrapped, nn.Module]:
    """A wrapped model whose adapters matter, and the model inside."""
    model = build(family)
    generator = torch.Generator().manual_seed(5)
    for module in attention_modules(model):
        name = next(name for name in ("o_proj", "c_proj") if hasattr(module, name))
        setattr(module, name, kind(getattr(module, name)))
        for parameter in [*getattr(module, name).lora_A.parameters(), *getattr(module, name).lora_B.parameters()]:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return Wrapped(model).eval(), model


def merged(family: str = "llama") -> nn.Module:
    """The same model with the adapters' matrices added to its weights."""
    _, model = adapted(family)
    for module in attention_modules(model):
        name = next(name for name in ("o_proj", "c_proj") if hasattr(module, name))
        layer = getattr(module, name)
        delta = layer.lora_B["one"].weight @ layer.lora_A["one"].weight * layer.scaling["one"]
        layer.base_layer.weight.data += delta.t() if type(layer.base_layer).__name__ == "Conv1D" else delta
        setattr(module, name, layer.base_layer)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_output_weight_is_what_the_adapted_layer_does(family: str) -> None:
    _, model = adapted(family)
    geometry, module = Geometry.of(model.config), attention_modules(model)[0]
    layer = module.o_proj if family == "llama" else module.c_proj
    values = torch.randn(5, geometry.q_heads, geometry.head_dim)

    def check(label: str) -> torch.Tensor:
        weight = output_weight(module, geometry.q_heads, geometry.head_dim)
        expected = layer(values.flatten(1)) - layer(torch.zeros(5, geometry.q_heads * geometry.head_dim))
        assert torch.allclose(torch.einsum("nqd,qdo->no", values, weight), expected, atol=1e-3), label
        return weight.clone()

    seen = [check("one adapter")]
    layer.active_adapters = ["one", "two", "of another layer"]
    seen.append(check("two adapters"))
    layer.active_adapters = ["two"]
    seen.append(check("the other adapter"))
    layer.disable_adapters = True
    seen.append(check("switched off"))
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(seen, seen[1:], strict=False)), "no adapter mattered"


def kept_by(model: nn.Module, inner: nn.Module, then=None) -> torch.Tensor:
    """(l, h, n) bool: what critical holds of a prompt; `then` happens between making the cache and the prompt."""
    cache = kvtailor.cache_for(model, CRITICAL)
    if then is not None:
        then(inner)
    with torch.no_grad():
        model(input_ids=prompts((40,))[0], **hand_cache(cache))
    found = torch.zeros(3, 2, 40, dtype=torch.bool)
    for layer, state in enumerate(cache.engine.states):
        for part in state.parts():
            columns = part.layout.columns(torch.device("cpu")).expand(part.layout.lanes, -1)
            found[layer].view(2, 40).scatter_(1, columns, True)
    return found


def set_values_alike(*models: nn.Module) -> None:
    """Value channels of very unequal size, so that the projection decides which tokens are critical."""
    for model in models:
        for module in attention_modules(model):
            module.v_proj.weight.data *= torch.logspace(-1, 1, module.v_proj.weight.shape[0])[:, None]


def test_critical_weighs_by_the_adapted_projection() -> None:
    wrapped, inner = adapted()
    same, plain = merged(), build("llama")
    set_values_alike(inner, same, plain)
    got, expected = kept_by(wrapped, inner), kept_by(same, same)
    assert torch.equal(got[0], expected[0])
    assert not torch.equal(got[0], kept_by(plain, plain)[0]), "the adapter changed nothing, so this shows nothing"


def test_adapters_that_change_after_the_cache_was_made_are_seen() -> None:
    def switch_off(model: nn.Module) -> None:
        for module in attention_modules(model):
            module.o_proj.disable_adapters = True

    wrapped, inner = adapted()
    plain = build("llama")
    set_values_alike(inner, plain)
    assert torch.equal(kept_by(wrapped, inner, switch_off), kept_by(plain, plain))


def test_a_wrapped_model_gives_its_rotary_embedding() -> None:
    wrapped, inner = adapted()
    module = attention_modules(wrapped)[0]
    got, expected = (rotation_of(model, module, None, 16) for model in (wrapped, inner))
    assert torch.equal(got.frequencies, expected.frequencies)
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(wrapped, "position + rolling @ tokens=16, slack=3")
    assert torch.isfinite(wrapped(input_ids=ids, **hand_cache(cache)).logits).all()


def test_a_wrapped_model_and_the_one_inside_share_the_switch() -> None:
    wrapped, inner = adapted()
    outer, own = kvtailor.cache_for(wrapped, "full"), kvtailor.cache_for(inner, "full")
    del outer
    with torch.no_grad():
        inner(prompts((20,))[0], **hand_cache(own))
    assert inner.config._attn_implementation == "kvtailor"


class Scaled(Adapted):
    """As DoRA and its like: more than an added matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


class Foreign(nn.Module):
    """As IA3: another kind of adapter."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x * 2)


def test_what_cannot_be_read_as_a_matrix_is_refused_and_other_plans_work() -> None:
    wrapped, _ = adapted(kind=Scaled)
    with pytest.raises(UnsupportedModel, match="does more than add a matrix"):
        kvtailor.cache_for(wrapped, CRITICAL)
    wrapped, inner = adapted()
    for module in attention_modules(inner):
        module.o_proj.lora_variant = {"one": nn.Identity()}
    with pytest.raises(UnsupportedModel, match=r"variant of LoRA \(Identity\)"):
        kvtailor.cache_for(wrapped, CRITICAL)
    model = build("llama")
    for module in attention_modules(model):
        module.o_proj = Foreign(module.o_proj)
    with pytest.raises(UnsupportedModel, match=r"Foreign changes, which is not LoRA"):
        kvtailor.cache_for(model, CRITICAL)
    ids, _ = prompts((40,))
    with torch.no_grad():
        cache = kvtailor.cache_for(model, "full")
        assert torch.allclose(model(ids, **hand_cache(cache)).logits, model(ids).logits, atol=1e-4)


def test_an_adapter_of_learned_tokens_is_refused() -> None:
    wrapped, _ = adapted()
    wrapped.active_peft_config = type("PrefixTuningConfig", (), {"is_prompt_learning": True})()
    with pytest.raises(UnsupportedModel, match=r"learned tokens or keys before each prompt \(PrefixTuningConfig\)"):
        kvtailor.cache_for(wrapped, "full")


def test_with_peft_itself() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is no dependency of kvtailor's; pip install peft to run this")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["o_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), config).eval()
    inner = model.base_model.model
    for plan in (CRITICAL, "position + rolling @ tokens=16, slack=3"):
        kvtailor.cache_for(model, plan)
    module, layer = attention_modules(model)[0], attention_modules(model)[0].o_proj
    values = torch.randn(3, 4, 16)
    with torch.no_grad():
        got = torch.einsum("nqd,qdo->no", values, output_weight(module, 4, 16))
        assert torch.allclose(got, layer(values.flatten(1)), atol=1e-3)
    assert inner.config is model.config
    dora = peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=True)
    with pytest.raises(UnsupportedModel, match="variant of LoRA"):
        kvtailor.cache_for(peft.get_peft_model(build("llama"), dora).eval(), CRITICAL)
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModel, match="PrefixTuningConfig"):
        kvtailor.cache_for(peft.get_peft_model(build("llama"), prefix).eval(), "full")
