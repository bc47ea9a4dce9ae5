"""Rocket and quest in a whole model: what C++ chooses where it lies is what torch chooses, and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvtailor
from kvtailor.attend import rocket
from kvtailor.ops import dispatch
from kvtailor.ops.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there are no C++ kernels")
PLANS = (
    "snapkv(window=6) + rocket(tokens=16, expect=40) @ tokens=48",
    "rocket(tokens=16, expect=40, turns=true, window=6, kernel=5)",
    "snapkv(window=6) + rocket(tokens=36, expect=8) @ tokens=40",
    # Segments of 8 tokens come while it decodes; pages of 4 of which the last has fewer.
    "quest(tokens=17, least=2, dense_layers=0) + indexed(page=4, block_size=8)",
)
# A prompt, tokens, a second turn and tokens.
FORWARDS = ((0, 60), *((i, i + 1) for i in range(60, 70)), (70, 80), *((i, i + 1) for i in range(80, 90)))


def sharp_model() -> LlamaForCausalLM:
    """Heads of 32 channels, which fill vectors in every variant, and queries that prefer some keys."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 40
    return model


@torch.no_grad()
@pytest.mark.parametrize("plan", PLANS)
def test_both_ways_choose_the_same(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = sharp_model(), torch.randint(3, 128, (2, 90), generator=torch.Generator().manual_seed(2))
    module, name = (dispatch, "best_pages") if "quest" in plan else (rocket, "read_chosen")
    read, found = getattr(module, name), []
    for in_place in (True, False):
        taken: list[Any] = []

        def counted(*args: Any, taken: list[Any] = taken, in_place: bool = in_place, **how: Any) -> Any:
            taken.append(read(*args, **how) if in_place else None)
            return taken[-1]

        monkeypatch.setattr(module, name, counted)
        cache, logits, tokens = kvtailor.cache_for(model, plan), [], []
        for first, end in FORWARDS:
            logits.append(model(ids[:, first:end], past_key_values=cache).logits[:, -1])
            tokens += [state.observed.tokens_read for state in cache.engine.states]
        found.append((logits, tokens, sum(each is not None for each in taken)))
    assert found[0][2] >= 36 and not found[1][2]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.allclose(one, other, atol=2e-5 * float(other.abs().max()))
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
