"""Packed codes against those that torch makes: every bit of every tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, needs_triton
from torch import Tensor

from kvtailor.ops.codes.quant import pack
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes

pytestmark = needs_triton


def states(size: int, dtype: torch.dtype, slots: int = 63) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    made = torch.randn((2, slots, size), generator=generator) * torch.rand(size, generator=generator) * 3
    made[0, 3] = 0
    made[1, :20, 2] = 1.5
    return made.to(dtype)


def same(found: TokenCodes | ChannelCodes, wanted: TokenCodes | ChannelCodes) -> None:
    assert found.numbers() == wanted.numbers()
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensors()[name].cpu(), tensor), name


def check(size: int, bits: int, dtype: torch.dtype) -> None:
    from kvtailor.ops.codes.quantise_triton import channel_codes, symmetric_codes, token_codes, why_not_packed

    made = states(size, dtype)
    there = made.to(DEVICE)
    for group in {size, size // 2, 8}:
        if size % group == 0 and why_not_packed(there, bits, group) is None:
            same(token_codes(there, bits, group), TokenCodes.of(made, bits, group))
    same(symmetric_codes(there, bits), TokenCodes.symmetric(made, bits))
    for group in (16, 10):
        same(channel_codes(there, bits, group), ChannelCodes.of(made, bits, group))


@pytest.mark.parametrize(("size", "bits", "dtype"), [(24, 4, torch.float32), (80, 2, torch.float16)])
def test_bytes_are_the_same(size: int, bits: int, dtype: torch.dtype) -> None:
    check(size, bits, dtype)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "bits", "dtype"), list(itertools.product((5, 24, 64, 80, 128), (2, 4, 8), (torch.float32, torch.float16)))
)
def test_bytes_are_the_same_for_every_size(size: int, bits: int, dtype: torch.dtype) -> None:
    check(size, bits, dtype)


def test_states_that_are_cut_from_a_longer_buffer() -> None:
    from kvtailor.ops.codes.quantise_triton import channel_codes, token_codes

    cut = states(24, torch.float32)[:, 5:20]
    same(token_codes(cut.to(DEVICE), 4, 24), TokenCodes.of(cut, 4, 24))
    same(channel_codes(cut.to(DEVICE), 4, 8), ChannelCodes.of(cut, 4, 8))


def test_halves_are_rounded_to_even() -> None:
    from kvtailor.ops.codes.quantise_triton import token_codes

    # A step of 1 and a minimum of 0: what lies between two codes goes to the even one.
    made = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 14.5, 15.0])[None, None]
    found = token_codes(made.to(DEVICE), 4, 8)
    assert torch.equal(
        found.codes.cpu(), pack(torch.tensor([0, 0, 2, 2, 4, 4, 14, 15], dtype=torch.uint8)[None, None], 4)
    )


def test_says_what_it_cannot_pack() -> None:
    from kvtailor.ops.codes.quantise_triton import why_not_packed

    assert why_not_packed(torch.zeros(1, 1, 24), 3) == "codes of 2, 4 or 8 bits are written, found 3"
    assert why_not_packed(torch.zeros(1, 1, 80), 4, 16) == "groups of 16 channels cut across the 40 bytes of a token"
    assert why_not_packed(torch.zeros(1, 24, 4).transpose(1, 2), 4) is not None
    assert why_not_packed(torch.zeros(1, 1, 24), 4, 10) == "24 channels do not make groups of 10"
    assert "found meta" in str(why_not_packed(torch.zeros(1, 1, 24, device="meta"), 4))
