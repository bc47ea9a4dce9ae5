"""KVzip+: what a weighed repetition finds, against the model's own attention, values and projection, by plain loops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from kvtailor.score.by_repetition.kvzip_plus import KVzipPlus
from tests.support.held_rows import held_of, make_row
from tests.support.seam.zoo import ROUNDING, build, error, prompts

CHUNK, LEAD, SINKS = 17, 3, 2
# A slack keeps the evidence after the eviction, so that it can be looked at.
KEPT = f"kvzip_plus(chunk={CHUNK}, lead={LEAD}, sinks={SINKS}) @ keep=0.5, slack=64"
WORDS = torch.tensor([9, 4, 77])


@torch.no_grad()
def by_hand(model, ids: Tensor) -> list[Tensor]:
    """(h, n) for each layer of a Llama under eager attention, one row (n,) without padding."""
    config, n = model.config, len(ids)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = -(-n // -(-n // CHUNK))
    full = DynamicCache(config=config)
    model(ids[None], **hand_cache(full))
    found = [torch.zeros(kv_heads, n, dtype=torch.float64) for _ in model.model.layers]
    for start in range(0, n, size):
        end = min(n, start + size)
        new = torch.cat([WORDS, ids[max(0, start - LEAD) : start], ids[start:end]])
        states: list[Tensor] = []
        hooks = [
            layer.input_layernorm.register_forward_hook(lambda _, given, out, states=states: states.append(out[0]))
            for layer in model.model.layers
        ]
        out = model(new[None], **hand_cache(copy.deepcopy(full)), output_attentions=True)
        for hook in hooks:
            hook.remove()
        shared = [*range(SINKS), *range(max(SINKS, start), end), *range(n, n + len(new))]
        for number, layer in enumerate(model.model.layers):
            weights, projection = out.attentions[number][0].double(), layer.self_attn.o_proj.weight.double()
            values, width = full.layers[number].values[0].double(), config.head_dim
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                mine = projection[:, head * width : (head + 1) * width]
                for j in range(len(new)):
                    total = weights[head, j, shared].sum()
                    for i in range(start, end):
                        length = (mine @ values[kv_head, i]).norm() / states[number][j].double().norm()
                        got = weights[head, j, i] / total * length
                        found[number][kv_head, i] = max(found[number][kv_head, i], got)
    return found


def test_what_is_found_is_the_definition() -> None:
    """Grouped heads, three padded rows of unequal length, each against itself alone."""
    model, plain = build("llama"), build("llama", attention="eager")
    lengths = (37, 20, 9)
    ids, mask = prompts(lengths)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    cache = kvtailor.prefill(model, ids, mask, plan=KEPT, chunk=16, instruction=WORDS)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    for row, length in enumerate(lengths):
        for expected, state in zip(by_hand(plain, ids[row, -length:]), cache.engine.states, strict=True):
            got = state.observed.reconstruction[row]
            assert error(got[:, -length:], expected) < ROUNDING, f"layer {state.index} of row {row}"
            assert not got[:, :-length].any(), "padding was looked at"
    assert cache.held().double().mean() < ids.shape[1]


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "qwen3", "gemma3"])
def test_other_families_give_their_hidden_states(family: str) -> None:
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(build(family), ids, plan="kvzip_plus(chunk=17) @ tokens=20", instruction=WORDS)
    assert cache.held().double().mean() == 20


def test_layers_that_share_their_keys_are_refused_before_anything_is_fed() -> None:
    model, (ids, _) = build("gemma4_shared"), prompts((40,))
    cache = kvtailor.cache_for(model, "kvzip_plus @ tokens=20")
    with pytest.raises(CacheMisuse, match="several layers read one layer's keys"):
        kvtailor.prefill(model, ids, cache=cache)
    assert cache.seen == 0


def test_large_weights_stay_below_what_came_after_the_context() -> None:
    row = make_row(9, heads=3, group=2, size=7, generator=torch.Generator().manual_seed(1))
    scorer = KVzipPlus(sinks=1)
    held = held_of([row], scorer.needs)
    known = torch.tensor([0.1, 50.0, 0.9, 7.0, 0.0, 1.0, -1.0, -1.0, -1.0]).expand(1, 3, -1)
    object.__setattr__(held, "reconstruction", known)
    order = scorer.score(held).argsort(-1, descending=True)
    assert order[0].tolist() == [[0, 8, 7, 6, 1, 3, 5, 2, 4]] * 3


@pytest.mark.parametrize("name", ["chunk", "lead", "sinks"])
def test_refuses_what_makes_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match=f"kvzip_plus: {name} must be"):
        KVzipPlus(**{name: -1})
