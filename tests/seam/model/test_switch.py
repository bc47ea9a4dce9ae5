"""A model's attention is ours while a cache of ours is alive, and its own again afterwards."""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
from collections import Counter
from contextlib import suppress

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaConfig

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.hf import switch as switch_module
from kvtailor.hf.versions import hand_cache
from tests.support.sampling import few
from tests.support.seam.zoo import build, prompts

SNAP = "snapkv(window=6) @ tokens=16"


def attention_of(model) -> str:
    gc.collect()
    return model.config.get_text_config(decoder=True)._attn_implementation


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_the_attention_comes_back_with_the_last_cache(own: str) -> None:
    model = build("llama", attention=own)
    first, second = kvtailor.cache_for(model, SNAP), kvtailor.cache_for(model, "full")
    ids, _ = prompts((30,))
    with torch.no_grad():
        model(ids, **hand_cache(first))
    copied = copy.deepcopy(first)
    del first
    assert attention_of(model) == "kvtailor"
    del second
    assert attention_of(model) == "kvtailor", "a copy of a cache is a cache"
    with torch.no_grad():
        model(ids[:, :1], **hand_cache(copied))
    del copied
    assert attention_of(model) == own
    third = kvtailor.cache_for(model, SNAP)
    assert attention_of(model) == "kvtailor"
    del third
    assert attention_of(model) == own


def test_a_loaded_cache_keeps_it_and_a_refused_plan_does_not(tmp_path) -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    with torch.no_grad():
        model(prompts((30,))[0], **hand_cache(cache))
    cache.save(tmp_path / "saved.safetensors")
    del cache
    assert attention_of(model) == "sdpa"
    loaded = kvtailor.load_cache(model, tmp_path / "saved.safetensors")
    assert attention_of(model) == "kvtailor"
    del loaded
    with pytest.raises(PlanError):
        kvtailor.cache_for(model, "nothing @ tokens=16")
    assert attention_of(model) == "sdpa"


def test_continuous_batching_works_before_and_after() -> None:
    """`generate_batch` takes no attention but its own few."""
    pytest.importorskip("psutil", reason="transformers reads free memory with it")
    model = build("llama", layers=1)
    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)

    def batch() -> list[list[int]]:
        found = model.generate_batch(
            inputs=[[5, 6, 7], [11, 12]],
            generation_config=config,
            continuous_batching_config=small,
            progress_bar=False,
        )
        return sorted(each.generated_tokens for each in found.values())

    before = batch()
    cache = kvtailor.cache_for(model, SNAP)
    model.generate(prompts((30,))[0], **hand_cache(cache), max_new_tokens=3, do_sample=False)
    del cache
    gc.collect()
    assert batch() == before


def test_another_attention_that_somebody_set_since_stays() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    model.set_attn_implementation("eager")
    del cache
    assert attention_of(model) == "eager"


def test_a_session_inside_leaves_a_live_cache_its_attention() -> None:
    model = build("llama", attention="eager")
    outer = kvtailor.cache_for(model, SNAP)
    with kvtailor.session(model, "full") as s:
        s.generate(prompts((30,))[0], max_new_tokens=2, do_sample=False)
    assert attention_of(model) == "kvtailor"
    del outer, s
    assert attention_of(model) == "eager"


def test_models_that_share_a_configuration_share_the_switch() -> None:
    config = build("llama").config
    one, other = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert one.config is other.config
    mine, theirs = kvtailor.cache_for(one, SNAP), kvtailor.cache_for(other, SNAP)
    del mine
    with torch.no_grad():
        other(prompts((30,))[0], **hand_cache(theirs))
    del one, theirs
    assert attention_of(other) == "sdpa"


def test_each_part_of_a_model_gets_back_its_own() -> None:
    """The picture encoder of a model has an attention of its own."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = build("llama").config.to_dict()
    config = transformers.LlavaConfig(
        vision_config={"model_type": "siglip_vision_model", **vision, "image_size": 28, "patch_size": 14},
        text_config=text,
    )
    model = transformers.LlavaForConditionalGeneration._from_config(config).eval()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    cache = kvtailor.cache_for(model, SNAP)
    del cache
    assert attention_of(model) == "sdpa" and model.config.vision_config._attn_implementation == "eager"
    with kvtailor.session(model, SNAP) as s:
        s.cache()
    assert attention_of(model) == "sdpa" and model.config.vision_config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_nothing_is_given_back_in_the_middle_of_a_forward(own: str) -> None:
    """A forward made its mask for our attention; the last cache dies before the forward's second layer."""
    model = build("llama", attention=own)
    ids, mask = prompts((30, 21))
    alone = model(ids, attention_mask=mask, **hand_cache(DynamicCache())).logits
    caches = [kvtailor.cache_for(model, SNAP)]
    during = []

    def drop(*_) -> None:
        caches.clear()
        during.append(attention_of(model))

    hook = model.model.layers[0].register_forward_hook(drop)
    got = model(ids, attention_mask=mask, **hand_cache(DynamicCache())).logits
    hook.remove()
    assert torch.allclose(got[mask.bool()], alone[mask.bool()], atol=1e-4)
    assert during == ["kvtailor"] and attention_of(model) == own


@torch.no_grad()
def test_threads_that_make_and_drop_caches_do_not_meet() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    alone = model(ids).logits
    faults: list[BaseException] = []

    def ours() -> None:
        try:
            for _ in range(4):
                cache = kvtailor.cache_for(model, SNAP)
                model(ids, **hand_cache(cache))
                del cache
                gc.collect()
        except BaseException as fault:  # A thread's own would be lost.
            faults.append(fault)

    def stock() -> None:
        try:
            for _ in range(16):
                assert torch.allclose(model(ids, **hand_cache(DynamicCache())).logits, alone, atol=1e-4)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=each) for each in (ours, ours, stock)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not faults
    assert attention_of(model) == "sdpa"


class OwnConfig(LlamaConfig):
    """A class of its own: caches of other tests may be alive, of models whose configuration is a `LlamaConfig`."""


def with_own_config(model):
    model.config.__class__ = OwnConfig
    return model


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("way", ["deepcopy", "deepcopy of the config", "copy of the config", "pickle", "torch.save"])
def test_a_copy_made_meanwhile_has_the_models_own_attention(way: str, own: str) -> None:
    """Nobody would ever give it back there."""
    model = with_own_config(build("llama", attention=own))
    cache = kvtailor.cache_for(model, SNAP)
    config = _copied_config(model, way)
    assert config._attn_implementation == own
    assert model.config._attn_implementation == "kvtailor"
    del cache
    assert attention_of(model) == own
    assert OwnConfig not in switch_module._reducers
    assert OwnConfig not in copyreg.dispatch_table


def _copied_config(model, way: str):
    if way == "deepcopy":
        copied = copy.deepcopy(model)
        ids, _ = prompts((9,))
        with torch.no_grad():
            found = copied(ids, output_attentions=model.config._attn_implementation == "eager")
            torch.testing.assert_close(found.logits, model(ids).logits)
        return copied.config
    if way == "deepcopy of the config":
        return copy.deepcopy(model.config)
    if way == "copy of the config":
        return copy.copy(model.config)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model)).config
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    return torch.load(held, weights_only=False).config


def test_a_deep_copy_of_an_eager_model_gives_its_attentions() -> None:
    model = build("llama", attention="eager")
    cache = kvtailor.cache_for(model, SNAP)
    reference = copy.deepcopy(model)
    del cache
    with torch.no_grad():
        found = reference(prompts((9,))[0], output_attentions=True).attentions
    assert len(found) == model.config.num_hidden_layers
    assert found[0].shape[-2:] == (9, 9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attentions_that_cannot_come_are_a_warning(attention: str) -> None:
    model = build("llama", attention=attention)
    cache = kvtailor.cache_for(model, SNAP)
    with torch.no_grad(), pytest.warns(UserWarning, match="output_attentions=True: .* none"):
        found = model(prompts((9,))[0], **hand_cache(cache), output_attentions=True)
    assert found.attentions == ()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(prompts((1,))[0], **hand_cache(cache))


def test_every_configuration_of_a_model_of_parts_is_copied_as_it_was() -> None:
    model = build("gemma3")
    parts = switch_module._configs(model)
    before = [part._attn_implementation for part in parts]
    cache = kvtailor.cache_for(model, SNAP)
    assert any(part._attn_implementation == "kvtailor" for part in parts)
    assert [copy.deepcopy(part)._attn_implementation for part in parts] == before
    del cache


def test_a_reducer_of_somebody_else_stays() -> None:
    model = with_own_config(build("llama"))

    def theirs(config):
        return type(config).from_dict, (config.to_dict(),)

    copyreg.pickle(type(model.config), theirs)
    try:
        cache = kvtailor.cache_for(model, SNAP)
        assert copy.deepcopy(model.config)._attn_implementation != "kvtailor"
        del cache
        gc.collect()
        assert copyreg.dispatch_table[type(model.config)] is theirs
    finally:
        copyreg.dispatch_table.pop(type(model.config), None)


def test_a_process_without_kvtailor_reads_what_was_saved_meanwhile(tmp_path) -> None:
    model = build("llama", layers=1)
    cache = kvtailor.cache_for(model, SNAP)
    torch.save(model, tmp_path / "model.pt")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    model.save_pretrained(tmp_path / "folder")
    assert "kvtailor" not in (tmp_path / "folder" / "config.json").read_text()
    del cache
    code = (
        "import pickle, sys, torch\n"
        "sys.modules['kvtailor'] = None\n"
        f"folder = {str(tmp_path)!r}\n"
        "first = torch.load(folder + '/model.pt', weights_only=False)\n"
        "second = pickle.load(open(folder + '/model.pickle', 'rb'))\n"
        "from transformers import AutoModelForCausalLM\n"
        "third = AutoModelForCausalLM.from_pretrained(folder + '/folder')\n"
        "ids = torch.tensor([[5, 6, 7]])\n"
        "with torch.no_grad():\n"
        "    found = [each(ids).logits for each in (first, second, third)]\n"
        "assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_at_any_line_leaves_the_models_own_attention() -> None:
    """Python swallows Ctrl-C inside the callback of a weak reference, and what was due is done all the same.

    Each line of the module is interrupted once, at each of its first visits, while a cache is made, used and dropped.
    """
    interrupted = 0
    visits = few(_visits(), 12)
    for code, line, visit in visits:
        model = with_own_config(build("llama", layers=1, attention="eager"))
        hit = _interrupted(model, code, line, visit)
        interrupted += hit
        gc.collect()
        found = model.config._attn_implementation
        assert found == "eager", f"interrupted at visit {visit} of line {line} in {code}: {found}"
        assert OwnConfig not in switch_module._reducers or not hit
    assert interrupted >= min(60, len(visits) // 2)


def _life_of_a_cache(model) -> None:
    cache = kvtailor.cache_for(model, SNAP)
    with torch.no_grad():
        model(prompts((9,))[0], **hand_cache(cache))
    del cache


def _visits() -> list[tuple[str, int, int]]:
    """(function, line, visit) of all lines of the module that a cache's life comes by."""
    counts: Counter[tuple[str, int]] = Counter()

    def trace(frame, event, _):
        if frame.f_code.co_filename != switch_module.__file__:
            return None
        if event in ("call", "line"):
            counts[frame.f_code.co_name, frame.f_lineno] += 1
        return trace

    model = build("llama", layers=1, attention="eager")
    sys.settrace(trace)
    try:
        _life_of_a_cache(model)
    finally:
        sys.settrace(None)
    return [(code, line, visit) for (code, line), count in counts.items() for visit in range(1, min(count, 3) + 1)]


def _interrupted(model, code: str, line: int, visit: int) -> bool:
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if frame.f_code.co_filename != switch_module.__file__:
            return None
        if event in ("call", "line") and (frame.f_code.co_name, frame.f_lineno) == (code, line):
            seen += 1
            if seen == visit:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    # Python reports what it swallows, and pytest keeps the report with all its frames, and so the cache.
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            _life_of_a_cache(model)
    finally:
        sys.settrace(None)
        sys.unraisablehook = before
    return seen >= visit
