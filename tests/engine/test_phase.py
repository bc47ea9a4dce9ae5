"""The phase of a cache: what goes together, what is refused, and what each phase means for forwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.support.every_plan import every_plan, first_of_each_method, plans_of_presets
from tests.support.seam.zoo import build, prompts

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
    Stopped,
)
from kvtailor.engine.reading import ReconstructionPass
from kvtailor.errors import CacheMisuse
from kvtailor.hf.model.calibrated import UNTRAINED
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.versions import hand_cache

PIECE = ReconstructionPass(
    columns=[torch.arange(3)], sinks=[torch.arange(1)], real=torch.ones((1, 2), dtype=torch.bool)
)
CASES = [*first_of_each_method(), *plans_of_presets()]
WAYS = ("deferred", "reconstructing", "speculating", "replaying", "record", "stop")


def enter(switch: PhaseSwitch, way: str) -> object:
    """Go a way, and return the context manager that leads back; None where a call ends it."""
    if way in ("record", "stop"):
        getattr(switch, way)()
        return None
    context = switch.reconstructing(PIECE) if way == "reconstructing" else getattr(switch, way)()
    context.__enter__()
    return context


def filled(plan: str = "full") -> tuple[Any, torch.Tensor, kvtailor.KvCache]:
    """A model, a prompt (1, 12), and a cache under a plan that has seen it."""
    model, ids = build("llama"), torch.arange(12)[None]
    cache = kvtailor.cache_for(model, plan)
    model(ids, **hand_cache(cache))
    return model, ids, cache


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
    if (first, second) in (("deferred", "reconstructing"), ("record", "record"), ("stop", "stop")):
        enter(switch, second)
        assert isinstance(switch.now, Reconstructing | Recording | Stopped)
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
    model, ids, cache = filled("snapkv(window=2) @ tokens=6")
    held = cache.held()
    with rollback.speculating(cache.engine):
        with pytest.raises(CacheMisuse, match="speculates, and has not settled"):
            cache.activate_past_recording()
        with pytest.raises(CacheMisuse, match="speculates, and has not settled"):
            kvtailor.prefill(model, ids, cache=cache, hold=True)
    assert torch.equal(cache.held(), held)


@torch.no_grad()
@pytest.mark.parametrize("use", ["forward", "crop", "save", "reorder"])
def test_a_cache_whose_steps_are_replayed_takes_nothing_else(use: str, tmp_path) -> None:
    """Before, another use was lost or mixed with the steps without a word."""
    from kvtailor.hf.graphs.replay import Replay

    model, ids, cache = filled()
    steps = Replay(model, cache, None, 4, lambda run: run)
    steps.step(ids[:, :1])
    with pytest.raises(CacheMisuse, match="being read by replayed steps that have not landed"):
        if use == "forward":
            model(ids[:, :1], **hand_cache(cache))
        elif use == "crop":
            cache.crop(-1)
        elif use == "save":
            cache.save(tmp_path / "cache")
        else:
            cache.reorder_cache(torch.tensor([0]))
    steps.step(ids[:, 1:2])
    steps.land()
    assert cache.seen == 14
    model(ids[:, 2:3], **hand_cache(cache))
    assert cache.seen == 15


@torch.no_grad()
def test_steps_cannot_land_in_a_cache_that_was_reset() -> None:
    from kvtailor.hf.graphs.replay import Replay

    model, ids, cache = filled()
    steps = Replay(model, cache, None, 4, lambda run: run)
    steps.step(ids[:, :1])
    cache.reset()
    with pytest.raises(CacheMisuse, match="was reset while steps were replayed"):
        steps.land()


@torch.no_grad()
@pytest.mark.parametrize("before", ["prompt lookup", "a crop", "nothing fed"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_recording_that_was_left_on_does_not_hinder_a_prefill(family: str, before: str) -> None:
    model, plan = build(family), "snapkv(window=2) @ tokens=24"
    ids, more = torch.arange(3, 31)[None] % 90, torch.arange(40, 56)[None]
    cache, plain = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    if before == "prompt lookup":
        text = ids.repeat(1, 2)
        told = {"max_new_tokens": 6, "do_sample": False}
        model.generate(text, **hand_cache(cache), prompt_lookup_num_tokens=3, **told)
        model.generate(text, **hand_cache(plain), **told)
    elif before == "a crop":
        model(ids, **hand_cache(plain))
        model(ids, **hand_cache(cache))
        cache.activate_past_recording()
        model(more[:, :2], **hand_cache(cache))
        cache.crop(-2)
    else:
        cache.activate_past_recording()
    for each in (cache, plain):
        kvtailor.prefill(model, more, cache=each, chunk=5, hold=True)
    assert torch.equal(cache.held(), plain.held())
    logits = [model(more[:, :1], **hand_cache(each)).logits for each in (cache, plain)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_prefill_that_is_refused_before_it_feeds_leaves_the_cache_as_it_was() -> None:
    model, ids, cache = filled()
    with rollback.speculating(cache.engine), pytest.raises(CacheMisuse, match="end that first"):
        kvtailor.prefill(model, ids[:, :4], cache=cache, hold=True)
    model(ids[:, :1], **hand_cache(cache))
    assert cache.seen == 13


@torch.no_grad()
@pytest.mark.parametrize("plan", ["full", "kivi(bits=4, group=8, recent=32)"])
def test_a_crop_may_come_after_a_recording_that_ended_without_one(plan: str) -> None:
    """The windows of gemma3 go on recording; what they no longer have is refused and never made up."""
    model, ids = build("gemma3"), torch.arange(3, 43)[None]
    cache, plain = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    cache.activate_past_recording()
    model(ids[:, :30], **hand_cache(cache))
    model(ids[:, :30], **hand_cache(plain))
    for i in range(30, 36):
        model(ids[:, i : i + 1], **hand_cache(cache))
        if i < 33:
            model(ids[:, i : i + 1], **hand_cache(plain))
    cache.crop(-3)
    logits = [model(ids[:, 39:], **hand_cache(each)).logits for each in (cache, plain)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case != "store: host"])
def test_what_a_stopped_cache_gives_is_what_it_gives_otherwise(case: str) -> None:
    """Its plan acts on new tokens behind their attention, so the last of them need not be acted on."""
    model = build("llama")
    setattr(model, UNTRAINED, True)
    plan, (ids, mask) = every_plan()[case], prompts((61, 40, 57))
    caches = [kvtailor.cache_for(model, plan) for _ in range(2)]
    for cache in caches:
        kvtailor.prefill(model, ids, mask, cache=cache)
    held = caches[1].held().clone()
    caches[1].engine.switch.stop()
    more = torch.arange(27).view(3, 9)
    mask = torch.cat([mask, torch.ones_like(more)], 1)
    plain, stopped = (fed(model, cache, more, mask) for cache in caches)
    assert torch.equal(plain, stopped)
    assert torch.equal(caches[1].held(), held + 9), "nothing of it was dropped"
