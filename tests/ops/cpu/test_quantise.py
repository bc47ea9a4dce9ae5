"""Codes that C++ makes against those that torch makes: every byte, step and minimum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cpu.coded_layouts import every_dtype, every_variant, needs_built
from torch import Tensor

from kvtailor.ops.codes import quantise_cpu as quantise
from kvtailor.ops.codes.gaussian import GaussianCodes
from kvtailor.ops.codes.nonuniform import LevelCodes, coded_by_levels
from kvtailor.ops.codes.quant import unpack
from kvtailor.ops.codes.quantise_cpu import (
    bell_codes,
    channel_codes,
    level_codes,
    symmetric_codes,
    token_codes,
    unsuited_states,
)
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.cpu.library import Library

pytestmark = needs_built
Codes = TokenCodes | ChannelCodes | LevelCodes | GaussianCodes
# (m, s, c): 63 tokens, odd heads, sizes that no vector divides, one token, none.
SIZES = [(2, 63, 128), (3, 70, 24), (1, 1, 80), (5, 33, 5), (2, 0, 16), (0, 7, 16), (1, 130, 1)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN, or a byte that stands out."""
    empty = torch.empty

    def filled(*shape: object, **how: object) -> Tensor:
        made = empty(*shape, **how)
        return made.fill_(torch.nan if made.is_floating_point() else 0xA5)

    monkeypatch.setattr(quantise.torch, "empty", filled)


def states_of(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    state = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=state) * torch.rand(shape[-1], generator=state) * 3
    made[:, 3:4] = 0
    made[:1, :20, :2] = 1.5
    return made.to(dtype)


def assert_same(found: Codes, wanted: Codes) -> None:
    assert found.numbers() == wanted.numbers()
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in wanted.tensors().items():
        mine = found.tensors()[name]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(
            mine, tensor, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: name + text
        )


def check(library: Library, states: Tensor, bits: int, group: int) -> None:
    size = states.shape[-1]
    for width in {size, next(each for each in range(min(group, size), 0, -1) if size % each == 0)}:
        assert_same(token_codes(states, bits, width, library), TokenCodes.of(states, bits, width))
    if bits > 1:
        assert_same(symmetric_codes(states, bits, library), TokenCodes.symmetric(states, bits))
    assert_same(channel_codes(states, bits, group, library), ChannelCodes.of(states, bits, group))


@every_variant
@every_dtype
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_size(library: Library, dtype: torch.dtype, bits: int) -> None:
    for seed, shape in enumerate(SIZES):
        for group in (8, 32):
            check(library, states_of(seed, dtype, *shape), bits, group)


@every_variant
@every_dtype
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("by_channel", [True, False], ids=["by channel", "by token"])
def test_levels_of_every_size(library: Library, dtype: torch.dtype, bits: int, by_channel: bool) -> None:
    """With no number, one, and many kept aside, with levels that are given, with tokens to which none is fitted."""
    state = torch.Generator().manual_seed(bits)
    given = torch.rand(2**bits, generator=state).sort().values
    for seed, shape in enumerate(each for each in SIZES if min(each)):
        states = states_of(seed, dtype, *shape)
        dense, whole = (torch.rand(shape[:2], generator=state) < share for share in (0.8, 0.1))
        for group, share, rest in (
            (32, 0.0, {}),
            (64, 0.01, {"dense": dense, "whole": whole}),
            (8, 0.3, {"dense": dense.T.contiguous().T, "levels": given}),
        ):
            asked = (states, bits, group, share)
            found = level_codes(*asked, by_channel=by_channel, using=library, **rest)
            assert_same(found, coded_by_levels(*asked, by_channel=by_channel, **rest))


@every_variant
@pytest.mark.parametrize("by_channel", [True, False], ids=["by channel", "by token"])
def test_levels_of_any_strides_and_threads(library: Library, threads: int, by_channel: bool) -> None:
    whole = states_of(9, torch.bfloat16, 2, 3 * 700, 48)
    by_token = whole.view(2, 700, 3, 48).transpose(1, 2).flatten(0, 1)
    for states in (whole[:, 5:680], whole[..., 8:40], whole[..., ::2], by_token, whole[:, :1].expand(2, 40, 48)):
        found = level_codes(states, 3, 64, 0.02, by_channel=by_channel, using=library)
        assert_same(found, coded_by_levels(states, 3, 64, 0.02, by_channel=by_channel))


@every_variant
@every_dtype
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("keep_norm", [True, False], ids=["norm kept", "norm of the levels"])
def test_a_bell_of_every_size(library: Library, dtype: torch.dtype, bits: int, keep_norm: bool) -> None:
    for seed, shape in enumerate([*filter(all, SIZES), (2, 9, 15), (1, 40, 256)]):
        for scale in (1.0, 1e-4, 200.0):
            states = states_of(seed, torch.float32, *shape).mul(scale).to(dtype)
            states[:, 4:5] *= 20
            found = bell_codes(states, bits, keep_norm=keep_norm, using=library)
            assert_same(found, GaussianCodes.of(states, bits, keep_norm=keep_norm))


@every_variant
@every_dtype
def test_a_bell_at_the_ends_of_a_dtype(library: Library, dtype: torch.dtype) -> None:
    """Squares overflow float32, or vanish; a length is beyond the dtype; all is zero."""
    info = torch.finfo(dtype)
    for scale in (info.tiny, info.max / 8, info.max):
        states = (states_of(1, torch.float32, 2, 20, 64).clamp(-1, 1) * min(scale, 3e38)).to(dtype)
        found = bell_codes(states, 3, keep_norm=True, using=library)
        assert found.scale.isfinite().all()
        assert_same(found, GaussianCodes.of(states, 3, keep_norm=True))
    assert bell_codes(torch.zeros(2, 0, 16, dtype=dtype), 4, keep_norm=True, using=library).codes.shape == (2, 0, 8)
    assert not bell_codes(torch.zeros(1, 3, 24, dtype=dtype), 4, keep_norm=True, using=library).decode().any()


@every_variant
@pytest.mark.parametrize("threads", [1, 3])
def test_a_bell_of_any_strides_and_threads(library: Library, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "_SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    whole = states_of(5, torch.bfloat16, 3, 300, 2 * 48)
    for states in (whole.transpose(0, 1), whole[:, ::3], whole[..., :48], whole[..., ::2]):
        found = bell_codes(states, 4, keep_norm=True, using=library)
        assert_same(found, GaussianCodes.of(states, 4, keep_norm=True))


@every_variant
@every_dtype
@pytest.mark.parametrize("scale", [1e-41, 1e-7, 6e-5, 2e4, 1e38])
def test_steps_at_the_ends_of_a_dtype(library: Library, dtype: torch.dtype, scale: float) -> None:
    """Steps that are rounded to the smallest numbers of the dtype, or are cut at its largest."""
    top = torch.finfo(dtype).max
    states = (states_of(7, torch.float32, 2, 40, 32) * scale).clamp(-top, top).to(dtype)
    for bits in (1, 2, 4, 8):
        check(library, states, bits, 16)


@every_variant
@every_dtype
def test_what_is_not_finite_spoils_its_own_group_alone(library: Library, dtype: torch.dtype) -> None:
    for wrong in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        states = states_of(8, dtype, 2, 40, 40)
        states[0, 5, 7] = states[1, 39, 39] = wrong
        states[0, 20] = wrong
        for bits in (2, 4, 8):
            check(library, states, bits, 8)
    assert channel_codes(states, 4, 8, library).low[0, 1].isfinite().all()


@every_variant
def test_halves_go_to_the_even_code(library: Library) -> None:
    """A step of 1 and a minimum of 0; the same around a zero of 7."""
    states = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 14.5, 15.0])[None, None]
    found = token_codes(states, 4, 8, library)
    assert unpack(found.codes, 4, 8).tolist() == [[[0, 0, 2, 2, 4, 4, 14, 15]]]
    states = torch.tensor([-7.0, -6.5, -1.5, -0.5, 0.0, 0.5, 2.5, 7.0])[None, None]
    found = symmetric_codes(states, 4, library)
    assert unpack(found.codes, 4, 8).tolist() == [[[0, 1, 5, 7, 7, 7, 9, 14]]]
    assert float(found.step) == 1


@every_variant
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_states_of_any_strides(library: Library, bits: int) -> None:
    whole = states_of(9, torch.bfloat16, 2, 3 * 70, 48)
    by_token = whole.view(2, 70, 3, 48).transpose(1, 2).flatten(0, 1)
    turned = whole.transpose(1, 2)
    for states in (whole[:, 5:68], whole[..., 8:40], whole[..., ::2], by_token, turned, whole[:, :1].expand(2, 40, 48)):
        check(library, states, bits, 16)


@every_variant
def test_threads_share_the_work_and_change_nothing(library: Library, threads: int) -> None:
    states = states_of(10, torch.bfloat16, 3, 700, 80)
    assert states.numel() > quantise._SMALL
    check(library, states, 4, 32)


@every_variant
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(library: Library, data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.integers(1, 3)), draw(st.integers(0, 150)), draw(st.integers(1, 140))
    bits, group, seed = draw(st.integers(1, 8)), draw(st.integers(1, 70)), draw(st.integers(0, 10**6))
    states = states_of(seed, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])), *shape) * draw(
        st.sampled_from([1, 1e-6, 1e3])
    )
    odd = draw(st.sampled_from([0.0, -0.0, torch.nan, torch.inf, 65504.0]))
    states[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.01] = odd
    check(library, states, bits, group)


def test_what_cannot_be_quantised_is_said() -> None:
    assert unsuited_states(torch.zeros(1, 1, 8)) is None
    assert "float64" in str(unsuited_states(torch.zeros(1, 1, 8).double()))
    with pytest.raises(ValueError, match=r"80 channels of \(1, 1, 80\) do not make groups of 32"):
        token_codes(torch.zeros(1, 1, 80), 4, 32)
