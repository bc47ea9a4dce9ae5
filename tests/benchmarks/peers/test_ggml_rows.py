"""Rows as ggml stores them: known bytes, what they stand for, and the bytes of the package `gguf` where it is there."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers.ggml_rows import BLOCK, KINDS, kind_of, kind_of_number
from kvtailor.errors import KvtailorError, UnknownName

QUANTISED = ("q8_0", "q4_0")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_a_block_of_q8_0_is_its_step_and_32_signed_bytes() -> None:
    # The largest magnitude is 127 steps of 2.
    block = torch.zeros(BLOCK)
    block[0], block[1], block[31] = 254.0, -3.1, -254.0
    found = kind_of("q8_0").encode(block)
    step = torch.tensor([2.0], dtype=torch.float16).view(torch.uint8).tolist()
    assert found.tolist() == [*step, 127, 254, *([0] * 29), 129]


def test_a_block_of_q4_0_has_its_lower_half_in_the_low_bits_and_the_sign_of_the_largest_in_the_step() -> None:
    block = torch.zeros(BLOCK)
    # Number 0 and number 16 share a byte. The largest is positive, so the step is negative: 16 / -8.
    block[0], block[16], block[1], block[2] = 16.0, -4.0, 2.0, 0.9
    found = kind_of("q4_0").encode(block)
    step = torch.tensor([-2.0], dtype=torch.float16).view(torch.uint8).tolist()
    # Codes: 16 / -2 + 8 = 0, -4 / -2 + 8 = 10, 2 / -2 + 8 = 7; a zero is 8, and 0.9 is nearest to it.
    assert found.tolist() == [*step, 0 | 10 << 4, 7 | 8 << 4, *([8 | 8 << 4] * 14)]
    block[2] = 0
    assert kind_of("q4_0").decode(found).tolist() == block.tolist()


def test_a_number_opposite_to_the_largest_is_cut_to_the_last_code() -> None:
    block = torch.zeros(BLOCK)
    block[3], block[4] = -8.0, 8.0
    back = kind_of("q4_0").decode(kind_of("q4_0").encode(block))
    # 8 would be code 16; 15 stands for 7 steps.
    assert back[3] == -8.0 and back[4] == 7.0


@pytest.mark.parametrize(("name", "size", "worst"), [("q8_0", 34, 0.57), ("q4_0", 18, 1.01)])
def test_a_block_has_its_bytes_and_is_off_by_half_a_step_at_most(name: str, size: int, worst: float) -> None:
    kind, states = kind_of(name), numbers(3, 5, 4 * BLOCK)
    rows = kind.encode(states)
    assert rows.shape == (3, 5, 4 * size) and rows.dtype == torch.uint8 and kind.row_bytes(4 * BLOCK) == 4 * size
    blocks = states.unflatten(-1, (-1, BLOCK))
    steps = blocks.abs().amax(-1, keepdim=True) / {"q8_0": 127, "q4_0": 8}[name]
    off = (kind.decode(rows).unflatten(-1, (-1, BLOCK)) - blocks).abs()
    # Half a step, and 127 or 8 times what float16 rounds off the step (2^-12 of it, up to 2^-11). q4_0 cuts what is
    # opposite to the largest by up to a whole step.
    assert (off <= worst * steps).all() and off.max() > 0


@pytest.mark.parametrize("name", QUANTISED)
def test_zeros_stay_zeros(name: str) -> None:
    zeros = torch.zeros(2, BLOCK)
    assert kind_of(name).decode(kind_of(name).encode(zeros)).tolist() == zeros.tolist()


@pytest.mark.parametrize(("name", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_plain_rows_are_the_numbers_of_their_dtype(name: str, dtype: torch.dtype) -> None:
    states = numbers(4, 6)
    rows = kind_of(name).encode(states)
    assert rows.shape == (4, 6 * dtype.itemsize)
    assert torch.equal(kind_of(name).decode(rows), states.to(dtype).float())
    assert kind_of(name).element_bytes() == dtype.itemsize


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_bytes_are_those_of_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    kind, states = kind_of(name), numbers(64, 4 * BLOCK)
    states[5] = 0
    theirs = gguf.GGMLQuantizationType(kind.number)
    assert theirs.name.lower() == name
    expected = torch.from_numpy(gguf.quants.quantize(states.numpy(), theirs)).view(torch.uint8)
    assert torch.equal(kind.encode(states), expected)
    assert torch.equal(kind.decode(expected), torch.from_numpy(gguf.quants.dequantize(expected.numpy(), theirs)))


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(KvtailorError, match="rows of 40 numbers: give a multiple of 32"):
        kind_of("q4_0").encode(numbers(2, 40))
    with pytest.raises(UnknownName, match="q8_0"):
        kind_of("q8")
    with pytest.raises(KvtailorError, match="type 13"):
        kind_of_number(13)
    with pytest.raises(KvtailorError, match="blocks of 32"):
        kind_of("q8_0").element_bytes()
    assert [kind_of_number(kind.number) for kind in KINDS.values()] == list(KINDS.values())
