"""The phase of a cache: what goes together, what is refused, and what each phase means for forwards."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.support.seam.zoo import build

import kvtailor
from kvtailor.engine import rollback
from kvtailor.engine.phase import (
    Compressing,
    Deferred,
    PhaseSwitch,
    Reconstructing,
    Recording,
    Replaying,
    Speculating,
)
from kvtailor.engine.reconstruct import ReconstructionPass
from kvtailor.errors import CacheMisuse

PIECE = ReconstructionPass(
    columns=[torch.arange(3)], sinks=[torch.arange(1)], real=torch.ones((1, 2), dtype=torch.bool)
)
WAYS = ("deferred", "reconstructing", "speculating", "replaying", "record")


def enter(switch: PhaseSwitch, way: str) -> object:
    """Go a way, and return the context manager that leads back; None for recording, which is ended by a call."""
    if way == "record":
        switch.record()
        return None
    context = switch.reconstructing(PIECE) if way == "reconstructing" else getattr(switch, way)()
    context.__enter__()
    return context


@pytest.mark.parametrize(("first", "second"), list(itertools.product(WAYS, WAYS)))
def test_only_a_reconstruction_inside_a_deferral_goes_together(first: str, second: str) -> None:
    switch = PhaseSwitch()
    if first == "reconstructing":
        with pytest.raises(CacheMisuse, match="repeats its context, and this cache evicts and encodes"):
            enter(switch, first)
        assert isinstance(switch.now, Compressing)
        return
    enter(switch, first)
    before = switch.now
    if (first, second) in (("deferred", "reconstructing"), ("record", "record")):
        enter(switch, second)
        assert isinstance(switch.now, Reconstructing | Recording)
        return
    with pytest.raises(CacheMisuse, match=r"asked for a phase .* end that first"):
        enter(switch, second)
    assert switch.now is before, "a refused change leaves the phase as it was"


def test_each_context_goes_back_even_after_an_error() -> None:
    switch = PhaseSwitch()
    for way, kind in (("speculating", Speculating), ("replaying", Replaying), ("deferred", Deferred)):
        with pytest.raises(ZeroDivisionError), getattr(switch, way)():
            assert isinstance(switch.now, kind)
            raise ZeroDivisionError
        assert isinstance(switch.now, Compressing)
    with switch.deferred():
        with switch.reconstructing(PIECE):
            assert isinstance(switch.now, Reconstructing) and switch.now.piece is PIECE
        assert isinstance(switch.now, Deferred)


def test_a_reset_inside_a_context_is_not_undone_by_its_end() -> None:
    switch = PhaseSwitch()
    with switch.deferred():
        switch.reset()
        switch.record(7)
    assert switch.now == Recording(7)


def test_a_layer_keeps_the_prompt_that_the_cache_gave_and_recording_ends_alone() -> None:
    switch = PhaseSwitch()
    switch.record(5)
    switch.go_on_recording()
    assert switch.now == Recording(5) and not switch.now.can_be_taken_back
    switch.record(None)
    assert switch.now == Recording(None) and switch.now.can_be_taken_back
    switch.end_recording()
    assert isinstance(switch.now, Compressing)
    with switch.speculating():
        switch.end_recording()
        assert isinstance(switch.now, Speculating)


@torch.no_grad()
def test_users_get_a_sentence_and_the_cache_stays_what_it_was() -> None:
    model = build("llama")
    ids = torch.arange(12)[None]
    cache = kvtailor.cache_for(model, "snapkv(window=2) @ tokens=6")
    model(ids, past_key_values=cache)
    held = cache.held()
    with rollback.speculating(cache.engine):
        with pytest.raises(CacheMisuse, match="speculates, and has not settled"):
            cache.activate_past_recording()
        with pytest.raises(CacheMisuse, match="speculates, and has not settled"):
            kvtailor.prefill(model, cache, ids, hold=True)
    assert torch.equal(cache.held(), held)


@torch.no_grad()
@pytest.mark.parametrize("use", ["forward", "crop", "save", "reorder"])
def test_a_cache_whose_steps_are_replayed_takes_nothing_else(use: str, tmp_path) -> None:
    """Before, another use was lost or mixed with the steps without a word."""
    from kvtailor.hf.graphs.replay import Replay

    model = build("llama")
    ids = torch.arange(12)[None]
    cache = kvtailor.cache_for(model, "full")
    model(ids, past_key_values=cache)
    steps = Replay(model, cache, None, 4, lambda run: run)
    steps.step(ids[:, :1])
    with pytest.raises(CacheMisuse, match="being read by replayed steps that have not landed"):
        if use == "forward":
            model(ids[:, :1], past_key_values=cache)
        elif use == "crop":
            cache.crop(-1)
        elif use == "save":
            cache.save(tmp_path / "cache")
        else:
            cache.reorder_cache(torch.tensor([0]))
    steps.step(ids[:, 1:2])
    steps.land()
    assert cache.seen == 14
    model(ids[:, 2:3], past_key_values=cache)
    assert cache.seen == 15


@torch.no_grad()
def test_steps_cannot_land_in_a_cache_that_was_reset() -> None:
    from kvtailor.hf.graphs.replay import Replay

    model = build("llama")
    ids = torch.arange(12)[None]
    cache = kvtailor.cache_for(model, "full")
    model(ids, past_key_values=cache)
    steps = Replay(model, cache, None, 4, lambda run: run)
    steps.step(ids[:, :1])
    cache.reset()
    with pytest.raises(CacheMisuse, match="was reset while steps were replayed"):
        steps.land()
