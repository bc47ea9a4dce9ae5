"""Two layers of a model that share directions: the same logits as merged by hand, one storage, and whatever moves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.hf.cache import KvCache
from kvtailor.hf.versions import hand_cache
from tests.encode.test_minicache import naive
from tests.seam.test_modes import decoded
from tests.support.seam.zoo import ROUNDING, build, error, held_columns, prompts

PLAN = "minicache(block_size=8, retained=0.1)"
PLANS = (
    PLAN,
    "minicache(start=0.0, of=kivi(bits=4, group=8, recent=8))",
    "minicache(start=0.0, of=vector(block_size=8), only=values)",
    "minicache(start=0.0, of=lowrank(rank=1.0, heads=2, basis=random, block_size=8))",
)


def merged_by_hand(cache: DynamicCache, first: int, end: int) -> None:
    """Layers 1 and 2 of an uncompressed cache, as the paper leaves the tokens first..end of them; one row."""
    lower, upper = cache.layers[1], cache.layers[2]
    for name in ("keys", "values"):
        states = [getattr(layer, name)[0, :, first:end] for layer in (lower, upper)]
        for layer, merged in zip((lower, upper), naive(*states, 0.6, 0.1), strict=True):
            getattr(layer, name)[0, :, first:end] = merged


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
@torch.no_grad()
def test_every_step_is_that_of_a_cache_merged_by_hand(family: str) -> None:
    """The prompt's own logits are exact; then it is merged, and so are eight tokens once both layers have them."""
    model, (ids, _) = build(family), prompts((41,))
    plain, cache = DynamicCache(config=model.config), kvtailor.cache_for(model, PLAN)
    expected = model(ids, **hand_cache(plain)).logits
    assert error(model(ids, **hand_cache(cache)).logits, expected) < ROUNDING
    merged_by_hand(plain, 0, 41)
    for step in range(20):
        token = prompts((1,), state=step)[0]
        expected = model(token, **hand_cache(plain)).logits
        assert error(model(token, **hand_cache(cache)).logits, expected) < ROUNDING, f"step {step}"
        lengths = [0 if state.stored.tail is None else state.stored.tail.length for state in cache.engine.states]
        assert lengths == [42 + step, (step + 1) % 8, (step + 1) % 8]
        if (step + 1) % 8 == 0:
            merged_by_hand(plain, 34 + step, 42 + step)


@pytest.mark.parametrize("tokens", [24, 41])
@torch.no_grad()
def test_pairs_hold_what_sinks_and_recents_leave(tokens: int) -> None:
    """Both layers keep the first four and the newest, then merge what they kept."""
    model, (ids, _) = build("llama"), prompts((41,))
    plain = DynamicCache(config=model.config)
    cache = kvtailor.cache_for(model, f"streaming + {PLAN} @ tokens={tokens}")
    model(ids, **hand_cache(plain))
    model(ids, **hand_cache(cache))
    kept = torch.tensor([*range(4), *range(41 - tokens + 4, 41)])
    for layer in plain.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    merged_by_hand(plain, 0, tokens)
    token, at = prompts((1,), state=5)[0], torch.tensor([[41]])
    expected = model(token, **hand_cache(plain), position_ids=at).logits
    assert error(model(token, **hand_cache(cache), position_ids=at).logits, expected) < ROUNDING
    for step in range(45):
        model(prompts((1,), state=step)[0], **hand_cache(cache))
        ledger = cache.ledger()
        assert ledger.total == ledger.closed_form
        lower, upper = cache.engine.states[1:]
        assert torch.equal(held_columns(cache)[1], held_columns(cache)[2])
        assert all(
            one.shared is other.shared for one, other in zip(lower.stored.segments, upper.stored.segments, strict=True)
        )
    assert int(cache.held().max()) <= tokens + 32


def layer_bytes(cache: KvCache, layer: int) -> int:
    return sum(e.closed_form or 0 for e in cache.engine.states[layer].entries(layer) if e.stage == "encode")


def bytes_of_tensors(path: Path) -> int:
    """A saved cache's size without its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


@torch.no_grad()
def test_the_ledger_counts_what_is_shared_once() -> None:
    """40 tokens of 2 heads of 16 float32 channels: 80 directions of each side once, 4 retained of each."""
    model = build("llama")
    cache = kvtailor.cache_for(model, PLAN)
    model(prompts((40,))[0], **hand_cache(cache))
    ledger = cache.ledger()
    own = 2 * (80 * 4 + 8 * 16 * 4)
    assert layer_bytes(cache, 1) == 2 * (80 * 16 * 4) + own + 2 * 8 * 4 and layer_bytes(cache, 2) == own
    assert ledger.total == ledger.closed_form
    assert ledger.by_layer[1:] == [layer_bytes(cache, 1), layer_bytes(cache, 2)]


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_sharing_outlives_whatever_moves_rows(plan: str, tmp_path: Path) -> None:
    """Other rows, a copy, a file: as many bytes as a fresh cache of that batch has, and the same next token."""
    model, order = build("llama"), torch.tensor([2, 0, 2, 1])
    ids, mask = prompts((40, 33, 37))
    token = prompts((1,) * 4, state=9)[0]
    wide = torch.cat([mask[order], mask.new_ones(4, 1)], 1)
    _, fresh = decoded(model, ids[order], mask[order], plan, steps=0)
    expected = fresh.ledger().by_stage["encode"]
    logits = model(token, attention_mask=wide, **hand_cache(copy.deepcopy(fresh))).logits
    for move in ("reorder_cache", "batch_select_indices"):
        _, cache = decoded(model, ids, mask, plan, steps=0)
        getattr(cache, move)(order)
        cache.save(tmp_path / "cache.safetensors")
        loaded = kvtailor.load_cache(model, tmp_path / "cache.safetensors")
        # Beside what the ledger has, a file says of each token whether it is padding.
        assert bytes_of_tensors(tmp_path / "cache.safetensors") <= cache.ledger().total + 4 * 40
        for each in (cache, copy.deepcopy(cache), loaded):
            ledger = each.ledger()
            assert ledger.total == ledger.closed_form and ledger.by_stage["encode"] == expected
            found = model(token, attention_mask=wide, **hand_cache(each)).logits
            assert error(found, logits) < ROUNDING
    _, cache = decoded(model, ids, mask, plan, steps=0)
    cache.batch_repeat_interleave(2)
    assert cache.ledger().total == cache.ledger().closed_form


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_both_layers_hold_the_same_however_the_prompt_comes(plan: str) -> None:
    """In chunks, held until the end, after a recorded forward, and once more after a reset."""
    model, (ids, _) = build("llama"), prompts((50,))
    caches = [
        kvtailor.prefill(model, ids, plan=plan, chunk=16),
        kvtailor.prefill(model, ids, plan=plan, chunk=16, hold=True),
    ]
    recorded = kvtailor.cache_for(model, plan)
    recorded.activate_past_recording()
    model(ids, **hand_cache(recorded))
    recorded.crop(-3)
    model(ids[:, -3:], **hand_cache(recorded))
    model(ids[:, :2], **hand_cache(recorded))
    caches.append(recorded)
    again = kvtailor.prefill(model, ids, plan=plan)
    before = again.ledger().total
    again.reset()
    model(ids, **hand_cache(again))
    assert again.ledger().total == before
    for cache in [*caches, again]:
        lower, upper = cache.engine.states[-2:] if "start" not in plan else cache.engine.states[:2]
        assert lower.stored.segments and len(lower.stored.segments) == len(upper.stored.segments)
        assert torch.equal(lower.counts(), upper.counts()) and int(lower.counts()[0, 0]) == cache.seen
        assert cache.ledger().total == cache.ledger().closed_form


@torch.no_grad()
def test_layers_with_windows_of_the_models_own_lie_between() -> None:
    """gemma3's two layers that see all are a pair, whatever lies between them; above `start` there is none."""
    model = build("gemma3")
    cache = kvtailor.cache_for(model, "minicache(start=0.0)")
    model(prompts((40,))[0], **hand_cache(cache))
    lower, upper = cache.engine.states
    assert lower.stored.segments[0].shared is upper.stored.segments[0].shared
    assert cache.geometry.compressed == (1, 3)
    with pytest.raises(PlanError, match=r"minicache: start=0.5 leaves no two layers of 2.*write start=0.0"):
        kvtailor.cache_for(model, "minicache")
