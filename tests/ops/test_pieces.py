"""Decoding in pieces gives what decoding at once gives, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvtailor.ops.codes import nonuniform, sides
from kvtailor.ops.codes.nonuniform import coded_by_levels
from kvtailor.ops.codes.quant import dequantise, unpack
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.lanes import rotate
from kvtailor.ops.lanes.pieces import pieces
from kvtailor.types import Rotation


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


@pytest.mark.parametrize("piece", [1, 700, 3000])
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("slots", [63, 64, 97])
def test_levels_are_decoded_alike(by_channel: bool, slots: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes every number by itself: what its run's level, reach and least say."""
    generator = torch.Generator().manual_seed(slots)
    states = torch.randn(3, slots, 24, generator=generator).to(torch.bfloat16)
    side = coded_by_levels(states, 3, 16, 0.01, by_channel=by_channel)
    monkeypatch.setattr(nonuniform, "_PIECE", piece)
    found, codes = side.decode(), unpack(side.codes, 3, 24)
    aside = iter(zip(side.channels.tolist(), side.exact, strict=True))
    expected = torch.empty_like(found)
    for lane in range(3):
        for slot in range(slots):
            run = slot // 16
            at = (lane, run) if by_channel else (lane, slot)
            low, reach = (x[at].expand(24) for x in (side.low, side.reach))
            expected[lane, slot] = torch.addcmul(low, side.levels[lane, run][codes[lane, slot].long()], reach)
            for _ in range(int(side.counts[lane, slot])):
                channel, exact = next(aside)
                expected[lane, slot, channel] = exact
    assert torch.equal(found, expected)
    lane, slot = torch.randint(3, (2, 40), generator=generator), torch.randint(slots, (2, 40), generator=generator)
    assert torch.equal(side.regather(lane, slot).decode(), expected[lane, slot])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", [16, 21])
def test_states_are_turned_alike(size: int, lanes: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of all lanes or of each, and channels behind those that turn."""
    rotation = Rotation(frequencies=10.0 ** -torch.arange(8), interleaved=interleaved)
    states, positions = torch.randn(3, 63, size).to(torch.bfloat16), torch.randint(5000, (lanes, 63))
    whole = rotate.turn(states, positions, rotation)
    for piece in (1, 100, 999):
        monkeypatch.setattr(rotate, "_PIECE", piece)
        assert torch.equal(rotate.turn(states, positions, rotation), whole)
