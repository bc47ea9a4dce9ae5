"""Tokens that are rounded before anything reads them: the model reads what a cache of codes would hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.seam.zoo import ROUNDING, build, prompts
from torch import Tensor
from transformers import DynamicCache

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.run.kept_prompt import why_own
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.types import Layout

CODECS = ["vector(bits=3)", "hadamard(of=ggml(type=q4_0))", "static_fp8(scale=0.05)", "mxfp4"]
FAMILIES = ["llama", "gpt_neox", "gemma3", "qwen2"]


class Written(DynamicCache):
    """transformers' cache whose full layers hold each token as a codec's round trip leaves it: what an engine reads."""

    def __init__(self, config: Any, codec: Any, layers: tuple[int, ...]):
        super().__init__(config=config)
        self.codec, self.rounds = codec, layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self.rounds:
            rows, heads, tokens, _ = keys.shape
            layout = Layout(rows=rows, heads=heads, size=tokens, start=0)
            found = self.codec.encode(layout, keys.flatten(0, 1), values.flatten(0, 1)).decode()
            keys, values = (each.unflatten(0, (rows, heads)) for each in found)
        return super().update(keys, values, layer_idx, *args, **more)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("codec", CODECS)
@torch.no_grad()
def test_a_prompt_and_what_follows_are_read_from_codes(family: str, codec: str) -> None:
    model = build(family, attention="eager")
    ids = torch.cat([prompts((37,))[0], torch.tensor([[5, 9, 12]])], 1)
    cache = kvtailor.cache_for(model, f"on_write(of={codec})")
    given = [fed(model, cache, ids[:, :20], None, keep=0), fed(model, cache, ids[:, 20:37], None, keep=0)]
    given += [fed(model, cache, ids[:, at : at + 1], None, keep=0) for at in range(37, 40)]
    layers = cache.geometry.compressed
    del cache
    other = Written(model.config.get_text_config(), Plan.parse(codec).encode, layers)
    expected = model(input_ids=ids, use_cache=True, **hand_cache(other)).logits
    plain = model(input_ids=ids).logits
    scale, apart = float(expected.abs().max()), float((plain - expected).abs().max())
    assert apart > 10 * ROUNDING * scale
    assert float((given[0] - expected[:, :20]).abs().max()) < ROUNDING * scale
    # What was rounded is held, and encoded once more when it leaves the tail: a code may be another one by then.
    assert float((torch.cat(given, 1) - expected).abs().max()) < 0.25 * apart


@torch.no_grad()
def test_a_padded_row_is_what_it_is_alone() -> None:
    model = build("llama")
    ids, mask = prompts((40, 23))
    both = fed(model, kvtailor.cache_for(model, "on_write(of=vector(bits=3))"), ids, mask, keep=1)
    alone = fed(model, kvtailor.cache_for(model, "on_write(of=vector(bits=3))"), ids[1:, -23:], None, keep=1)
    assert float((both[1] - alone[0]).abs().max()) < ROUNDING * float(alone.abs().max())


@torch.no_grad()
def test_layers_that_are_left_plain_round_nothing() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    first = fed(model, kvtailor.cache_for(model, "full"), ids, None, keep=0)
    plans = [f"by_layer(of=[plain, on_write(of=vector(bits=2))], layers={[0, 0, each]})" for each in (0, 1)]
    with pytest.raises(PlanError, match="no layer has"):
        Plan.parse(plans[0])
    last = kvtailor.cache_for(model, plans[1])
    assert not torch.equal(fed(model, last, ids, None, keep=0), first)
    whole = kvtailor.cache_for(model, "full")
    fed(model, whole, ids, None, keep=0)
    for mine, theirs in list(zip(last.engine.states, whole.engine.states, strict=True))[:2]:
        one, two = (each.stored.tail.as_segment() for each in (mine, theirs))
        assert torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values)


@pytest.mark.parametrize("codec", ["plain", "kivi(bits=4)", "channels"])
def test_codecs_that_have_no_code_of_a_token_that_comes_are_refused(codec: str) -> None:
    with pytest.raises(PlanError, match="on_write: "):
        Plan.parse(f"on_write(of={codec})")


def test_no_prompt_is_shared_with_other_plans() -> None:
    assert "rounds tokens" in str(why_own(Plan.parse("by_layer(of=[plain, on_write(of=mxfp4)])")))
    assert why_own(Plan.parse("mxfp4")) is None
