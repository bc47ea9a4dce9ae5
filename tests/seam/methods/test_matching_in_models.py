"""Matching in whole models: logits come closer, and a repetition gives its queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.merge.contract import Merged
from kvtailor.merge.matching import Matching
from kvtailor.plan import Plan
from kvtailor.types import Held
from tests.support.seam.folded import FoldedReference
from tests.support.seam.zoo import build, prompts


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_logits_come_closer_to_those_of_a_full_cache(family: str) -> None:
    """Sharp random models: what is dropped matters, and what is kept can say most of it."""
    model, (ids, mask) = build(family), prompts((160, 160, 131))
    budget = "tokens=48"
    plans = (
        "full",
        f"snapkv(window=6, kernel=5) + adakv @ {budget}",
        f"snapkv(window=6, kernel=5) + adakv + matching(window=6) @ {budget}",
    )
    logits = []
    for plan in plans:
        cache = kvtailor.cache_for(model, plan)
        model(ids, attention_mask=mask, **hand_cache(cache))
        more = torch.cat([mask, mask.new_ones(3, 8)], 1)
        positions = (more.cumsum(-1) - 1)[:, -8:]
        forced = prompts((8, 8, 8), state=5)[0]
        logits.append(model(forced, attention_mask=more, position_ids=positions, **hand_cache(cache)).logits)
    full, dropped, matched = logits
    assert (matched - full).square().mean() < 0.97 * (dropped - full).square().mean()


@torch.no_grad()
def test_queries_of_a_repetition_are_those_of_the_model_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 30 tokens and one of 21, fed a second time behind itself: every second query of that, or every."""
    model, (ids, mask) = build("llama"), prompts((30, 21))
    seen: list[Held] = []
    merge = Matching.merge

    def recorded(self: Matching, held: Held, keep: Tensor, into: Tensor) -> Merged:
        seen.append(held)
        return merge(self, held, keep, into)

    monkeypatch.setattr(Matching, "merge", recorded)
    cache = kvtailor.cache_for(model, Plan.parse("snapkv(window=4) + matching(repeat=24) @ tokens=12"))
    kvtailor.prefill(model, ids, mask, cache=cache)
    assert len(seen) == 3 and all(state.observed.repeated is None for state in cache.engine.states)
    for row, (length, stride) in enumerate(((30, 2), (21, 1))):
        alone = ids[row : row + 1, -length:]
        reference = FoldedReference("llama", lambda lane: lane.stays, window=length)
        reference(torch.cat([alone, alone], 1), torch.ones(1, 2 * length, dtype=torch.int64), {})
        for held, queries in zip(seen, reference.queries.values(), strict=True):
            there = held.repeated_columns[row] >= 0
            assert torch.allclose(held.repeated[row][:, there].double(), queries[0, :, ::stride], atol=1e-4)
