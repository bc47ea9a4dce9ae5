"""What comes nearest in other engines, and what they cannot express."""

from itertools import product

import pytest
from tests.support.fitting.made_fits import made_fit

from kvtailor.errors import UnknownName
from kvtailor.fitting.engines import ENGINES, nearest_settings
from kvtailor.plan import Plan


def settings(text, **more):
    return {each.engine: each for each in nearest_settings(Plan.parse(text), **more)}


def test_eight_bits_are_what_engines_have():
    found = settings("fp8")
    assert found["vLLM"].setting == "--kv-cache-dtype fp8" and found["vLLM"].lacks == ""
    assert found["llama.cpp"].setting == "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"


def test_layers_that_are_not_encoded_are_skipped_where_an_engine_can():
    found = settings("by_layer(of=[plain, kivi(bits=8, recent=32)], layers=[0, 1, 1, 0])")
    assert found["vLLM"].setting == "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 0 3"
    assert "one setting for all layers" in found["SGLang"].lacks


@pytest.mark.parametrize(
    "text, keys, values",
    [
        ("kivi(key_bits=8, value_bits=4)", "q8_0", "q4_1"),
        ("sides(keys=kivi(bits=8), values=plain)", "q8_0", "f16"),
        ("kivi(bits=4, only=values)", "f16", "q4_1"),
        ("hadamard(of=vector(bits=5, symmetric=false))", "q5_1", "q5_1"),
        ("vector(bits=5)", "q5_0", "q5_0"),
        ("vector(bits=6)", "q5_0", "q5_0"),
        ("turboquant4", "q4_0", "q4_0"),
    ],
)
def test_each_side_has_its_own_width(text, keys, values):
    assert settings(text)["llama.cpp"].setting == f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}"


@pytest.mark.parametrize(
    "text, dtype",
    [
        ("fp8", "fp8"),
        ("kivi(bits=8)", "int8_per_token_head"),
        ("kivi4", "int4_per_token_head"),
        ("nvfp4", "nvfp4"),
        ("turboquant4", "turboquant_4bit_nc"),
        ("turboquant3", "turboquant_3bit_nc"),
        ("kivi(key_bits=8, value_bits=4)", "turboquant_k8v4"),
        ("kivi(bits=2)", "turboquant_3bit_nc"),
    ],
)
def test_the_nearest_of_vllm_has_the_plan_s_bits_and_form(text, dtype):
    assert settings(text)["vLLM"].setting == f"--kv-cache-dtype {dtype}"


def test_no_type_of_an_engine_is_nearer_than_the_one_that_is_taken():
    """By the definition, over all widths: the sum of the differences of bits."""
    for keys, values in product(range(1, 9), repeat=2):
        found = settings(f"kivi(key_bits={keys}, value_bits={values})")
        for engine in ENGINES:
            away = {each.option: abs(each.keys.bits - keys) + abs(each.values.bits - values) for each in engine.types}
            assert away[found[engine.name].setting] == min(away.values()), (engine.name, keys, values)


def test_neighbours_are_plans_and_every_engine_has_a_version_and_a_source():
    for engine in ENGINES:
        assert engine.version and engine.source
        for each in engine.types:
            assert each.neighbour is None or Plan.parse(each.neighbour)


def test_a_codec_without_a_number_of_bits_has_no_neighbour():
    for text in ("channels", "minicache"):
        assert all(each.setting is None for each in settings(text).values()), text


def test_tokens_that_are_dropped_are_told_as_missing():
    found = settings("snapkv @ tokens=100")
    assert all(each.setting and "snapkv at 100 is missing" in each.lacks for each in found.values())


def test_a_fit_names_the_setting_of_its_plan():
    made = made_fit(8)
    setting = made.export("vllm")
    assert setting in made.engines and setting == settings(made.plan)["vLLM"]
    with pytest.raises(UnknownName, match="vllm"):
        made.export("vlm")
