"""Precision by age in whole models: padded rows, eviction beside it, kernels, saving, tiers, beams, rollback, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.seam.methods.test_codecs import check_rows_and_bytes, check_saved
from tests.seam.test_modes import decoded
from tests.support.seam.zoo import ROUNDING, build, error, prompts

import kvtailor
from kvtailor.encode.by_age import AgedSegment
from kvtailor.hf.versions import hand_cache
from kvtailor.types import PlainSegment, Segment

KIVI = "kivi(bits={}, group=8, recent=8)"
AGES = (20, 36)
THREE = f"by_age(of=[{KIVI.format(8)}, {KIVI.format(4)}, {KIVI.format(2)}], ages=[20, 36])"
# Codes of even steps often lie exactly half way between two of the next, where the last bit of a sum decides. Levels of
# `gaussian` never do, so that rows of a batch can be compared with the same rows alone.
LEVELS = "gaussian(bits={}, block_size=8, recent=8)"
UNEVEN = f"by_age(of=[{LEVELS.format(8)}, {LEVELS.format(5)}, {LEVELS.format(3)}], ages=[20, 36])"
MIXED = (
    "by_age(of=[sides(keys=unrotated(of=gaussian(bits=5, block_size=8)), values=gaussian(bits=8, block_size=8)), "
    "hadamard(of=vector(bits=4, block_size=8))], ages=[20])"
)
PLANS = (
    THREE,
    MIXED,
    f"by_layer(of=[plain, {THREE}, {KIVI.format(4)}])",
    f"snapkv(window=6) + {THREE} @ tokens=24",
    f"snapkv(window=6) + adakv + {UNEVEN} @ tokens=24, slack=6",
    f"h2o(recent=6) + {THREE} @ tokens=24, slack=3",
)


def aged(segments: list[Segment]) -> list[AgedSegment]:
    """Those that are encoded; what a plan that evicts often has left for more to come is not."""
    found = [each for each in segments if isinstance(each, AgedSegment)]
    assert found == [each for each in segments if not isinstance(each, PlainSegment)]
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_batched_equals_solo_and_bytes_are_the_closed_form(plan: str) -> None:
    check_rows_and_bytes("llama", plan, steps=40)


@pytest.mark.parametrize("plan", [THREE, PLANS[4]])
def test_a_saved_cache_goes_on_where_it_stopped(plan: str, tmp_path: Path) -> None:
    check_saved(plan, tmp_path / "cache.safetensors", steps=30)


@pytest.mark.parametrize("plan", [THREE, PLANS[3]])
@torch.no_grad()
def test_layers_live_elsewhere(plan: str, tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = prompts((63, 40, 31))
    forced = prompts((40, 40, 40), state=3)[0]
    here, _ = decoded(model, ids, mask, plan, steps=40, forced=forced)
    stored = (
        plan.replace(" @", f" + disk(folder={str(tmp_path)!r}) @")
        if "@" in plan
        else f"{plan} + disk(folder={str(tmp_path)!r})"
    )
    there, cache = decoded(model, ids, mask, stored, steps=40, forced=forced)
    assert torch.allclose(here, there, atol=2e-5)
    assert cache.ledger().total == cache.ledger().closed_form


@torch.no_grad()
def test_beams_in_low_precision_and_a_draft_that_is_taken_back() -> None:
    model = build("llama", dtype=torch.bfloat16)
    ids, mask = prompts((40, 29, 35))
    cache = kvtailor.cache_for(model, THREE)
    out = model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=40, do_sample=False, num_beams=2)
    assert out.shape == (3, 80) and cache.ledger().total == cache.ledger().closed_form
    model, tokens = build("llama"), prompts((30, 30), state=4)[0]
    logits = []
    for drafting in (False, True):
        cache = kvtailor.cache_for(model, THREE)
        model(prompts((40, 40))[0], **hand_cache(cache))
        if drafting:
            cache.activate_past_recording()
            model(prompts((5, 5), state=9)[0], **hand_cache(cache))
            cache.crop(-5)
        logits.append(torch.cat([model(tokens[:, i : i + 1], **hand_cache(cache)).logits for i in range(30)], 1))
    assert error(*logits) < ROUNDING


@pytest.mark.parametrize("plan", [THREE, PLANS[4]])
@torch.no_grad()
def test_no_token_is_in_fewer_bits_than_its_age_says(plan: str) -> None:
    """After a prompt none is in more either, but for those that share a block with a younger one."""
    model, evicts = build("llama"), "@" in plan
    ids, mask = prompts((90, 61))
    cache = kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache))
    late = 0
    for step in range(61):
        for state in cache.engine.states:
            seen = state.stored.seen
            for segment in aged(state.stored.segments):
                filled = segment.layout.filled(torch.device("cpu"))
                columns = segment.layout.columns(torch.device("cpu")).expand(segment.layout.lanes, -1)
                columns = columns if filled is None else columns[filled]
                assert columns.max() <= segment.newest
                levels = sum((seen - 1 - columns >= age).to(torch.int64) for age in AGES)
                assert (levels >= segment.level).all()
                late = (
                    max(late, int((seen - 1 - columns[levels > segment.level]).max().item() - AGES[segment.level]))
                    if (levels > segment.level).any()
                    else late
                )
            if step == 0:
                assert late < (1 if evicts else 8)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        model(prompts((1, 1), state=step)[0], attention_mask=mask, **hand_cache(cache))
    assert evicts or late < 16
    assert {each.level for each in aged(state.stored.segments)} == {0, 1, 2}


@pytest.mark.parametrize("plan", [THREE, MIXED, PLANS[2], f"snapkv(window=6) + {THREE} @ tokens=100, slack=6"])
@pytest.mark.parametrize(("context", "new"), [(9, 60), (63, 0), (150, 33), (150, 90)])
def test_bytes_are_known_before_a_run_where_nothing_is_dropped(plan: str, context: int, new: int) -> None:
    model = build("llama")
    ids = prompts((context + new,) * 2)[0]
    size = kvtailor.cache_size(model, plan, context=context, new_tokens=new, batch=2)
    cache = kvtailor.prefill(model, ids[:, :context], plan=plan)
    with torch.no_grad():
        for column in range(context, context + new):
            model(ids[:, column : column + 1], **hand_cache(cache))
    assert size.low <= cache.ledger().total <= size.high
    if "@" not in plan:
        assert size.exact and size.total == cache.ledger().total
