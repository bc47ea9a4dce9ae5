"""Quantised weights (quanto, torchao, bitsandbytes): as the model's own cache, and read as what they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.model.fingerprint import remembered_fingerprint, weight_fingerprint
from kvtailor.hf.model.modules import attention_modules
from kvtailor.hf.model.projection import output_weight
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import ROUNDING, build, error, prompts

CRITICAL = "critical(of=snapkv(window=6)) @ tokens=12"
IDS, MASK = prompts((40, 27, 33))


def quanto(weights: str, activations: str | None = None, frozen: bool = True) -> Any:
    from optimum import quanto

    model = build("llama")
    kinds = {
        name: getattr(quanto, f"q{kind}") for name, kind in (("weights", weights), ("activations", activations)) if kind
    }
    quanto.quantize(model, **kinds)
    if activations:
        with quanto.Calibration():
            model(IDS[:1])
    if frozen:
        quanto.freeze(model)
    return model


def torchao(name: str) -> Any:
    from torchao import quantization

    model = build("llama")
    quantization.quantize_(model, getattr(quantization, name)())
    return model


def bitsandbytes() -> Any:
    """In four bits, by transformers' own loading; its blocks of 64 need sizes that they divide."""
    import tempfile

    config = copy.deepcopy(build("llama").config)
    config.intermediate_size = 128
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


# Makes it, the library that it needs, and whether its layers multiply by a matrix and do nothing else.
MAKERS: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "quanto int8": (lambda: quanto("int8"), "optimum.quanto", True),
    "quanto int4": (lambda: quanto("int4"), "optimum.quanto", True),
    "quanto float8": (lambda: quanto("float8"), "optimum.quanto", True),
    "quanto int8, not frozen": (lambda: quanto("int8", frozen=False), "optimum.quanto", True),
    "quanto int8 activations": (lambda: quanto("int8", "int8"), "optimum.quanto", False),
    "torchao int8": (lambda: torchao("Int8WeightOnlyConfig"), "torchao", True),
    "torchao float8": (lambda: torchao("Float8WeightOnlyConfig"), "torchao", True),
    "torchao int8 activations": (lambda: torchao("Int8DynamicActivationInt8WeightConfig"), "torchao", False),
    "bitsandbytes nf4": (bitsandbytes, "bitsandbytes", False),
}


@cache
def _made(kind: str) -> Any:
    return MAKERS[kind][0]()


def made(kind: str) -> Any:
    """The same model each time it is asked for."""
    library = MAKERS[kind][1]
    if find_spec(library.split(".")[0]) is None:
        pytest.skip(f"{library} is no dependency of kvtailor's; pip install it to run this")
    return _made(kind)


def generated(model: Any, cache: Any) -> Any:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(input_ids=IDS, attention_mask=MASK, **hand_cache(cache), **options)


@pytest.mark.parametrize("kind", MAKERS)
def test_full_equals_the_models_own_cache(kind: str) -> None:
    model = made(kind)
    then = generated(model, DynamicCache(config=model.config))
    now = generated(model, kvtailor.cache_for(model, "full"))
    if "activations" in kind:
        # Where inputs are rounded, the last bit of an attention decides on a step, as between sdpa and eager.
        assert error(now.logits[0], then.logits[0]) < 0.1
        return
    assert torch.equal(now.sequences, then.sequences)
    # bitsandbytes computes in bfloat16 on CPUs that have it.
    bound = 1e-2 if "bitsandbytes" in kind else 1e-5
    assert max(error(a, b) for a, b in zip(now.logits, then.logits, strict=True)) < bound
    generated(
        model, kvtailor.cache_for(model, "snapkv(window=8) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=20")
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", MAKERS)
def test_the_projection_is_what_the_layer_does(kind: str) -> None:
    model, exact = made(kind), MAKERS[kind][2]
    if not exact:
        with pytest.raises(UnsupportedModel, match="does more than multiply by a matrix"):
            kvtailor.cache_for(model, CRITICAL)
        return
    kvtailor.cache_for(model, CRITICAL)
    module = attention_modules(model)[0]
    values = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    found = values @ output_weight(module, 4, 16).flatten(0, 1)
    assert error(found, module.o_proj(values)) < ROUNDING
    # The float weights that were quantised are others.
    plain = values @ build("llama").model.layers[0].self_attn.o_proj.weight.t()
    assert error(plain, module.o_proj(values)) > 1e-4


@pytest.mark.parametrize("kind", MAKERS)
def test_fingerprints_and_saving(kind: str, tmp_path: Path) -> None:
    model = made(kind)
    cache = kvtailor.cache_for(model, "full")
    generated(model, cache)
    cache.save(tmp_path / "cache")
    if weight_fingerprint(model) is None:
        # bitsandbytes has packed the weights for this CPU.
        with pytest.warns(UserWarning, match="no fingerprint of its model's weights"):
            kvtailor.load_cache(MAKERS[kind][0](), tmp_path / "cache")
        return
    kvtailor.load_cache(model, tmp_path / "cache")
    exact, again = weight_fingerprint(model), MAKERS[kind][0]()
    assert exact == weight_fingerprint(again), "the same weights, quantised again"
    assert weight_fingerprint(model) == weight_fingerprint(again)
    generated(again, kvtailor.cache_for(again, "full"))
    assert exact == weight_fingerprint(again), "the same weights, after a forward"
    with pytest.raises(CacheMisuse, match="saved from another model"):
        kvtailor.load_cache(build("llama"), tmp_path / "cache")
    for name in dict(_tensors_of(again.model.layers[1].mlp.up_proj)):
        changed = MAKERS[kind][0]()
        tensor = dict(_tensors_of(changed.model.layers[1].mlp.up_proj))[name]
        with torch.no_grad():
            first = tensor.as_strided((1,), (1,))
            first.copy_((first.float() * 0.5 + 1).to(first.dtype))
        assert weight_fingerprint(changed) != exact, f"{name} is no part of the fingerprint"


def _tensors_of(layer: Any) -> Any:
    """The codes and scales of a quantised layer."""
    weight = layer.weight
    if hasattr(weight, "__tensor_flatten__"):
        names = weight.__tensor_flatten__()[0]
        yield from ((name, getattr(weight, name)) for name in names if type(getattr(weight, name)) is torch.Tensor)
    elif getattr(weight, "quant_state", None) is not None:
        yield "codes", weight.data
        yield "absmax", weight.quant_state.absmax
    else:
        yield "weight", weight.data


class _PackedLinear(torch.nn.Module):
    """As GPTQ and AWQ keep a layer: codes and scales are buffers that a checkpoint holds, and there is no parameter."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("qweight", (weight * 1000).round().to(torch.int32))
        self.register_buffer("scales", torch.full((weight.shape[0], 1), 1e-3))
        self.register_buffer("order", torch.arange(weight.shape[1]), persistent=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ (self.qweight * self.scales).T


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_one_changed_code_of_a_buffer_is_another_model(name: str) -> None:
    model = build("llama")
    layer = model.model.layers[1].mlp
    layer.down_proj = _PackedLinear(layer.down_proj.weight.detach())
    before, remembered = weight_fingerprint(model), remembered_fingerprint(model)
    layer.down_proj.order += 1
    assert weight_fingerprint(model) == before
    getattr(layer.down_proj, name).view(-1)[3] += 1
    assert weight_fingerprint(model) != before
    assert remembered_fingerprint(model) != remembered
