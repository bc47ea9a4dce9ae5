"""Merging in whole models: what is encoded stays as it is, and what cannot be merged is said."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.errors import CacheMisuse, PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.merge.asymkv import AsymKV
from kvtailor.merge.contract import Merger
from kvtailor.merge.drop import Drop
from kvtailor.plan import Plan
from kvtailor.score.contract import Scorer
from kvtailor.types import Held
from tests.support.seam.zoo import ROUNDING, build, error, prompts


def decoded(cache: kvtailor.KvCache, layer: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Keys and values in the segments of a layer, by owner and column."""
    found = {}
    for segment in cache.engine.states[layer].stored.segments:
        keys, values = segment.decode()
        columns = segment.layout.columns(keys.device).expand(segment.layout.lanes, -1)
        filled = segment.layout.filled(keys.device)
        filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
        owners = segment.layout.owners(keys.device)
        for lane, slot in filled.nonzero().tolist():
            found[int(owners[lane]), int(columns[lane, slot])] = keys[lane, slot], values[lane, slot]
    return found


@pytest.mark.parametrize("merger", ["d2o(all_of_them=true)", "cam(share=4)"])
@torch.no_grad()
def test_what_a_codec_has_encoded_never_takes_anything_in(merger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    plan = Plan.parse(f"snapkv(window=4) + {merger} + vector(bits=8, block_size=8) @ tokens=20, slack=4")
    kind, open_columns = type(plan.merge), []
    merge = kind.merge

    def recorded(self: Merger, held: Held, keep: Tensor, into: Tensor) -> object:
        columns = held.positions[0]
        open_columns.append({(head, int(columns[head, at])) for head, at in into[0].nonzero().tolist()})
        return merge(self, held, keep, into)

    cache = kvtailor.cache_for(model, plan)
    model(prompts((60,))[0], **hand_cache(cache))
    monkeypatch.setattr(kind, "merge", recorded)
    before = decoded(cache, 0)
    for token in prompts((12,), state=2)[0].split(1, 1):
        model(token, **hand_cache(cache))
    after = decoded(cache, 0)
    for at in before.keys() & after.keys():
        assert all(torch.equal(*pair) for pair in zip(before[at], after[at], strict=True))
    assert before.keys() & after.keys() and after.keys() - before.keys()
    assert len(open_columns) == 6 and all(open_columns)
    assert not any(before.keys() & columns for columns in open_columns)


@dataclass(frozen=True, kw_only=True)
class FirstOfRun(Scorer):
    """Every fourth token, where the prompt says each token four times."""

    def score(self, held: Held) -> Tensor:
        return (held.positions % 4 == 0).float()


@torch.no_grad()
def test_merging_equal_keys_changes_no_logit() -> None:
    """One layer without rotation, on which tokens that are said four times have equal keys and values."""
    model = build("llama", layers=1)
    model.model.rotary_emb.inv_freq.zero_()
    ids = prompts((13, 13))[0].repeat_interleave(4, 1)
    merging = Plan(score=FirstOfRun(), merge=AsymKV(), keep=0.25, slack="never")
    caches = [kvtailor.cache_for(model, plan) for plan in (merging, "full", replace(merging, merge=Drop()))]
    for tokens in (ids, *prompts((8, 8), state=2)[0].split(1, 1)):
        merged, full, dropped = (model(tokens, **hand_cache(cache)).logits for cache in caches)
        assert error(merged, full) < ROUNDING
    assert error(dropped, full) > 1e-2 and caches[0].ledger().held == 13 + 8


@torch.no_grad()
def test_the_newest_tokens_stay_in_the_tail_and_take_nothing_in() -> None:
    """Where only they are kept, merging with weights is dropping."""
    model = build("llama")
    plan = Plan.parse("pairs(window=6, sinks=0) + asymkv(window=6) @ tokens=6")
    caches = [kvtailor.cache_for(model, each) for each in (plan, replace(plan, merge=Drop()))]
    for tokens in (prompts((40,))[0], *prompts((4,), state=2)[0].split(1, 1)):
        assert torch.equal(*(model(tokens, **hand_cache(cache)).logits for cache in caches))


@pytest.mark.parametrize("tokens", [20, 33, 64])
@torch.no_grad()
def test_a_token_with_a_weight_costs_its_states_its_column_and_its_weight(tokens: int) -> None:
    """The closed form: (2 d) * 4 + 4 + 4 bytes for each of 2 heads on 3 layers, and the newest 6 without the last 4."""
    model = build("llama")
    cache = kvtailor.cache_for(model, f"pairs(window=6, sinks=2) + asymkv(window=6) @ tokens={tokens}")
    for length in (100, 150):
        cache.reset()
        model(prompts((length,))[0], **hand_cache(cache))
        ledger = cache.ledger()
        assert ledger.by_stage["encode"] == 3 * 2 * (tokens - 6) * (2 * 16 * 4 + 8)
        assert ledger.total == ledger.closed_form
    charged = sum(part.log_weight.untyped_storage().nbytes() for s in cache.engine.states for part in s.stored.segments)
    assert charged == 3 * 2 * (tokens - 6) * 4


@torch.no_grad()
def test_a_budget_of_bytes_pays_for_the_weights() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "pairs(window=6, sinks=2) + asymkv(window=6) @ bytes=48KiB")
    model(prompts((300,))[0], **hand_cache(cache))
    ledger = cache.ledger()
    stored = ledger.total - ledger.by_stage["observe"]
    assert 0.97 * 48 * 1024 < stored <= 48 * 1024


def test_a_plan_that_drops_nothing_has_nothing_to_merge() -> None:
    with pytest.raises(PlanError, match="cam works on what is not kept, but there is no scorer"):
        Plan.parse("kivi4 + cam")


def test_a_preset_and_a_method_beside_it() -> None:
    plan = Plan.parse("d2o @ tokens=64")
    assert str(plan) == "h2o + d2o @ tokens=64"
    assert str(Plan.parse("snapkv + d2o(all_of_them=true) + kivi(bits=4) @ tokens=64")) == (
        "snapkv + d2o(all_of_them=true) + kivi(bits=4) @ tokens=64"
    )
    assert plan.hash != Plan.parse("h2o @ tokens=64").hash


@torch.no_grad()
def test_values_that_overflow_are_said() -> None:
    model = build("llama", dtype=torch.float16)
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.mul_(torch.finfo(torch.float16).max).nan_to_num_()
    cache = kvtailor.cache_for(model, "knorm + d2o @ tokens=20")
    with pytest.raises(CacheMisuse, match="layer 0 of the compressed layers: d2o folds .* gets NaN or infinity"):
        model(prompts((60,))[0], **hand_cache(cache))
