"""Whole models with the large tensors of their caches in huge pages: which these are, and that nothing else changes.

A huge page is 4 KiB here, so that small models have large tensors, and the advice itself is only noted.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import huge_pages
from kvtailor.ops.cpu.library import built
from tests.support.seam.zoo import build, prompts

PAGE = 1 << 12
TOKENS = (300,)
PLANS = (
    "full",
    "streaming @ tokens=128",
    "snapkv(window=6) @ tokens=100",
    "snapkv(window=6) + adakv @ tokens=100",
    "snapkv(window=6) + vector(bits=8, block_size=16) @ tokens=260",
    "snapkv(window=6) + adakv + vector(bits=8, block_size=16) @ tokens=260",
    "h2o(recent=6) @ tokens=100, slack=3",
    "snapkv(window=6) + d2o @ tokens=100",
    "vector(bits=8, block_size=16)",
    "vector(bits=4, block_size=16)",
    "kivi(bits=4, group=8, recent=8)",
    "kivi(bits=4, group=8, recent=8, only=values)",
    "hadamard(of=vector(bits=4))",
    "quest(tokens=16, dense_layers=1) + indexed(page=4)",
)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the tensors for which huge pages were asked for."""
    seen: list[int] = []

    def advise(mapping: mmap.mmap, first: int, size: int) -> None:
        seen.append(huge_pages._address(mapping) + first)

    monkeypatch.delenv("KVTAILOR_HUGE_PAGES", raising=False)
    monkeypatch.setattr(huge_pages, "_LEAST", PAGE)
    monkeypatch.setattr(huge_pages, "_GIVEN_AGAIN", PAGE)
    monkeypatch.setattr(huge_pages, "_setting", lambda: "madvise")
    monkeypatch.setattr(huge_pages, "_page_bytes", lambda: PAGE)
    monkeypatch.setattr(huge_pages, "_advise", advise)
    return seen


@torch.no_grad()
def decoded(plan: str, asked: bool, steps: int = 40) -> tuple[list[torch.Tensor], Any]:
    """Logits after a prompt, of decoded tokens, and after a second turn."""
    model, ids = build("llama"), prompts(TOKENS)[0]
    more = prompts((steps + 20,), state=3)[0]
    with huge_pages.asking(asked):
        cache = kvtailor.cache_for(model, plan)
        found = [model(ids, **hand_cache(cache)).logits]
        found += [model(more[:, i : i + 1], **hand_cache(cache)).logits for i in range(steps)]
        found.append(model(more[:, steps:], **hand_cache(cache)).logits)
    return found, cache


def held(cache: Any) -> dict[str, torch.Tensor]:
    """Every tensor that is not a table of places, by layer, part and name."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for number, part in enumerate(layer.state.parts()):
            for name, tensor in part.tensors().items():
                if name not in ("positions", "owner", "lengths"):
                    found[f"{index}.{number}.{name}"] = tensor
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_answers_and_bytes_are_the_same(plan: str, advised: list[int]) -> None:
    plain, without = decoded(plan, False)
    assert advised == []
    found, cache = decoded(plan, True)
    assert advised
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert cache.ledger().as_dict() == without.ledger().as_dict() and torch.equal(cache.held(), without.held())
    both = held(without), held(cache)
    assert all(torch.equal(both[0][name], tensor) for name, tensor in both[1].items()) and list(both[0]) == list(
        both[1]
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.skipif(not built(), reason="torch's own quantiser makes new tensors, for which nothing can be asked")
def test_it_is_asked_for_what_is_large_and_for_nothing_else(plan: str, advised: list[int]) -> None:
    cache = decoded(plan, True)[1]
    large = 0
    for name, tensor in held(cache).items():
        storage = tensor.untyped_storage()
        # What bounds pages of keys is reduced from them, and what keys share after a move is looked up: small tables.
        if name.endswith((".low", ".high", ".step", ".row")):
            continue
        assert (storage.data_ptr() in advised) is (storage.nbytes() >= PAGE), (name, tensor.shape)
        large += storage.nbytes() >= PAGE
    assert large


def test_a_refusal_changes_nothing(monkeypatch: pytest.MonkeyPatch, advised: list[int]) -> None:
    expected, without = decoded("snapkv(window=6) + adakv @ tokens=100", False)

    def refuse(mapping: mmap.mmap, first: int, size: int) -> None:
        advised.append(0)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages, "_advise", refuse)
    found, cache = decoded("snapkv(window=6) + adakv @ tokens=100", True)
    assert advised and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert cache.ledger().as_dict() == without.ledger().as_dict()


def test_a_loaded_cache_lies_in_them_as_well(tmp_path: Path, advised: list[int]) -> None:
    model, path = build("llama"), tmp_path / "cache.safetensors"
    with torch.no_grad():
        cache = kvtailor.cache_for(model, "kivi(bits=4, group=8, recent=8)")
        model(prompts(TOKENS)[0], **hand_cache(cache))
    cache.save(path)
    advised.clear()
    loaded = kvtailor.load_cache(model, path)
    large = {name: each for name, each in held(loaded).items() if each.untyped_storage().nbytes() >= PAGE}
    assert large and all(each.untyped_storage().data_ptr() in advised for each in large.values())
    assert all(torch.equal(each, held(cache)[name]) for name, each in held(loaded).items())
