"""What comes nearest in other engines, and what they cannot express."""

import pytest

from kvtailor.fitting.engines import nearest_settings
from kvtailor.plan import Plan


def settings(text, **more):
    return {each.engine: each for each in nearest_settings(Plan.parse(text), **more)}


def test_eight_bits_are_what_engines_have():
    found = settings("kivi(bits=8)")
    assert found["vLLM"].setting == "--kv-cache-dtype fp8" and found["vLLM"].lacks == ""
    assert found["llama.cpp"].setting == "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"


def test_layers_that_are_not_encoded_are_skipped_where_an_engine_can():
    found = settings("by_layer(of=[plain, kivi(bits=8, recent=32)], layers=[0, 1, 1, 0])")
    assert found["vLLM"].setting == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 3"
    assert "one setting for all layers" in found["SGLang"].lacks


@pytest.mark.parametrize(
    "text, keys, values",
    [
        ("kivi(key_bits=8, value_bits=4)", "q8_0", "q4_0"),
        ("sides(keys=kivi(bits=8), values=plain)", "q8_0", "f16"),
        ("kivi(bits=4, only=values)", "f16", "q4_0"),
        ("hadamard(of=vector(bits=5, symmetric=false))", "q5_0", "q5_0"),
    ],
)
def test_each_side_has_its_own_width(text, keys, values):
    assert settings(text)["llama.cpp"].setting == f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}"


def test_a_codec_without_a_number_of_bits_has_no_neighbour():
    for text in ("channels", "minicache"):
        assert all(each.setting is None for each in settings(text).values()), text


def test_tokens_that_are_dropped_are_told_as_missing():
    found = settings("snapkv @ tokens=100")
    assert all(each.setting is None and "snapkv at 100 is missing" in each.lacks for each in found.values())
