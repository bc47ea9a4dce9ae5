"""Models whose layers lie on several devices: every plan gives what it gives on one, and no two devices ever meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.ops.dispatch import using
from tests.seam.other_device.test_every_plan import ALONE, BATCH, CASES, _device, refused  # noqa: F401
from tests.support.other_device.backend import move_model
from tests.support.other_device.decoding import decode, decoded
from tests.support.seam.zoo import build, prompts


def split(model: Any, devices: tuple[str, ...]) -> Any:
    """Put the layers on devices by turns, and what comes before and after them on the first, as `device_map` does.

    What goes into a layer is moved to its device, which accelerate's hooks do.
    """
    move_model(model, devices[0])
    base = model.model if hasattr(model, "model") else model.gpt_neox
    for index, layer in enumerate(base.layers):
        move_model(layer, devices[index % len(devices)])
        layer.register_forward_pre_hook(_to(devices[index % len(devices)]), with_kwargs=True)
    model.lm_head.register_forward_pre_hook(_to(devices[0]), with_kwargs=True) if hasattr(model, "lm_head") else None
    last = base.norm if hasattr(base, "norm") else base.final_layer_norm
    last.register_forward_pre_hook(_to(devices[0]), with_kwargs=True)
    return model


def _to(device: str) -> Any:
    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return tuple(map(move, value)) if isinstance(value, tuple) else value

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(move, args)), {name: move(value) for name, value in kwargs.items()}

    return hook


# What compares layers, merges, stores codes, turns keys, or reads the model: the default run has these.
NEAR = (
    "snapkv(window=6) + pooled @ tokens=48",
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=4",
    "dynamickv @ tokens=48",
    "snapkv(window=6) + cake @ tokens=48",
    "expected @ tokens=48",
    "critical(of=snapkv(window=6)) + d2o @ tokens=48",
    "unrotated(of=lowrank)",
)
TURNS, BLOCKS = ("gpu:1", "gpu:2"), ("gpu:1", "gpu:2", "gpu:2")


@pytest.mark.parametrize("plan", NEAR)
def test_layers_on_two_devices(plan: str) -> None:
    check("llama", plan, BATCH, None, TURNS)


@pytest.mark.parametrize("chunk", [None, 64])
def test_windows_of_the_model_on_another_device_get_their_mask_there(chunk: int | None) -> None:
    check("gemma3", NEAR[0], BATCH, chunk, ("gpu:1", "gpu:2", "gpu:2", "gpu:2"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_plan_on_two_devices(case: str) -> None:
    # The tiny llama's last two layers are a pair, where a plan stores pairs.
    check("llama", CASES[case], BATCH, None, BLOCKS if "minicache" in CASES[case] else TURNS)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("family", "lengths"), [("gpt_neox", ALONE), ("gemma3", BATCH)])
def test_every_plan_of_other_families_in_chunks(family: str, lengths: tuple[int, ...], case: str) -> None:
    if refused(family, CASES[case]):
        pytest.skip(f"{family}: {refused(family, CASES[case])}")
    check(family, CASES[case], lengths, 64, ("gpu:1", "gpu:2", "gpu:2", "gpu:2"))


def test_layers_that_are_stored_together_must_be_on_one_device() -> None:
    with pytest.raises(PlanError, match="layers 1 to 2 together, which lie on gpu:2 and gpu:1"):
        kvtailor.cache_for(split(build("llama"), TURNS), "minicache")


@pytest.mark.parametrize("plan", NEAR[:2])
def test_a_saved_cache_comes_back_to_the_layers_devices(plan: str, tmp_path: Path) -> None:
    model, path = split(build("llama"), TURNS), tmp_path / "cache"
    expected = decoded(model, plan, BATCH, steps=6, save=path)
    for other in (model, build("llama")):
        cache = kvtailor.load_cache(other, path)
        layers = [next(iter(state.parts()[0].tensors().values())).device for state in cache.engine.states]
        assert layers == [next(layer.parameters()).device for layer in other.model.layers]
        mask = prompts(BATCH)[1].to(next(other.parameters()).device)
        with using("reference"):
            tokens, logits, _ = decode(other, cache, mask, 6)
        assert torch.equal(tokens.cpu(), expected.tokens) and torch.equal(logits.cpu(), expected.logits)


@pytest.mark.parametrize("plan", NEAR)
def test_layers_that_accelerate_has_put_on_two_devices(plan: str) -> None:
    with using("reference"):
        expected = decoded(build("llama"), plan, BATCH, steps=4)
    model = build("llama")
    places = {"model.embed_tokens": "gpu:1", "model.rotary_emb": "gpu:1", "model.norm": "gpu:2", "lm_head": "gpu:2"}
    model = dispatch_model(model, {**places, **{f"model.layers.{i}": TURNS[i % 2] for i in range(3)}}, force_hooks=True)
    found = decoded(model, plan, BATCH, steps=4)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.logits, expected.logits)
    assert found.ledger == expected.ledger


def test_what_is_not_moved_is_found() -> None:
    """A layer whose inputs stay on another device: the devices of these tests refuse to meet, as those of CUDA do."""
    model = split(build("llama"), TURNS)
    model.model.layers[1]._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match="on the same device"):
        decoded(model, NEAR[0], BATCH, steps=1)


def check(family: str, plan: str, lengths: tuple[int, ...], chunk: int | None, devices: tuple[str, ...]) -> None:
    with using("reference"):
        expected = decoded(build(family), plan, lengths, chunk=chunk, steps=6)
    model = split(build(family), devices)
    found = decoded(model, plan, lengths, chunk=chunk, steps=6)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.logits, expected.logits)
    assert all(torch.equal(found.held[layer], columns) for layer, columns in expected.held.items())
    assert found.ledger == expected.ledger
