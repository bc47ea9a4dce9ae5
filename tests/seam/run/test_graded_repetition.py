"""KVgrad: what a repetition finds against the model's attention and gradients by plain loops, and what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvtailor
from kvtailor.errors import CacheMisuse, PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.score.by_repetition.kvgrad import KVgrad
from tests.support.kvpress_cases import recorded
from tests.support.kvpress_recipe import WHOLE, whole_ids, whole_weight
from tests.support.seam.zoo import build, error, held_columns, prompts

CHUNK, LEAD, SINKS = 17, 3, 2
# A slack keeps the evidence after the eviction, so that it can be looked at.
KEPT = f"kvgrad(chunk={CHUNK}, lead={LEAD}, sinks={SINKS}) @ keep=0.5, slack=64"
WORDS = torch.tensor([9, 4, 77])


def gradients(model, full: DynamicCache, new: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer of a Llama under eager attention (t,) lengths of gradients, and (q, t, n + t) probabilities."""
    taken: list[Tensor] = []

    def keep(module, given, output):
        output[0].retain_grad()
        taken.append(output[0])

    last: list[Tensor] = []
    hooks = [layer.self_attn.register_forward_hook(keep) for layer in model.model.layers]
    hooks.append(model.model.layers[-1].register_forward_hook(lambda module, given, output: last.append(output)))
    out = model(new[None], **hand_cache(copy.deepcopy(full)), output_attentions=True)
    for hook in hooks:
        hook.remove()
    (last[0][0] if isinstance(last[0], tuple) else last[0]).square().sum().backward()
    model.zero_grad()
    return [each.grad[0].norm(dim=-1) for each in taken], [each[0].detach() for each in out.attentions]


def by_hand(model, ids: Tensor) -> list[Tensor]:
    """(h, n) for each layer of a Llama in float64, one row (n,) without padding."""
    config, n = model.config, len(ids)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = -(-n // -(-n // CHUNK))
    full = DynamicCache(config=config)
    with torch.no_grad():
        model(ids[None], **hand_cache(full))
    found = [torch.zeros(kv_heads, n, dtype=torch.float64) for _ in model.model.layers]
    for start in range(0, n, size):
        end = min(n, start + size)
        new = torch.cat([WORDS, ids[max(0, start - LEAD) : start], ids[start:end]])
        lengths, attentions = gradients(model, full, new)
        shared = [*range(SINKS), *range(max(SINKS, start), end), *range(n, n + len(new))]
        for number, layer in enumerate(model.model.layers):
            projection, width = layer.self_attn.o_proj.weight.detach(), config.head_dim
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                mine = projection[:, head * width : (head + 1) * width]
                for j in range(len(new)):
                    total = attentions[number][head, j, shared].sum()
                    for i in range(start, end):
                        length = (mine @ full.layers[number].values[0, kv_head, i]).norm() * lengths[number][j]
                        got = attentions[number][head, j, i] / total * length
                        found[number][kv_head, i] = max(found[number][kv_head, i], got)
    return found


def test_what_is_found_is_the_definition() -> None:
    """Grouped heads, three padded rows of unequal length, each against itself alone; the model stays as it was."""
    model, plain = build("llama"), build("llama", attention="eager").double()
    lengths = (37, 20, 9)
    ids, mask = prompts(lengths)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    learning = [each.requires_grad for each in model.parameters()]
    assert all(learning)
    with torch.inference_mode():
        cache = kvtailor.prefill(model, ids, mask, plan=KEPT, chunk=16, instruction=WORDS)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert [each.requires_grad for each in model.parameters()] == learning
    assert all(each.grad is None for each in model.parameters())
    for row, length in enumerate(lengths):
        for expected, state in zip(by_hand(plain, ids[row, -length:]), cache.engine.states, strict=True):
            got = state.observed.reconstruction[row]
            assert error(got[:, -length:], expected) < 1e-4, f"layer {state.index} of row {row}"
            assert not got[:, :-length].any(), "padding was looked at"
    assert cache.held().double().mean() < ids.shape[1]


@pytest.mark.parametrize("case", recorded()["whole_model"], ids=lambda case: f"pieces of {case['chunk']}")
def test_a_whole_model_keeps_what_kvpress_keeps(case: dict) -> None:
    """KVgradPress over the same model, tokens and pieces: every kept set, and the scores."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=WHOLE.width,
        intermediate_size=96,
        num_hidden_layers=WHOLE.layers,
        num_attention_heads=WHOLE.query_heads,
        num_key_value_heads=WHOLE.heads,
        head_dim=WHOLE.size,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model, (ids, words) = LlamaForCausalLM(config).eval(), whole_ids()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(whole_weight(name, *parameter.shape))
    kept = sum(len(head) for layer in case["kept"] for head in layer[0])
    line = f"kvgrad(chunk={case['chunk']}) + pooled(floor=0) @ keep={kept / 240}, slack=64"
    cache = kvtailor.prefill(model, ids[None], plan=line, instruction=words)
    for layer, columns in held_columns(cache).items():
        for head in range(2):
            assert columns[0, head].nonzero().flatten().tolist() == case["kept"][layer][0][head]
        found, theirs = cache.engine.states[layer].observed.reconstruction[0], torch.tensor(case["scores"][layer][0])
        # There the first four have the highest score of all and one more.
        torch.testing.assert_close(found[:, 4:], theirs[:, 4:], rtol=1e-3, atol=1e-6)


def test_a_gradient_is_what_a_small_step_changes() -> None:
    """By differences: the sum of squares behind the last layer, where one token's attention of layer 1 is nudged."""
    model = build("llama", attention="eager").double()
    ids, full = prompts((12,))[0][0], DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[None], **hand_cache(full))
    # The norms of a Llama are float32 whatever the rest is, so a smaller step drowns in their rounding.
    new, token, step = ids[:5], 2, 3e-3
    expected = gradients(model, full, new)[0][1][token]
    width = model.config.hidden_size

    @torch.no_grad()
    def objective(direction: Tensor) -> float:
        last: list[Tensor] = []

        def nudge(module, given, output):
            changed = output[0].clone()
            changed[0, token] += direction
            return (changed, *output[1:])

        hooks = [
            model.model.layers[1].self_attn.register_forward_hook(nudge),
            model.model.layers[-1].register_forward_hook(lambda module, given, output: last.append(output)),
        ]
        model(new[None], **hand_cache(copy.deepcopy(full)))
        for hook in hooks:
            hook.remove()
        return float((last[0][0] if isinstance(last[0], tuple) else last[0]).square().sum())

    steps = torch.eye(width, dtype=torch.float64) * step
    found = torch.tensor([(objective(each) - objective(-each)) / (2 * step) for each in steps])
    assert float(found.norm()) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "qwen3"])
def test_other_families_give_their_gradients(family: str) -> None:
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(build(family), ids, plan="kvgrad(chunk=17) @ tokens=20", instruction=WORDS)
    assert cache.held().double().mean() == 20


@pytest.mark.parametrize("family", ["gemma3", "gemma4_shared", "qwen3_next"])
def test_models_of_other_layers_get_no_cache(family: str) -> None:
    with pytest.raises(PlanError, match="through the whole model, and layers .* of their own, or read"):
        kvtailor.cache_for(build(family), "kvgrad @ tokens=20")


@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.q_proj", "mlp.act_fn"])
def test_a_module_that_lets_no_gradient_through_is_refused_before_anything_is_fed(part: str) -> None:
    """As a quantised layer does whose product has no backward: the rest of the gradient would be taken for all."""
    model, (ids, _) = build("llama"), prompts((40,))
    module = model.get_submodule(f"model.layers.1.{part}")
    module.register_forward_hook(lambda module, given, output: output.detach())
    cache = kvtailor.cache_for(model, "kvgrad @ tokens=20")
    with pytest.raises(CacheMisuse, match=rf"gives none: model.layers.1.{part} \(.*\) let none through"):
        kvtailor.prefill(model, ids, cache=cache)
    assert cache.seen == 0


def test_numbers_that_overflow_are_refused_before_anything_is_fed() -> None:
    model, (ids, _) = build("llama"), prompts((40,))
    model.model.layers[-1].mlp.down_proj.weight.data *= 1e30
    cache = kvtailor.cache_for(model, "kvgrad @ tokens=20")
    with pytest.raises(CacheMisuse, match="gives none: they are no finite numbers"):
        kvtailor.prefill(model, ids, cache=cache)
    assert cache.seen == 0


def test_a_session_does_not_take_it_for_another_cache() -> None:
    """A session warns of forwards over the model's own cache."""
    model, (ids, _) = build("llama"), prompts((40,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with kvtailor.session(model, "kvgrad(chunk=17) @ tokens=20") as session:
            session.generate(ids, max_new_tokens=2, do_sample=False)
            assert session.last is not None and session.last.held().double().mean() < 24
    assert not [each for each in told if "forwards inside kvtailor.session" in str(each.message)]


@pytest.mark.parametrize("name", ["chunk", "lead", "sinks"])
def test_refuses_what_makes_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match=f"kvgrad: {name} must be"):
        KVgrad(**{name: -1})
