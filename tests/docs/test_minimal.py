"""`examples/minimal.py` holds the tokens, and gives the logits, of the plan that it says it is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.net.inside import held_columns
from tests.support.seam.zoo import error
from tests.support.sharp_model import sharp_model
from torch import Tensor
from transformers import LlamaForCausalLM

import kvtailor
from kvtailor.hf.versions import hand_cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"
VOCABULARY = 128
# No sum here has more than 256 terms (220 tokens, 64 channels), and each may be rounded once. Measured: 6e-7.
ROUNDED = 256 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plan(minimal: ModuleType) -> str:
    """The plan that the example says it is."""
    found = re.search(r"This is the plan `([^`]+)`", minimal.__doc__ or "")
    assert found is not None
    return found[1]


@torch.no_grad()
def compare(minimal: ModuleType, plan: str, model: LlamaForCausalLM, forwards: list[Tensor]) -> list[list[int]]:
    """Feed the same tokens (t,) to both, and return how many tokens each layer holds after each forward."""
    caches = [minimal.LayerCache(block.self_attn) for block in model.model.layers]
    product = kvtailor.cache_for(model, plan)
    seen, held = 0, []
    for ids in forwards:
        logits = minimal.forward(model, ids, caches, seen)
        expected = model(ids[None], **hand_cache(product)).logits[0]
        seen += len(ids)
        assert error(logits, expected) < ROUNDED
        for cache, columns in zip(caches, held_columns(product).values(), strict=True):
            assert torch.equal(torch.zeros_like(columns[0]).scatter(1, cache.columns, True), columns[0])
        held.append([cache.columns.shape[1] for cache in caches])
    return held


def drawn(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_and_decoding_past_two_evictions(minimal: ModuleType, plan: str, seed: int) -> None:
    held = compare(minimal, plan, sharp_model(), [drawn(150, seed), *drawn(70, seed + 100).split(1)])
    assert [each[0] for each in held] == [48, *range(49, 81), 48, *range(49, 81), 48, *range(49, 53)]


def test_chunks_and_a_later_turn(minimal: ModuleType, plan: str) -> None:
    forwards = [drawn(60, 1), drawn(60, 2), *drawn(20, 3).split(1), drawn(30, 4), *drawn(40, 5).split(1)]
    held = compare(minimal, plan, sharp_model(), forwards)
    assert [held[i][0] for i in (0, 1, 21, 22)] == [48, 48, 68, 48]


def test_a_prompt_below_the_budget(minimal: ModuleType, plan: str) -> None:
    held = compare(minimal, plan, sharp_model(), [drawn(30, 1), *drawn(10, 2).split(1)])
    assert held[-1] == [40, 40]


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 150
