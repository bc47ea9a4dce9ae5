"""Models that compute their attention themselves: their products are followed, and refused where they are not clear."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.graphs.obstacles import obstacle
from kvtailor.hf.layers.products import Operand
from kvtailor.hf.versions import hand_cache
from tests.support.every_model.build import build
from tests.support.every_model.judge import error
from tests.support.every_model.pairs import every_pair
from tests.support.seam.zoo import ROUNDING

# In every release that is supported; GPT-J and others have moved to the interface.
MULTIPLYING = "gpt_neox_japanese"
SNAP = "snapkv(window=4) @ tokens=16"


def made(model_type: str):
    return build(next(pair for pair in every_pair() if pair.model_type == model_type))


def prompt(rows: int = 1, tokens: int = 40) -> Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["gptj", "falcon"])
def test_a_padded_batch_of_three_is_each_row_alone(model_type: str) -> None:
    model, ids = made(model_type), prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :7], mask[2, :15] = 0, 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = kvtailor.cache_for(model, SNAP)
    found = model.generate(ids, attention_mask=mask, **hand_cache(cache), **options)
    assert cache.held().max() <= 16 + 6
    for row in range(3):
        alone = ids[row : row + 1, int((1 - mask[row]).sum()) :]
        cache = kvtailor.cache_for(model, SNAP)
        solo = model.generate(alone, attention_mask=torch.ones_like(alone), **hand_cache(cache), **options)
        assert torch.equal(found[row, 40:], solo[0, alone.shape[1] :])


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["gptj", "falcon", "xglm", "gpt_neox_japanese"])
def test_plain_forwards_are_the_models_own_while_a_cache_of_ours_lives(model_type: str) -> None:
    model, ids = made(model_type), prompt(2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    own = model(ids, attention_mask=mask).logits
    cache = kvtailor.cache_for(model, SNAP)
    # Logits of padding mean nothing.
    real = mask.bool()
    assert error(model(ids, attention_mask=mask).logits[real], own[real]) < ROUNDING
    assert error(model(ids).logits[:1], own[:1]) < ROUNDING
    del cache
    assert model.config._attn_implementation != "kvtailor"
    assert torch.equal(model(ids, attention_mask=mask).logits, own)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused_and_nothing_changed() -> None:
    first, second, ids = made(MULTIPLYING), made(MULTIPLYING), prompt()
    cache, other = kvtailor.cache_for(first, "full"), kvtailor.cache_for(second, "full")
    with pytest.raises(CacheMisuse, match="made for another model than the gpt_neox_japanese"):
        second(ids, **hand_cache(cache))
    assert cache.seen == other.seen == 0
    assert torch.isfinite(first(ids, **hand_cache(cache)).logits).all() and cache.seen == 40


def test_dropout_is_refused() -> None:
    model = made(MULTIPLYING).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    with pytest.raises(CacheMisuse, match=r"call model.eval\(\) first"), torch.no_grad():
        model(prompt(), **hand_cache(kvtailor.cache_for(model, "full")))


def test_no_gradient_goes_through_it() -> None:
    model = made(MULTIPLYING)
    logits = model(prompt(), **hand_cache(kvtailor.cache_for(model, "full"))).logits
    with pytest.raises(CacheMisuse, match="no gradient"):
        logits.sum().backward()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (lambda q, k, v: (q @ k.transpose(-1, -2)).tanh() @ v, "calls torch's tanh on its logits"),
        (lambda q, k, v: k.sum(), "calls torch's sum on its keys"),
        (lambda q, k, v: (q @ k.transpose(-1, -2)) @ v, "multiplies its states in another order"),
        (lambda q, k, v: (q @ k.mT * torch.ones(40)).softmax(-1) @ v, "calls torch's mul on its logits"),
        (
            lambda q, k, v: q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2),
            r"keys that it has made \(1, 40, 16, 4\)",
        ),
        (lambda q, k, v: (q @ k.mT).softmax(-1) @ v.transpose(0, 1), r"values that it has made \(4, 1, 40, 16\) of"),
        (lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(1) @ v, "calls torch's softmax on its logits"),
        (lambda q, k, v: torch.cat([k, k]), "calls torch's cat on its keys"),
    ],
)
@torch.no_grad()
def test_what_is_not_understood_is_refused_and_the_cache_stays_as_it_was(what, sentence: str) -> None:
    model = made(MULTIPLYING)
    cache = kvtailor.cache_for(model, "full")
    states = torch.randn(1, 4, 40, 16)
    keys, values = cache.update(states, states, 0)
    assert isinstance(keys, Operand) and keys.shape == states.shape
    with pytest.raises(UnsupportedModel, match=sentence):
        what(states, keys, values)
    assert cache.seen == 0
    model(prompt(), **hand_cache(cache))
    assert cache.seen == 40


def test_falcon_with_alibi_is_refused() -> None:
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=r"adds a number to each attention logit by its position \(alibi=True\)"):
        kvtailor.cache_for(model, "full")


def test_graphs_are_refused() -> None:
    model = made(MULTIPLYING)
    why = obstacle(kvtailor.cache_for(model, "kivi4"), model)
    assert why is not None and "gpt_neox_japanese computes its attention itself" in why


def test_a_saved_cache_goes_on(tmp_path) -> None:
    model, ids = made(MULTIPLYING), prompt()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = kvtailor.cache_for(model, SNAP)
    first = model.generate(ids, **hand_cache(cache), **options)
    cache.save(tmp_path / "saved.safetensors")
    loaded = kvtailor.load_cache(model, tmp_path / "saved.safetensors")
    more = torch.cat([first, prompt(tokens=5)], 1)
    assert torch.equal(
        model.generate(more, **hand_cache(cache), **options), model.generate(more, **hand_cache(loaded), **options)
    )
