"""Plans that a bias of the key projections harms are warned of, and no others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli import main
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.key_bias import has_key_bias, key_bias_bits, said_without_weights
from kvtailor.hf.model.loading import new_model
from kvtailor.hf.model.modules import modules_by_layer
from kvtailor.plan import Plan

# The preset turboquant4 without centred.
ROTATED = "hadamard(of=gaussian(bits=4), signs=0)"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def made(kind: str, bias: float = 0.0, layers: tuple[int, ...] = (0, 2), **more: Any) -> Any:
    """A tiny model, and in some layers a bias of the keys of so many times what its keys differ by."""
    torch.manual_seed(0)
    model = new_model(kind, **{**SIZES, **more}).eval()
    for layer, module in modules_by_layer(model).items():
        if layer in layers and bias:
            inner = model.model.layers[layer]
            spread = (module.k_proj.weight * inner.input_layernorm.weight).square().view(2, -1).sum(-1).sqrt()
            direction = torch.nn.functional.normalize(torch.randn(2, 12), dim=-1)
            module.k_proj.bias.data = (bias * spread[:, None] * direction).flatten()
    return model


def said(model: Any, *plans: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for plan in plans:
            kvtailor.cache_for(model, plan)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("bias", [0.5, 3.0, 40.0])
def test_bits_are_those_of_the_closed_form(bias: float) -> None:
    model = made("qwen2", bias)
    found = key_bias_bits(model, Geometry.of(model.config))
    exact = 0.5 * torch.tensor(1 + bias**2).log2().item()
    assert set(found) == {0, 1, 2} and found[1] == 0.0
    # Few inputs are drawn: the spread is known to a tenth or so.
    assert found[0] == pytest.approx(exact, abs=0.35) and found[2] == pytest.approx(exact, abs=0.35)


def test_a_plan_is_warned_of_once_and_told_what_to_use() -> None:
    model = made("qwen2", 40.0)
    found = said(model, ROTATED, ROTATED, "vector(bits=4)")
    assert len(found) == 2 and all("kivi4 or kvquant4" in each and "2 layers" in each for each in found)
    assert "hadamard" in found[0] and "vector" in found[1] and all("centred(of=...)" in each for each in found)


def test_where_the_bias_cannot_be_taken_off_centred_is_warned_of() -> None:
    """Angles of a dynamic rotary embedding depend on the length, so that no key tells those of others."""

    def dynamic(model: Any) -> Any:
        model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        return model

    model = dynamic(made("qwen2", 40.0))
    found = said(model, "turboquant4", "by_layer(of=[centred(of=vector(bits=4)), vector(bits=4)], layers=[0, 1, 1])")
    assert len(found) == 2 and "could not take the bias off" in found[0] and "centred(of=...)" in found[1]
    assert said(dynamic(made("qwen2", 0.5)), "turboquant4") == []


@pytest.mark.parametrize(
    "plan",
    [
        "full",
        "kivi4",
        "kvquant4",
        "turboquant2",
        "turboquant3",
        "turboquant4",
        "quarot4",
        "centred(of=nvfp4)",
        "by_layer(of=[plain, turboquant4], layers=[0, 1, 1])",
        "sides(keys=turboquant4, values=vector(bits=4))",
        "snapkv + quarot4 @ keep=0.5",
        "vector(bits=8)",
        "fp8",
        "snapkv @ keep=0.5",
        "hadamard(of=vector(bits=4, only=values), only=values)",
        "sides(keys=kivi(bits=4), values=vector(bits=4))",
        "by_layer(of=[plain, vector(bits=4)], layers=[0, 1, 0])",
    ],
)
def test_plans_that_bear_it_are_not_warned_of(plan: str) -> None:
    assert said(made("qwen2", 40.0), plan) == []


def test_a_table_of_layers_counts_where_the_bias_is() -> None:
    model = made("qwen2", 40.0)
    assert said(model, "by_layer(of=[plain, vector(bits=4)], layers=[1, 0, 0])")


@pytest.mark.parametrize(("kind", "bias", "more"), [("qwen2", 0.5, {}), ("llama", 0.0, {}), ("qwen3", 0.0, {})])
def test_models_without_a_large_bias_are_not_warned_of(kind: str, bias: float, more: dict[str, Any]) -> None:
    assert said(made(kind, bias, **more), "turboquant4", ROTATED, "quarot4", "vector(bits=4)", "nvfp4") == []


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "phi", "starcoder2", "opt"])
def test_other_layouts_of_projections_are_asked_by_their_own_forward(kind: str) -> None:
    sizes = {"ffn_dim": 64, "word_embed_proj_dim": 48} if kind == "opt" else {}
    model = made(kind, **{"num_key_value_heads": 4, **sizes}) if kind != "starcoder2" else made(kind)
    geometry = Geometry.of(model.config)
    for module in modules_by_layer(model).values():
        assert has_key_bias(module)
        for name, each in module.named_parameters():
            if name.endswith("bias"):
                each.data.fill_(3.0)
    found = key_bias_bits(model, geometry)
    assert set(found) == {0, 1, 2} and min(found.values()) > 2
    assert len(said(model, "vector(bits=4)")) == 1


def test_a_bias_behind_which_keys_are_normed_is_no_constant() -> None:
    model = made("persimmon", num_key_value_heads=4)
    for module in modules_by_layer(model).values():
        module.query_key_value.bias.data.normal_()
    assert key_bias_bits(model, Geometry.of(model.config)) == {}


def test_check_and_show_read_the_folder(tmp_path: Path) -> None:
    model = made("qwen2", 40.0)
    model.save_pretrained(tmp_path)
    plan, geometry = Plan.parse(ROTATED), Geometry.of(model.config)
    sentence = said_without_weights(plan, str(tmp_path), geometry)
    assert sentence is not None and "2 layers" in sentence
    for each in ("kivi4", "turboquant4", "quarot4"):
        assert said_without_weights(Plan.parse(each), str(tmp_path), geometry) is None
    for verb in ("check", "show"):
        found = CliRunner().invoke(main, [verb, ROTATED, "--model", str(tmp_path)])
        assert found.exit_code == 0 and "warning:" in found.output and "kivi4" in found.output, found.output
        for each in ("kivi4", "turboquant4"):
            assert "warning:" not in CliRunner().invoke(main, [verb, each, "--model", str(tmp_path)]).output
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    sentence = said_without_weights(plan, str(tmp_path), geometry)
    assert sentence is not None and "may have a bias" in sentence
    assert said_without_weights(plan, "demo", Geometry.of(kvtailor.load_model("demo")[0].config)) is None
