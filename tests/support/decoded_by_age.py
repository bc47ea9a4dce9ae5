"""Decoding under plans that drop the oldest tokens behind a text's first ones, for comparing the ways to do so."""

from typing import Any

import torch
from tests.support.seam.zoo import VOCABULARY, build
from torch import Tensor

import kvtailor
from kvtailor.engine.state import LayerState
from kvtailor.hf.cache import KvCache
from kvtailor.hf.versions import hand_cache

__all__ = ["Decoded", "assert_same", "decoded", "held_columns", "logits_behind_padding"]

Decoded = tuple[list[Tensor], list[list[Tensor]], KvCache]
"""Logits (b, V) and each layer's held columns after each token, and the cache."""


@torch.no_grad()
def decoded(
    plan: str,
    *,
    rows: int,
    prompt: int,
    steps: int,
    by_scores: bool = False,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    model: Any = None,
) -> Decoded:
    """Read a prompt, and feed so many drawn tokens one by one; `by_scores`: evictions rank tokens by their scores."""
    model = model or build(family, dtype=dtype)
    cache = _cache(model, plan, by_scores)
    generator = torch.Generator().manual_seed(3)
    logits, columns = [], []
    for step in range(steps + 1):
        ids = torch.randint(3, VOCABULARY, (rows, 1 if step else prompt), generator=generator)
        logits.append(model(ids, **hand_cache(cache)).logits[:, -1])
        columns.append([held_columns(state) for state in cache.engine.states])
    return logits, columns, cache


@torch.no_grad()
def logits_behind_padding(
    plan: str, ids: Tensor, mask: Tensor, new: Tensor, *, by_scores: bool
) -> tuple[Tensor, KvCache]:
    """Read padded prompts (b, n), feed tokens (b, t) one by one, and return the last logits (b, 1, V) and the cache."""
    model = build("llama")
    cache, seen = _cache(model, plan, by_scores), mask
    model(ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0), **hand_cache(cache))
    for token in new.split(1, dim=1):
        seen = torch.cat([seen, seen.new_ones(seen.shape[0], 1)], 1)
        where = seen.sum(1, keepdim=True) - 1
        found = model(token, attention_mask=seen, position_ids=where, **hand_cache(cache))
    return found.logits, cache


def held_columns(state: LayerState) -> Tensor:
    """(b * h, n) of a layer whose rows and heads hold equally many tokens."""
    layouts = [part.layout for part in state.parts()]
    assert all(each.owner is None and each.lengths is None for each in layouts)
    return torch.cat([each.columns(torch.device("cpu")).expand(each.lanes, -1) for each in layouts], 1)


def assert_same(one: Decoded, other: Decoded) -> None:
    """What was answered and what was held is the same, bit for bit, after each token."""
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert torch.equal(one[2].held(), other[2].held())


def _cache(model: Any, plan: str, by_scores: bool) -> KvCache:
    cache = kvtailor.cache_for(model, plan)
    if by_scores:
        cache.engine.eviction.first = None
    return cache
