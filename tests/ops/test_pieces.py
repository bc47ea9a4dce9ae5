"""Decoding in pieces gives what decoding at once gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvtailor.ops.codes import sides
from kvtailor.ops.codes.quant import dequantise, unpack
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.lanes.pieces import pieces


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("shape", [(1, 1, 4), (3, 63, 5), (40, 8, 16), (2, 100, 1), (7, 17, 3)])
@pytest.mark.parametrize("most", [1, 50, 333, 10**6])
def test_every_slot_is_in_one_piece(shape: tuple[int, int, int], most: int, multiple: int) -> None:
    lanes, slots, size = shape
    seen = torch.zeros(lanes, slots, dtype=torch.int64)
    for lane, slot in pieces(lanes, slots, size, most, multiple=multiple):
        seen[lane, slot] += 1
        assert slot.start % multiple == 0
        assert seen[lane, slot].numel() * size <= max(most, multiple * size)
    assert bool((seen == 1).all())


@pytest.mark.parametrize("piece", [1, 700, 1 << 20])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_are_decoded_alike(dtype: torch.dtype, bits: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(bits)
    monkeypatch.setattr(sides, "_PIECE", piece)
    for slots in (1, 15, 16, 63, 97):
        states = torch.randn(3, slots, 24, generator=generator).to(dtype) * 300
        each = ChannelCodes.of(states, bits, 16)
        step, low = (x.repeat_interleave(16, 1)[:, :slots] for x in (each.step, each.low))
        numbers = unpack(each.codes, bits, 24)
        assert torch.equal(each.decode(), torch.addcmul(low, numbers.to(dtype), step))
        lane, slot = torch.randint(3, (2, 40), generator=generator), torch.randint(slots, (2, 40), generator=generator)
        assert torch.equal(each.regather(lane, slot).decode(), each.decode()[lane, slot])
        token = TokenCodes.of(states, bits, 8)
        assert torch.equal(token.decode(), dequantise(unpack(token.codes, bits, 24), token.step, token.low, -1))
        if bits > 1:
            token = TokenCodes.symmetric(states, bits)
            centred = dequantise(unpack(token.codes, bits, 24), token.step, None, -1, zero=2 ** (bits - 1) - 1)
            assert torch.equal(token.decode(), centred)
