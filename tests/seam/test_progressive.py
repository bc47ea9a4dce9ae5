"""Layers that are cut again and again while a prompt goes through, down to an empty tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.uniform import Uniform
from kvtailor.encode.contract import Codec
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.plain import Plain
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.score.by_keys.knorm import KNorm
from tests.support.seam.zoo import ROUNDING, MaskedReference, build, error, held_columns, prompts


@dataclass(frozen=True, kw_only=True)
class Shrinking(Uniform):
    """20 tokens, and one less for kv head 0 with each layer that arrives."""

    scope: ClassVar[str] = "progressive"

    def allocate(self, request: BudgetRequest) -> Tensor:
        budgets = torch.full_like(request.capacity, 20)
        budgets[:, :, 0] -= len(request.layers)
        return torch.minimum(budgets, request.capacity)


@pytest.mark.parametrize("codec", [Plain(), Kivi(bits=4, group=8, recent=8)], ids=["plain", "kivi"])
@torch.no_grad()
def test_a_layer_without_a_tail_can_be_cut_again(codec: Codec) -> None:
    model, reference = build("llama"), MaskedReference("llama")
    ids, mask = prompts((56, 31))
    cache = kvtailor.cache_for(model, Plan(score=KNorm(), allocate=Shrinking(), encode=codec, tokens=20))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    token = model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits[:, -1:].argmax(-1)
    held = held_columns(cache)
    assert [columns.sum(-1).tolist() for columns in held.values()] == [[[17, 20]] * 2] * 3
    assert cache.ledger().total == cache.ledger().closed_form
    reference(ids, mask, {})
    mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    positions = mask.sum(-1, keepdim=True) - 1
    logits = model(token, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits
    if codec.exact:
        assert error(logits, reference(token, mask, held)) < ROUNDING
