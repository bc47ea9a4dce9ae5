"""Attention over codes in torch alone against attention in float64 over what the codes stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.cpu.coded_layouts import GGML, LAYOUTS, every_dtype, states_of
from tests.ops.cpu.coded_truth import merges_ragged_lanes, same, truth
from tests.support.seam.zoo import build, error, prompts

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import dispatch
from kvtailor.ops.attention import folded_codes
from kvtailor.ops.attention.folded_codes import attend_coded, unsuited
from kvtailor.ops.codes.sides import ChannelCodes, TokenCodes
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole

# Floats, codes of levels, of points and signs are decoded where there are no kernels.
DECODED = ("plain", "levels", "grid", "signs", "nv", "mx", "fp", "fitted")
CODES = [name for name in LAYOUTS if not name.startswith(DECODED)]
# (b, h, g, t, s, d)
SIZES = [(1, 2, 4, 1, 63, 128), (3, 1, 1, 1, 600, 64), (2, 3, 3, 5, 130, 24), (1, 1, 7, 2, 1100, 80)]


@pytest.fixture(params=[False, True], ids=["floats", "bytes"])
def by_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Products of bytes, whatever this processor does best, and lanes of any length; small pieces."""
    if request.param and not folded_codes._products_are_exact():
        pytest.skip("torch's products of bytes overflow on this processor, and are not used on it")
    monkeypatch.setattr(folded_codes, "_byte_arithmetic", lambda: request.param)
    monkeypatch.setattr(folded_codes, "_LONG", 1)
    monkeypatch.setattr(folded_codes, "_PIECE", 1 << 13)
    monkeypatch.setattr(folded_codes, "_BYTES", 1 << 13)
    # Fewer lanes than there are.
    monkeypatch.setattr(folded_codes, "_WEIGHTS", 1 << 12)
    empty = torch.empty

    def poisoned(*shape: Any, **how: Any) -> torch.Tensor:
        made = empty(*shape, **how)
        return made.fill_(torch.nan if made.is_floating_point() else 77)

    monkeypatch.setattr(folded_codes.torch, "empty", poisoned)
    return bool(request.param)


@every_dtype
@pytest.mark.parametrize("layout", CODES)
def test_every_layout(dtype: torch.dtype, layout: str, by_bytes: bool) -> None:
    for index, (b, h, g, t, s, d) in enumerate(SIZES if dtype == torch.bfloat16 else SIZES[1:3]):
        keys, values = (LAYOUTS[layout](states) for states in states_of(index, dtype, b * h, s, d))
        assert unsuited(keys, values) is None
        query = torch.randn((b * h, g, t, d), generator=torch.Generator().manual_seed(9))
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1))
        assert same(found, truth(query, keys, values), 1e-4), (layout, s, d)


@every_dtype
@pytest.mark.parametrize("format", GGML)
def test_blocks_of_llama_cpp(dtype: torch.dtype, format: str, by_bytes: bool) -> None:
    for index, (n, g, t, s, d) in enumerate([(2, 4, 1, 63, 128), (3, 1, 1, 600, 64), (1, 7, 2, 300, 32)]):
        keys, values = (GGML[format](states) for states in states_of(index, dtype, n, s, d))
        assert unsuited(keys, values) is None
        query = torch.randn((n, g, t, d), generator=torch.Generator().manual_seed(9))
        found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1))
        assert same(found, truth(query, keys, values), 1e-4), (format, s, d)


def test_sides_of_unequal_width_masks_weights_and_large_queries(by_bytes: bool) -> None:
    keys = LAYOUTS["vector8"](states_of(1, torch.float32, 4, 300, 64)[0])
    values = LAYOUTS["channels2"](states_of(2, torch.float32, 4, 300, 40)[1])
    state = torch.Generator().manual_seed(5)
    query = torch.randn((4, 2, 3, 64), generator=state) * 30
    visible = torch.rand((4, 3, 300), generator=state) < 0.2
    visible[0, 0] = False
    log_weight = torch.rand((4, 300), generator=state) * 3
    found = attend_coded(AttentionInputs(query, keys, values, scaling=0.1, visible=visible, log_weight=log_weight))
    assert same(found, truth(query, keys, values, visible, log_weight), 1e-4)
    assert not same(found, truth(query, keys, values, visible), 1e-4)


@pytest.mark.parametrize("layout", ["vector8", "tokens4", "channels2"])
def test_ragged_lanes_are_read_to_their_length_and_merged_by_owner(layout: str, by_bytes: bool) -> None:
    merges_ragged_lanes(attend_coded, layout, 1e-4)


def test_tokens_that_have_moved_use_the_tables_they_were_coded_with(by_bytes: bool) -> None:
    whole, _ = states_of(6, torch.bfloat16, 3, 160, 64)
    keys, values = ChannelCodes.of(whole, 4, 32), ChannelCodes.of(whole.flip(1), 2, 32)
    state = torch.Generator().manual_seed(1)
    slot = torch.stack([torch.randperm(160, generator=state)[:70].sort().values for _ in range(3)])
    lane = torch.arange(3)[:, None].expand_as(slot)
    keys, values = keys.regather(lane, slot), values.regather(lane, slot)
    assert keys.row is not None
    query = torch.randn((3, 2, 1, 64), generator=state)
    assert same(attend_coded(AttentionInputs(query, keys, values, scaling=0.1)), truth(query, keys, values), 1e-4)


def test_a_query_that_is_no_number_gives_none(by_bytes: bool) -> None:
    keys, values = (TokenCodes.symmetric(each, 8) for each in states_of(3, torch.float32, 2, 70, 16))
    query = torch.randn(2, 1, 1, 16)
    query[0, 0, 0, 3] = torch.nan
    out, _ = attend_coded(AttentionInputs(query, keys, values, scaling=0.1))
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_other_sides_are_decoded() -> None:
    states = torch.randn(2, 40, 16)
    codes = TokenCodes.of(states, 4, 16)
    assert "Whole are decoded" in str(unsuited(codes, Whole(states=states)))
    elsewhere = replace(codes, codes=codes.codes.to("meta"))
    assert "on meta" in str(unsuited(elsewhere, codes))


@pytest.mark.parametrize("plan", ["vector(bits=8)", "kivi(bits=4, group=16, recent=16)"])
def test_where_nothing_was_compiled_no_segment_is_decoded(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "library", lambda: None)
    model = build("llama")
    ids, mask = prompts((50, 33))
    found = {}
    for which in ("auto", "reference"):
        cache = kvtailor.cache_for(model, plan)
        with torch.no_grad(), dispatch.using(which):
            model(ids, attention_mask=mask, **hand_cache(cache))
            if which == "auto":
                for kind in (TokenCodes, ChannelCodes):
                    monkeypatch.setattr(kind, "decode", None)
            more = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
            positions = (more.cumsum(-1) - 1)[:, -1:]
            found[which] = model(ids[:, :1], attention_mask=more, position_ids=positions, **hand_cache(cache)).logits
        monkeypatch.undo()
        monkeypatch.setattr(dispatch, "library", lambda: None)
    assert error(found["auto"], found["reference"]) < 1e-4
