"""llama.cpp's block formats against a loop in NumPy that is written from the format, number by number."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from tests.support.segments_of import states

from kvtailor.encode.ggml import Ggml
from kvtailor.ops.codes.ggml import FORMATS, GgmlCodes
from kvtailor.types import Layout

BITS = {"q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5}


def block_by_hand(block: np.ndarray, name: str) -> tuple[list[int], np.ndarray]:
    """The codes of 32 float32 numbers, and the numbers that they stand for in float32."""
    x = block.astype(np.float32)
    one, half = np.float32(1), np.float32(0.5)
    if name == "q8_0":
        step = np.float32(max(abs(x))) / np.float32(127)
        inverse = one / step if step else np.float32(0)
        codes = [math.copysign(math.floor(abs(float(each * inverse)) + 0.5), each) for each in x]
        return [int(code) for code in codes], np.array(codes, np.float32) * np.float32(np.float16(step))
    bits = int(name[1])
    if name.endswith("_1"):
        low = min(x)
        step = (max(x) - low) / np.float32(2**bits - 1)
        inverse = one / step if step else np.float32(0)
        codes = [min(2**bits - 1, int((each - low) * inverse + half)) for each in x]
        back = np.array(codes, np.float32) * np.float32(np.float16(step)) + np.float32(np.float16(low))
        return codes, back
    zero = 2 ** (bits - 1)
    largest = x[0] * np.float32(0)
    for each in x:
        if abs(each) > abs(largest):
            largest = each
    step = largest / np.float32(-zero)
    inverse = one / step if step else np.float32(0)
    codes = [min(2**bits - 1, int(each * inverse + np.float32(zero + 0.5))) - zero for each in x]
    return codes, np.array(codes, np.float32) * np.float32(np.float16(step))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "wide", "equal", "zero", "ties"])
def test_codes_and_numbers_are_those_of_a_loop(name: str, kind: str) -> None:
    x = states((2, 3, 96), 1)
    if kind == "wide":
        x = x * torch.logspace(-4, 3, 96)
    elif kind == "equal":
        x = torch.full_like(x, 0.37)
    elif kind == "zero":
        x[..., 32:64] = 0
    elif kind == "ties":
        x = (x * 8).round() / 2
    coded = GgmlCodes.of(x, name)
    back = coded.decode()
    for lane in range(2):
        for slot in range(3):
            for block in range(3):
                numbers = x[lane, slot, 32 * block : 32 * block + 32].numpy()
                _, expected = block_by_hand(numbers, name)
                found = back[lane, slot, 32 * block : 32 * block + 32].numpy()
                assert np.array_equal(found, expected), (lane, slot, block)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_ggml_s(name: str) -> None:
    assert Ggml(type=name).bytes_per_token(64, 128, 2) == (64 + 128) * BITS[name] / 8
    x = states((4, 10, 64), 2, torch.bfloat16)
    segment = Ggml(type=name).encode(Layout(rows=2, heads=2, size=10, start=0), x, x)
    held = sum(t.untyped_storage().nbytes() for t in segment.tensors().values())
    assert held == 2 * 40 * 64 * BITS[name] / 8


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
@pytest.mark.parametrize("name", FORMATS)
def test_the_package_gguf_makes_the_same_numbers(name: str) -> None:
    from gguf import GGMLQuantizationType, quants

    x = states((1, 50, 128), 3)
    kind = GGMLQuantizationType[name.upper()]
    theirs = quants.dequantize(quants.quantize(x[0].numpy(), kind), kind)
    assert np.array_equal(theirs, GgmlCodes.of(x, name).decode()[0].numpy())


def test_sides_may_differ() -> None:
    x = states((2, 8, 32), 4)
    segment = Ggml(key_type="q4_0", value_type="q8_0").encode(Layout(rows=1, heads=2, size=8, start=0), x, x)
    keys, values = segment.decode()
    assert torch.equal(keys, GgmlCodes.of(x, "q4_0").decode())
    assert torch.equal(values, GgmlCodes.of(x, "q8_0").decode())
    assert Ggml(key_type="q4_0").bits_of_keys == 4 and Ggml(key_type="q4_0").bits_of_values == 8


def test_numbers_above_float16_stay_finite() -> None:
    x = states((1, 4, 32), 5) * 1e30
    for name in FORMATS:
        assert bool(GgmlCodes.of(x, name).decode().isfinite().all()), name


@pytest.mark.parametrize(
    ("options", "message"),
    [({"type": "iq4_nl"}, "type must be one of q8_0"), ({"key_type": "f16"}, "key_type must be")],
)
def test_a_format_that_is_not_known_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ggml(**options)
