"""ModelOpt's formats of layers: the schema of its source, by the bits of each layer, and what they lack."""

from __future__ import annotations

import json

import pytest

from kvtailor.errors import ArgumentError
from kvtailor.plan import Plan
from kvtailor.plan.modelopt import formats_of
from kvtailor.version import __version__

NAMES = [f"model.layers.{layer}.self_attn" for layer in range(4)]


def quantization(text: str) -> dict[str, object]:
    return json.loads(formats_of(Plan.parse(text), NAMES).text())["quantization"]


def test_layers_that_differ_have_their_own_formats() -> None:
    """As the tests of ModelOpt's `convert_hf_quant_config_format` have the file."""
    made = formats_of(Plan.parse("by_layer(of=[fp8, nvfp4, plain], layers=[0, 1, 2, 0])"), NAMES)
    assert json.loads(made.text()) == {
        "producer": {"name": "kvtailor", "version": __version__},
        "quantization": {
            "kv_cache_quant_algo": "MIXED_PRECISION",
            "kv_cache_quantized_layers": {
                "model.layers.0.self_attn": {"quant_algo": "FP8"},
                "model.layers.1.self_attn": {"quant_algo": "NVFP4"},
                "model.layers.3.self_attn": {"quant_algo": "FP8"},
            },
            "kv_cache_schema_version": 1,
        },
    }
    assert made.whole == 1 and made.lacks == ""


@pytest.mark.parametrize(
    "text, algorithm",
    [
        ("fp8", "FP8"),
        ("nvfp4", "NVFP4"),
        ("sides(keys=fp8, values=nvfp4)", "FP8_K_NVFP4_V"),
        ("by_layer(of=[fp8, plain], layers=[0, 0, 0, 1])", "MIXED_PRECISION"),
    ],
)
def test_one_format_is_told_for_all_only_where_all_layers_have_it(text: str, algorithm: str) -> None:
    assert quantization(text)["kv_cache_quant_algo"] == algorithm


def test_what_the_formats_lack_is_told() -> None:
    def lacks(text: str) -> str:
        return formats_of(Plan.parse(text), NAMES).lacks

    assert (
        "other bits than the plan on 4 of 4 layers, on the first of them 4 for keys and 4 for values instead of 2"
        in (lacks("kivi(bits=2, recent=32)"))
    )
    assert "keeps no newest tokens whole, and the plan keeps 32" in lacks("kivi(bits=4, recent=32)")
    assert "drops no tokens, which the plan does" in lacks("snapkv + fp8 @ tokens=100")
    assert "sides differ, which the reader that was open refuses" in lacks("sides(keys=fp8, values=nvfp4)")
    assert lacks("fp8") == ""


@pytest.mark.parametrize(
    "text, why",
    [
        ("by_layer(of=[fp8, plain], layers=[0, 1])", "for 2: give the model"),
        ("full", "leaves every layer whole"),
        ("snapkv @ tokens=100", "leaves every layer whole"),
        ("palu", "in no number of bits"),
    ],
)
def test_plans_without_such_formats_are_refused(text: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        formats_of(Plan.parse(text), NAMES)
