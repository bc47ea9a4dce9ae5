"""KIVI's layout: keys along time, values along channels, and what its numbers promise."""

from __future__ import annotations

import pytest
import torch
from tests.support.seam.zoo import build
from tests.support.segments_of import states

from kvtailor import cache_for
from kvtailor.encode.kivi import Kivi, KiviSegment
from kvtailor.hf.versions import hand_cache
from kvtailor.types import Layout


def encoded(
    bits: int, slots: int, size: int, value_size: int, seed: int = 0
) -> tuple[KiviSegment, torch.Tensor, torch.Tensor]:
    keys, values = states((6, slots, size), seed), states((6, slots, value_size), seed + 1)
    return Kivi(bits=bits).encode(Layout(rows=2, heads=3, size=slots, start=0), keys, values), keys, values


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("slots", [1, 31, 32, 63, 128])
def test_no_error_above_half_a_step_of_its_group(bits: int, slots: int) -> None:
    segment, keys, values = encoded(bits, slots, 24, 64)
    found_keys, found_values = segment.decode()
    for first in range(0, slots, 32):
        run = keys[:, first : first + 32]
        half = (run.amax(1, keepdim=True) - run.amin(1, keepdim=True)) / (2**bits - 1) / 2
        assert bool(((found_keys[:, first : first + 32] - run).abs() <= half * 1.001 + 1e-6).all())
    for channel in range(0, 64, 32):
        run = values[..., channel : channel + 32]
        half = (run.amax(2, keepdim=True) - run.amin(2, keepdim=True)) / (2**bits - 1) / 2
        assert bool(((found_values[..., channel : channel + 32] - run).abs() <= half * 1.001 + 1e-6).all())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_uses_few_levels(bits: int) -> None:
    """A group of decoded keys has at most 2^bits values: nothing finer is hidden anywhere."""
    segment, _, _ = encoded(bits, 128, 24, 64)
    keys, values = segment.decode()
    for lane in range(2):
        for channel in range(24):
            assert keys[lane, :32, channel].unique().numel() <= 2**bits
        for token in range(8):
            assert values[lane, token, :32].unique().numel() <= 2**bits


def test_an_outlier_channel_of_keys_hurts_no_other() -> None:
    keys = states((1, 32, 24), 3)
    loud = keys.clone()
    loud[..., 5] *= 1000
    layout = Layout(rows=1, heads=1, size=32, start=0)
    quiet = [c for c in range(24) if c != 5]
    one, two = (Kivi(bits=4).encode(layout, k, k).decode()[0] for k in (keys, loud))
    assert torch.equal(one[..., quiet], two[..., quiet])


def test_a_value_size_that_the_group_does_not_divide_takes_the_largest_divisor() -> None:
    segment, _, _ = encoded(4, 32, 24, 40)
    assert segment.values.step.shape == (6, 32, 2)


def test_bytes_are_the_papers() -> None:
    """2 bits, groups of 32, 16-bit scales: 0.375 bytes an element; 4 bits: 0.625."""
    assert Kivi(bits=2).bytes_per_token(128, 128, 2) == 0.375 * 256
    assert Kivi(bits=4).bytes_per_token(128, 128, 2) == 0.625 * 256


def test_a_short_last_group_keeps_no_padding_alive() -> None:
    keys = states((1, 63, 16), 4)
    segment = Kivi(bits=8).encode(Layout(rows=1, heads=1, size=63, start=0), keys, keys)
    assert segment.keys.codes.untyped_storage().nbytes() == 63 * 16


def test_moving_drops_the_scales_that_nobody_uses() -> None:
    segment, _, _ = encoded(2, 128, 24, 64)
    lane = torch.arange(6)[:, None].expand(-1, 40)
    slot = torch.arange(30, 70)[None].expand(6, -1)  # of groups 0, 1 and 2 out of 4
    positions = slot.to(torch.int32).contiguous()
    moved = segment.regather(lane, slot, Layout(rows=2, heads=3, size=40, positions=positions))
    assert moved.keys.step.shape == moved.keys.low.shape == (18, 24)
    again = moved.regather(
        lane[:, :5], torch.arange(5).expand(6, -1), Layout(rows=2, heads=3, size=5, positions=positions[:, :5].clone())
    )
    assert again.keys.step.shape == (12, 24)
    assert torch.equal(again.decode()[0], segment.decode()[0][:, 30:35])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "kivi: bits must be 1 to 8, found 9"),
        ({"group": 1}, "group=32"),
        ({"recent": 100}, "recent=96"),
        ({"recent": 8}, "recent=32"),
        ({"recent": -32}, "must be 0 or a multiple of its group, and recent=-32"),
    ],
)
def test_bad_numbers_say_what_to_write(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kivi(**options)


def test_without_a_recent_window_all_of_a_prompt_is_encoded_and_then_whole_groups() -> None:
    model = build("llama")
    cache = cache_for(model, "kivi(bits=8, group=8, recent=0)")
    exact = cache_for(model, "full")
    ids = torch.randint(3, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    state, held = cache.engine.states[0], []
    with torch.inference_mode():
        for each in ids[:, :21], *ids[:, 21:].split(1, 1):
            ours = model(each, **hand_cache(cache)).logits
            theirs = model(each, **hand_cache(exact)).logits
            held.append(state.stored.tail.length)
            assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()
    assert held == [0, *[i % 8 for i in range(1, 20)]]
    assert [segment.layout.size for segment in state.stored.segments] == [21, 8, 8]
    ledger = cache.ledger()
    assert ledger.total == ledger.closed_form


def test_keys_and_values_can_have_other_bits_each() -> None:
    keys, values = states((6, 64, 24), 0), states((6, 64, 64), 1)
    layout = Layout(rows=2, heads=3, size=64, start=0)
    mixed = Kivi(key_bits=8, value_bits=2).encode(layout, keys, values)
    eight, two = Kivi(bits=8).encode(layout, keys, values), Kivi(bits=2).encode(layout, keys, values)
    assert torch.equal(mixed.decode()[0], eight.decode()[0]) and torch.equal(mixed.decode()[1], two.decode()[1])
    assert mixed.keys.codes.shape[-1] == 24 and mixed.values.codes.shape[-1] == 16
    assert Kivi(key_bits=8, value_bits=2).bytes_per_token(128, 128, 2) == 128 + 32 + 2 * 2 * (128 / 32 + 4)
    with pytest.raises(ValueError, match="kivi: value_bits must be 1 to 8, found 0"):
        Kivi(value_bits=0)


@pytest.mark.parametrize(("only", "coded"), [("keys", 0), ("values", 1)])
def test_one_side_alone_leaves_the_other_as_it_was(only: str, coded: int) -> None:
    keys, values = states((6, 63, 24), 0), states((6, 63, 40), 1)
    layout = Layout(rows=2, heads=3, size=63, start=0)
    both, one = Kivi(bits=3).encode(layout, keys, values), Kivi(bits=3, only=only).encode(layout, keys, values)
    given = keys, values
    assert torch.equal(one.decode()[coded], both.decode()[coded])
    assert torch.equal(one.decode()[1 - coded], given[1 - coded])
    assert not torch.equal(one.decode()[coded], given[coded])
    codec = Kivi(bits=3, only=only)
    # 3 bits, groups of 32 and 16-bit scales: 0.5 bytes for each element of the coded side.
    assert codec.bytes_per_token(64, 64, 2) == 64 * 0.5 + 64 * 2
    assert codec.lane_multiple == (32 if only == "keys" else 1)
