"""PEFT's own adapters: put on before and after the cache was made, switched, merged; and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build, error, prompts

peft = pytest.importorskip("peft", reason="PEFT is no dependency of kvtailor's; pip install peft to run this")

CRITICAL = "critical(of=snapkv(window=6)) @ tokens=12"
IDS, MASK = prompts((40, 27, 33))
TARGETS = ["q_proj", "v_proj", "o_proj"]


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)


def generated(model: Any, cache: Any) -> Any:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(input_ids=IDS, attention_mask=MASK, **hand_cache(cache), **options)


def check_alike(model: Any, own: Any, cache: Any, expected: Any = None, bound: float = 1e-5) -> None:
    """What one model does on our cache, and another on `expected`, or its own cache."""
    expected = DynamicCache(config=own.config) if expected is None else expected
    found, then = generated(model, cache), generated(own, expected)
    assert torch.equal(found.sequences, then.sequences)
    assert max(error(a, b) for a, b in zip(found.logits, then.logits, strict=True)) < bound


def adapted(state: int = 0, **options: Any) -> Any:
    model = build("llama", state=state)
    torch.manual_seed(9)
    return peft.get_peft_model(model, lora(**options)).eval()


KINDS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=[], init_ia3_weights=False),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=TARGETS, init_weights=False),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=TARGETS, total_step=10, init_lora_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_models_own_cache(kind: str) -> None:
    models = []
    for model in (build("llama"), build("llama")):
        torch.manual_seed(9)
        models.append(peft.get_peft_model(model, KINDS[kind]()).eval())
    # AdaLoRA begins with matrices so large that attention is sharper than float32.
    check_alike(*models, kvtailor.cache_for(models[0], "full"), bound=1e-3 if kind == "adalora" else 1e-5)
    plain = generated(build("llama"), None).logits[0]
    assert error(generated(models[1], None).logits[0], plain) > 1e-3, "the adapter changed nothing"
    if kind in ("lora", "rslora"):
        kvtailor.cache_for(models[0], CRITICAL)
    else:
        with pytest.raises(UnsupportedModel, match="cannot be read as a plain matrix"):
            kvtailor.cache_for(models[0], CRITICAL)


@pytest.mark.parametrize("plan", ["full", CRITICAL])
def test_an_adapter_after_the_cache_was_made(plan: str) -> None:
    base = build("llama")
    cache = kvtailor.cache_for(base, plan)
    torch.manual_seed(9)
    model = peft.get_peft_model(base, lora()).eval()
    own = adapted()
    check_alike(model, own, cache, None if plan == "full" else kvtailor.cache_for(own, plan))


@pytest.mark.parametrize("plan", ["full", CRITICAL])
def test_switched_off_and_on_and_merged_between_turns(plan: str) -> None:
    """Each time as the same is done to a model on its own cache, or on one under the plan whose weights are merged."""
    model, own = adapted(), adapted()
    if plan == "full":
        with model.disable_adapter():
            check_alike(model, build("llama"), kvtailor.cache_for(model, plan))
        check_alike(model, own, kvtailor.cache_for(model, plan))
    cache = kvtailor.cache_for(model, plan)
    expected = DynamicCache(config=own.config) if plan == "full" else kvtailor.cache_for(own, plan)
    check_alike(model, own, cache, expected)
    merged = model.merge_and_unload()
    turn = torch.cat([generated(own, None).sequences, IDS[:, -5:]], 1)
    mask = torch.cat([MASK, MASK.new_ones(3, turn.shape[1] - MASK.shape[1])], 1)
    logits = []
    for each, held in ((merged, cache), (own, expected)):
        new, seen = turn[:, held.get_seq_length() :], held.get_seq_length()
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, seen:]
        with torch.no_grad():
            logits.append(each(new, attention_mask=mask, position_ids=places, **hand_cache(held)).logits)
    assert error(*logits) < 1e-4


def test_two_adapters() -> None:
    models = [adapted(), adapted()]
    for model in models:
        torch.manual_seed(10)
        model.add_adapter("other", lora())
        model.set_adapter("other")
    check_alike(*models, kvtailor.cache_for(models[0], CRITICAL), kvtailor.cache_for(models[1], CRITICAL))
    cache = kvtailor.cache_for(models[0], "full")
    models[0].set_adapter("default")
    check_alike(models[0], adapted(), cache)


def test_an_adapter_that_cannot_be_read_is_refused_before_the_forward() -> None:
    """It was added after the cache was made; nothing has changed then, and the cache goes on without it."""
    base = build("llama")
    cache = kvtailor.cache_for(base, CRITICAL)
    with torch.no_grad():
        base(IDS, attention_mask=MASK, **hand_cache(cache))
    seen, held = cache.seen, cache.held()
    model = peft.get_peft_model(base, KINDS["ia3"]()).eval()
    token, mask = IDS[:, :1], torch.cat([MASK, MASK[:, -1:]], 1)
    with pytest.raises(UnsupportedModel, match="which is not LoRA"), torch.no_grad():
        model(input_ids=token, attention_mask=mask, **hand_cache(cache))
    assert cache.seen == seen and torch.equal(cache.held(), held)
    with torch.no_grad():
        model.unload()(token, attention_mask=mask, **hand_cache(cache))
    assert cache.seen == seen + 1


def test_a_saved_cache_is_of_its_adapter(tmp_path: Path) -> None:
    model = adapted()
    cache = kvtailor.cache_for(model, "full")
    generated(model, cache)
    cache.save(tmp_path / "cache")
    kvtailor.load_cache(adapted(), tmp_path / "cache")
    with model.disable_adapter(), pytest.raises(CacheMisuse, match="weights or adapters"):
        kvtailor.load_cache(model, tmp_path / "cache")
    with pytest.raises(CacheMisuse, match="weights or adapters"):
        kvtailor.load_cache(build("llama"), tmp_path / "cache")


LEARNED: dict[str, Callable[[], Any]] = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p_tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, task_type="CAUSAL_LM", encoder_hidden_size=16),
}


@pytest.mark.parametrize("kind", LEARNED)
def test_learned_tokens_are_refused(kind: str) -> None:
    model = peft.get_peft_model(build("llama"), LEARNED[kind]()).eval()
    with pytest.raises(UnsupportedModel, match="learned tokens or keys before each prompt"):
        kvtailor.cache_for(model, "full")
