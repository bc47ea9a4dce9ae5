"""Models that torch.compile has been called on: the cache runs as it stands, and what is around it is compiled.

The backend is "eager": torch.compile traces, splits and guards as with any other, and no C++ is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.hf.versions import hand_cache
from tests.support.seam import vision
from tests.support.seam.zoo import ROUNDING, build, error, prompts

IDS, MASK = prompts((20, 14))


def generated(model: Any, cache: Any) -> Any:
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(input_ids=IDS, attention_mask=MASK, **hand_cache(cache), **options)


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def with_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def by_layer(model: Any) -> Any:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "wrapped": wrapped,
    "with_forward": with_forward,
    "in_place": in_place,
    "by_layer": by_layer,
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "wrapped" else pytest.mark.long) for way in WAYS])
def test_generate_equals_the_model_as_it_was(way: str) -> None:
    """`full` is the model's own cache, and an evicting plan what it is without torch.compile."""
    own, plan = build("llama"), "snapkv(window=4) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=10"
    model = WAYS[way](build("llama"))
    for found, expected in (
        (kvtailor.cache_for(model, "full"), DynamicCache(config=own.config)),
        (kvtailor.cache_for(model, plan), kvtailor.cache_for(own, plan)),
    ):
        then = generated(own, expected)
        now = generated(model, found)
        assert torch.equal(now.sequences, then.sequences)
        assert max(error(a, b) for a, b in zip(now.logits, then.logits, strict=True)) < ROUNDING


@pytest.mark.long
def test_with_the_default_backend() -> None:
    own, model = build("llama"), build("llama")
    model.compile()
    then = generated(own, DynamicCache(config=own.config))
    now = generated(model, kvtailor.cache_for(model, "full"))
    assert torch.equal(now.sequences, then.sequences)
    assert max(error(a, b) for a, b in zip(now.logits, then.logits, strict=True)) < 1e-4


@torch.no_grad()
def test_compiled_after_the_cache_was_made_and_between_forwards() -> None:
    own, model = build("llama", layers=1), build("llama", layers=1)
    cache = kvtailor.cache_for(model, "snapkv(window=4) @ tokens=10")
    other = kvtailor.cache_for(own, "snapkv(window=4) @ tokens=10")
    compiled = torch.compile(model, backend="eager")
    token = torch.full((2, 1), 9)
    mask = torch.cat([MASK, torch.ones_like(token)], 1)
    for given in ({"input_ids": IDS, "attention_mask": MASK}, {"input_ids": token, "attention_mask": mask}):
        found = compiled(**given, **hand_cache(cache)).logits
        assert error(found[:, -1], own(**given, **hand_cache(other)).logits[:, -1]) < ROUNDING
    longer = torch.cat([mask, torch.ones_like(token)], 1)
    # The model itself goes on with what its compiled form has read.
    found = model(token, attention_mask=longer, **hand_cache(cache)).logits
    assert error(found, own(token, attention_mask=longer, **hand_cache(other)).logits) < ROUNDING


@torch.no_grad()
def test_one_graph_is_refused_in_a_sentence_and_the_cache_is_as_it_was() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "full")
    with pytest.raises(Exception, match="compile the model without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(IDS, **hand_cache(cache))
    assert cache.seen == 0
    assert error(model(IDS, **hand_cache(cache)).logits, build("llama")(IDS).logits) < ROUNDING


def test_a_saved_cache_is_of_the_model_however_it_was_compiled(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    model = by_layer(build("llama"))
    cache = kvtailor.cache_for(model, "full")
    cache.save(path)
    for way in WAYS.values():
        kvtailor.load_cache(way(build("llama")), path)
    with pytest.raises(kvtailor.KvtailorError, match="fingerprint"):
        kvtailor.load_cache(wrapped(build("llama", state=1)), path)


@pytest.mark.long
@torch.no_grad()
def test_positions_behind_images_in_a_compiled_forward() -> None:
    """The cache is asked for its length inside of compiled code, and another conversation came between."""
    own, model = vision.build("qwen2_5_vl"), vision.build("qwen2_5_vl")
    batch = vision.prompt("qwen2_5_vl", vision.ROWS)
    model.compile(backend="eager")
    caches = [kvtailor.cache_for(model, "full") for _ in range(2)]
    for row, cache in enumerate(caches):
        model(**batch.row(row).inputs(), **hand_cache(cache))
    for row, cache in enumerate(caches):
        rows = [(*each, torch.tensor([9])) for each in vision.ROWS]
        found = model(torch.tensor([[9]]), **hand_cache(cache)).logits
        expected = own(**vision.prompt("qwen2_5_vl", rows).row(row).inputs()).logits[:, -1:]
        assert error(found, expected) < ROUNDING
