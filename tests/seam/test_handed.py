"""A cache that is handed over and does not come to the layers is noticed, and nothing answers without it."""

from __future__ import annotations

import copy
from functools import wraps

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.handed import check_seen
from kvtailor.hf.versions import CACHE_ARGUMENT, hand_cache
from tests.support.seam.zoo import build, prompts

SNAP = "snapkv(window=6) @ tokens=16"


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gpt_neox", "gpt2", "gemma3"])
@pytest.mark.filterwarnings("ignore:all 3 layers", "ignore:no layer")
def test_gradient_checkpointing_in_training_mode_is_refused_where_it_takes_the_cache(family: str) -> None:
    model = build(family)
    ids, _ = prompts((30,))
    how = {"max_new_tokens": 4, "do_sample": False}
    with kvtailor.session(model, "full") as s:
        calls = {
            "generate": lambda: s.generate(ids, **how),
            "score": lambda: s.score(ids, ids[:, :9]),
            "plain": lambda: model.generate(ids, **hand_cache(s.cache()), **how),
            "ours": lambda: kvtailor.generate(model, ids, plan="full", max_new_tokens=4).sequences,
            "prefill": lambda: kvtailor.prefill(model, ids, plan=SNAP).held(),
        }
        expected = {name: call() for name, call in calls.items()}
        # Its name since 5.23, and before. Dropout would draw other numbers each time.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        reached = []
        hooks = [part.register_forward_pre_hook(lambda *_: reached.append(1)) for part in _layers(model)]
        with pytest.raises(CacheMisuse, match=r"gradient checkpointing is on .* model\.eval\(\)"):
            model(ids, **hand_cache(s.cache()))
        assert not reached
        for hook in hooks:
            hook.remove()
        # From 5.24 on a layer keeps its cache where gradients are off, but GPT-2 gives it none.
        own = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, **hand_cache(own))
        for name, call in calls.items():
            if own.get_seq_length():
                torch.testing.assert_close(call(), expected[name])
            else:
                with pytest.raises(CacheMisuse, match=r"gradient checkpointing is on .* model\.eval\(\)"):
                    call()
        # What is checked in training mode is nothing else.
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        torch.testing.assert_close(calls["score"](), expected["score"])


def _layers(model) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def _takes_from_layers(model) -> None:
    """As gradient checkpointing does: each layer is called without a cache."""
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, more: (args, {**more, **hand_cache(None)}), with_kwargs=True)


def _takes_from_decoder(model) -> None:
    """The outer forward hands no cache on, as use_cache=False does in some models."""
    model.model.register_forward_pre_hook(lambda _, args, more: (args, {**more, **hand_cache(None)}), with_kwargs=True)


def _takes_before_forwards(model) -> None:
    """As Phi-3 does: what prepares the inputs of a forward leaves the cache out."""
    _leaves_out_beyond(model, 0)


def _leaves_out_beyond(model, tokens: int) -> None:
    own = model.prepare_inputs_for_generation

    @wraps(own)
    def prepared(input_ids, **more):
        inputs = own(input_ids, **more)
        if input_ids.shape[1] > tokens:
            inputs.pop(CACHE_ARGUMENT)
        return inputs

    model.prepare_inputs_for_generation = prepared


THIEVES = [_takes_from_layers, _takes_from_decoder, _takes_before_forwards]


@pytest.mark.parametrize("take", THIEVES)
@pytest.mark.parametrize("family", ["llama", "mistral_window", "qwen3"])
@pytest.mark.filterwarnings("ignore:all 3 layers")
def test_whoever_takes_a_cache_away_is_noticed_in_the_first_forward(family: str, take) -> None:
    model = build(family)
    take(model)
    ids, _ = prompts((30,))
    with kvtailor.session(model, SNAP) as s:
        for call in (
            lambda: model.generate(ids, **hand_cache(s.cache()), max_new_tokens=3, do_sample=False),
            lambda: s.generate(ids, max_new_tokens=3, do_sample=False),
        ):
            with pytest.raises(CacheMisuse, match="was handed over"):
                call()
        if take is _takes_before_forwards:
            return
        for call in (
            lambda: s.score(ids, ids[:, :3]),
            lambda: kvtailor.prefill(model, ids, plan=SNAP),
            lambda: kvtailor.generate(model, ids, plan=SNAP, max_new_tokens=3),
            lambda: model(ids, **hand_cache(s.cache())),
            lambda: (model.model if take is _takes_from_layers else model)(ids, **hand_cache(s.cache())),
        ):
            with torch.no_grad(), pytest.raises(CacheMisuse, match="was handed over"):
                call()
        seen = torch.ones((1, 1, 30, 30), dtype=torch.bool).tril()
        with torch.no_grad(), pytest.raises(CacheMisuse, match="was handed over"):
            model(ids, attention_mask=seen, **hand_cache(s.cache()))


def test_a_cache_that_is_taken_away_in_the_midst_of_a_text_is_noticed() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    _leaves_out_beyond(model, 33)
    cache = kvtailor.cache_for(model, SNAP)
    with pytest.raises(CacheMisuse, match="was handed over"):
        model.generate(ids, **hand_cache(cache), max_new_tokens=8, do_sample=False)
    assert cache.seen == 33


def test_a_model_that_multiplies_itself_is_noticed_too() -> None:
    """Its attention comes by no function of ours, but adds our mask."""
    config = transformers.FalconConfig(
        vocab_size=131, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = kvtailor.cache_for(model, "full")
    for layer in model.transformer.h:
        layer.register_forward_pre_hook(lambda _, args, more: (args, {**more, "layer_past": None}), with_kwargs=True)
    with torch.no_grad(), pytest.raises(CacheMisuse, match="was handed over"):
        model(prompts((9,))[0], **hand_cache(cache))


def test_other_forwards_while_a_cache_is_alive_are_left_alone() -> None:
    model, other = build("llama"), build("llama", layers=1)
    ids, _ = prompts((30,))
    how = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **how)
    guided = model.generate(ids, guidance_scale=1.5, **how)
    cache = kvtailor.cache_for(model, "full")
    kept = kvtailor.cache_for(other, "full")

    class Asks(transformers.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            model(input_ids)
            other(input_ids)
            return scores

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids, cache):
            self.inner(ids)
            return self.inner(ids, **hand_cache(cache)).logits

    with torch.no_grad():
        assert torch.equal(model.generate(ids, **how), expected)
        model(ids)
        model(ids, attention_mask=torch.ones((1, 1, 30, 30), dtype=torch.bool).tril())
        Wrapper()(ids, copy.deepcopy(cache))
    asked = model.generate(ids, **hand_cache(copy.deepcopy(cache)), logits_processor=[Asks()], **how)
    assert torch.equal(asked, expected)
    assert torch.equal(model.generate(ids, **hand_cache(cache), guidance_scale=1.5, **how), guided)
    assert cache.seen == 33 and kept.seen == 0


def test_a_session_compares_what_was_written_with_what_was_read() -> None:
    with pytest.raises(CacheMisuse, match="seen 0 tokens, where the model read 33"):
        check_seen(0, 33, build("llama"))
