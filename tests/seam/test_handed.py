"""A cache that is handed over and does not come to the layers is noticed, and nothing answers without it."""

from __future__ import annotations

import copy
from functools import wraps

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.handed import check_fed
from kvtailor.hf.versions import CACHE_ARGUMENT, hand_cache
from tests.support.seam.zoo import build, prompts

SNAP = "snapkv(window=6) @ tokens=16"
BORDER = 24
LONG_ROPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4 * BORDER,
    "original_max_position_embeddings": BORDER,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "sliding_window": None,
}


def long_rope_model(family: str):
    """A tiny model with long rope whose two sets of factors are far apart, and whose attention is not flat."""
    kinds = {"phi3": transformers.Phi3Config, "phimoe": transformers.PhimoeConfig}
    half = LONG_ROPE["hidden_size"] // LONG_ROPE["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + 3.0 * index for index in range(half)],
        "original_max_position_embeddings": BORDER,
        "factor": 4.0,
    }
    if family == "phimoe":
        rope |= {"short_mscale": 1.0, "long_mscale": 1.0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if family == "phimoe" else {}
    torch.manual_seed(3)
    config = kinds[family](**LONG_ROPE, **experts, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
class TestLongRope:
    """Beyond so many tokens these models turn keys otherwise, and transformers drops whatever cache there is."""

    def test_the_border_is_asked_of_the_model(self, family: str) -> None:
        assert kvtailor.cache_for(long_rope_model(family), "full").guard.border == BORDER

    @pytest.mark.parametrize("length", [BORDER - 8, BORDER + 1, BORDER + 30])
    def test_either_side_of_the_border_is_the_models_own_text(self, family: str, length: int) -> None:
        model = long_rope_model(family)
        ids, _ = prompts((length,))
        how = {"max_new_tokens": 8, "do_sample": False}
        expected = model.generate(ids, **how)
        cache = kvtailor.cache_for(model, "full")
        assert torch.equal(model.generate(ids, **hand_cache(cache), **how), expected)
        assert cache.seen == length + 7
        assert torch.equal(kvtailor.generate(model, ids, plan="full", max_new_tokens=8).sequences, expected)
        with kvtailor.session(model, "full") as s:
            assert torch.equal(s.generate(ids, **how), expected)
            assert s.last.seen == length + 7
        small = kvtailor.cache_for(model, SNAP)
        model.generate(ids, **hand_cache(small), **how)
        assert small.seen == length + 7
        if length > BORDER:
            assert small.held().max() < small.seen

    def test_a_second_turn_beyond_the_border_goes_on(self, family: str) -> None:
        model = long_rope_model(family)
        how = {"max_new_tokens": 4, "do_sample": False}
        cache = kvtailor.cache_for(model, "full")
        first = model.generate(prompts((BORDER + 3,))[0], **hand_cache(cache), **how)
        whole = torch.cat([first, prompts((5,), state=8)[0]], 1)
        assert torch.equal(model.generate(whole, **hand_cache(cache), **how), model.generate(whole, **how))

    @pytest.mark.parametrize("length", [BORDER, BORDER - 5])
    def test_what_would_cross_it_is_refused_before_any_forward(self, family: str, length: int) -> None:
        model = long_rope_model(family)
        ids, _ = prompts((length,))
        long_ids, _ = prompts((BORDER + 10,))
        how = {"max_new_tokens": 12, "do_sample": False}
        forwards = []
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        with kvtailor.session(model, "full") as s:
            for call in (
                lambda: model.generate(ids, **hand_cache(kvtailor.cache_for(model, "full")), **how),
                lambda: s.generate(ids, **how),
                lambda: s.score(ids, prompts((12,))[0]),
                lambda: kvtailor.generate(model, ids, plan="full", max_new_tokens=12),
                lambda: kvtailor.generate(model, ids, draft_plan=SNAP, max_new_tokens=12),
                lambda: kvtailor.generate(model, long_ids, plan=SNAP, chunk=10, max_new_tokens=2),
                lambda: kvtailor.prefill(model, long_ids, plan=SNAP, chunk=10),
                lambda: kvtailor.prefill(model, ids, plan="kvzip @ tokens=16"),
            ):
                with pytest.raises(CacheMisuse, match=f"beyond {BORDER} tokens"):
                    call()
        assert not forwards

    def test_a_forward_that_crosses_it_is_refused_and_nothing_has_changed(self, family: str) -> None:
        model = long_rope_model(family)
        cache = kvtailor.prefill(model, prompts((BORDER - 2,))[0], plan="full")
        with torch.no_grad(), pytest.raises(CacheMisuse, match=f"beyond {BORDER} tokens"):
            model(prompts((5,))[0], **hand_cache(cache))
        assert cache.seen == BORDER - 2
        with torch.no_grad():
            model(prompts((2,))[0], **hand_cache(cache))
        assert cache.seen == BORDER


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gpt_neox"])
def test_gradient_checkpointing_in_training_mode_works_or_is_refused(family: str) -> None:
    model = build(family)
    ids, _ = prompts((30,))
    how = {"max_new_tokens": 4, "do_sample": False}
    with kvtailor.session(model, "full") as s:
        expected = {
            "generate": s.generate(ids, **how),
            "score": s.score(ids, ids[:, :9]),
            "plain": model.generate(ids, **hand_cache(s.cache()), **how),
            "ours": kvtailor.generate(model, ids, plan="full", max_new_tokens=4).sequences,
        }
        model.gradient_checkpointing_enable()
        model.train()
        calls = {
            "generate": lambda: s.generate(ids, **how),
            "score": lambda: s.score(ids, ids[:, :9]),
            "plain": lambda: model.generate(ids, **hand_cache(s.cache()), **how),
            "ours": lambda: kvtailor.generate(model, ids, plan="full", max_new_tokens=4).sequences,
        }
        for name, call in calls.items():
            try:
                found = call()
            except CacheMisuse as refused:
                assert "model.eval()" in str(refused)
            else:
                torch.testing.assert_close(found, expected[name])
        try:
            cache = kvtailor.prefill(model, ids, plan=SNAP)
        except CacheMisuse as refused:
            assert "model.eval()" in str(refused)
        else:
            assert cache.seen == 30
        with pytest.raises(CacheMisuse, match=r"gradient checkpointing is on .* model\.eval\(\)"):
            model(ids, **hand_cache(s.cache()))


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
        check_fed(0, 33, build("llama"))
