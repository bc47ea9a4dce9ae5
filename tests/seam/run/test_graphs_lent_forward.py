"""A model's forward is lent to its caches with `graphs=True`, and given back with the last of them."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.versions import hand_cache
from tests.support.seam.user_loop import KIVI, Loop, loops
from tests.support.seam.zoo import build, error, prompts

CLOSE = 1e-5


pytestmark = pytest.mark.usefixtures("tapes", "without_gradients")


class Stop(Exception):
    pass


@pytest.mark.parametrize("way", ["del", "exception", "interrupt", "while open"])
def test_the_forward_is_given_back_with_the_last_cache(way: str) -> None:
    model = build("llama")
    own, signature = model.forward, inspect.signature(model.forward)
    ids, mask = prompts((20, 13))
    cache = kvtailor.cache_for(model, KIVI, graphs=True)
    other = kvtailor.cache_for(model, "full", graphs=True)
    assert model.forward != own and inspect.signature(model.forward) == signature
    gc.disable()
    try:
        if way in ("exception", "interrupt"):
            kind = Stop if way == "exception" else KeyboardInterrupt

            def process(input_ids: Tensor, scores: Tensor) -> Tensor:
                if input_ids.shape[1] == 28:
                    raise kind
                return scores

            def run(cache: KvCache) -> None:
                model.generate(
                    ids, attention_mask=mask, **hand_cache(cache), logits_processor=[process], max_new_tokens=30
                )

            try:
                run(cache)
            except (Stop, KeyboardInterrupt) as raised:
                raised.__traceback__ = None
            assert cache.seen == 28
        else:
            model.generate(ids, attention_mask=mask, **hand_cache(cache), do_sample=False, max_new_tokens=12)
            if way == "del":
                cache.held()
        kept = weakref.ref(cache._guard.engine.states[0])
        del cache
        # Freed at once, open steps or not: nothing that is recorded refers to itself.
        assert kept() is None and "forward" in vars(model)
        del other
        assert "forward" not in vars(model) and model.forward == own
        assert model.config._attn_implementation == "sdpa"
    finally:
        gc.enable()


def test_a_model_that_is_dropped_is_freed() -> None:
    _, loop = loops()
    cache, model = loop.cache, weakref.ref(loop.model)
    cache.held()
    gc.disable()
    try:
        del loop
        assert model() is None
    finally:
        gc.enable()


def test_a_forward_that_was_replaced_since_stays() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "full", graphs=True)
    lent = model.forward
    model.forward = lambda *args, **given: lent(*args, **given)
    theirs = model.forward
    ids, _ = prompts((9,))
    expected = kvtailor.cache_for(model, "full")
    assert torch.equal(model(ids, **hand_cache(cache)).logits, model(ids, **hand_cache(expected)).logits)
    del cache
    assert model.forward is theirs
    assert torch.equal(model(ids).logits, build("llama")(ids).logits)
    with pytest.raises(UnsupportedModel, match="the forward of this LlamaForCausalLM was replaced"):
        kvtailor.cache_for(model, "full", graphs=True)


def test_copies_of_a_model_have_their_own_forward() -> None:
    plain, loop = loops()
    ids, _ = prompts((9,))
    for copied in (copy.deepcopy(loop.model), pickle.load(io.BytesIO(pickle.dumps(loop.model)))):
        for parameter in copied.parameters():
            parameter.mul_(0.9)
        assert error(copied(ids).logits, loop.model(ids).logits) > CLOSE
        assert copied.forward.__self__ is copied
        cache = kvtailor.cache_for(copied, KIVI, graphs=True)
        other = Loop(copied, cache)
        for _ in range(4):
            other.step()
        assert cache.replays.replayed == 4
        with pytest.raises(CacheMisuse, match="another model"):
            copied(input_ids=ids[:, :1].repeat(2, 1), position_ids=torch.full((2, 1), 17), **hand_cache(loop.cache))
        del cache, other
        assert "forward" not in vars(copied)
    assert error(loop.step(), plain.step()) < CLOSE


def test_other_caches_of_the_model_are_served_as_ever() -> None:
    plain, loop = loops()
    model = loop.model
    ids, mask = prompts((20, 13))
    told = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8}
    expected = build("llama").generate(ids, **told)
    assert torch.equal(model.generate(ids, **told), expected)
    assert torch.equal(model.generate(ids, **hand_cache(kvtailor.cache_for(model, "full")), **told), expected)
    found = kvtailor.generate(model, ids, mask, graphs=True, max_new_tokens=8)
    assert torch.equal(found.sequences, expected)
    assert error(loop.step(), plain.step()) < CLOSE
    assert loop.cache.replays.replayed == 6


@pytest.mark.parametrize("what", ["accelerate", "a hook of accelerate", "compiled", "a compiled part", "an adapter"])
def test_models_that_may_change_under_a_recording_are_refused(what: str) -> None:
    model = build("llama")
    if what == "accelerate":
        model.forward = torch.compile(model.forward, backend="eager")
    elif what == "a hook of accelerate":
        from accelerate.hooks import ModelHook, add_hook_to_module

        add_hook_to_module(model.model.layers[0], ModelHook())
    elif what == "compiled":
        model.compile(backend="eager")
    elif what == "a compiled part":
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    else:
        kind = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
        model.model.layers[0].self_attn.q_proj = kind(64, 64, bias=False)
    sentence = {
        "accelerate": "the forward of this LlamaForCausalLM was replaced",
        "a hook of accelerate": "its part 'model.layers.0' has a hook of accelerate",
        "compiled": "this LlamaForCausalLM is compiled",
        "a compiled part": "its part 'model.layers.1' is compiled",
        "an adapter": r"its part 'model.layers.0.self_attn.q_proj' is an adapter \(PEFT\)",
    }[what]
    with pytest.raises(UnsupportedModel, match=f"steps cannot be recorded and replayed: {sentence}.*decode without"):
        kvtailor.cache_for(model, "full", graphs=True)
    # Without graphs they work as ever.
    assert kvtailor.cache_for(model, "full").replays is None


def test_a_model_that_is_compiled_later_runs_plainly() -> None:
    plain, loop = loops()
    torch.compiler.reset()
    loop.model.compile(backend="eager")
    for _ in range(3):
        assert error(loop.step(), plain.step()) < CLOSE
    assert torch.equal(loop.cache.held(), plain.cache.held())
    assert loop.cache.replays.reasons["the call was compiled"] == 3
    torch.compiler.reset()


def test_a_program_that_ends_with_open_steps_says_nothing() -> None:
    program = """
import torch, kvtailor
from kvtailor.hf.graphs import replay
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import build, prompts
replay.recorder_of = lambda device: lambda run: run
model = build("llama", layers=1)
cache = kvtailor.cache_for(model, "full", graphs=True)
model.generate(prompts((9,))[0], **hand_cache(cache), do_sample=False, max_new_tokens=8)
assert cache.open_steps.done == 7
"""
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Exception ignored" not in ended.stderr, ended.stderr
