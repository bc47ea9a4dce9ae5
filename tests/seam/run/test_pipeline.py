"""`pipeline("text-generation")` with our cache: calls one after the other, and lists of prompts, as the how-to says."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import pipeline

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache

PLAN = "snapkv(window=8) @ tokens=48"
PROMPTS = ["The old mill stood at the end of the village. " * 12, "The ferry left the island twice a day. " * 7]


@pytest.fixture(scope="module")
def pipe() -> Any:
    model, tokenizer = kvtailor.load_model("demo", dtype="float32")
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


def told(pipe: Any, given: Any, cache: Any, **words: Any) -> list[str]:
    found = pipe(given, **hand_cache(cache), max_new_tokens=6, do_sample=False, return_full_text=False, **words)
    return [each["generated_text"] for row in found for each in (row if isinstance(row, list) else [row])]


def test_each_call_has_a_new_cache_and_a_list_is_one_batch(pipe: Any) -> None:
    alone = [told(pipe, prompt, kvtailor.cache_for(pipe.model, PLAN))[0] for prompt in PROMPTS]
    cache = kvtailor.cache_for(pipe.model, PLAN)
    assert told(pipe, PROMPTS, cache, batch_size=len(PROMPTS)) == alone
    # Both rows were read from this cache, and cut to the budget.
    held = [float(each.float().mean()) for each in cache.held()]
    assert len(held) == 2 and all(48 <= each <= 48 + 6 for each in held)


def test_a_cache_that_is_emptied_serves_another_call(pipe: Any) -> None:
    cache = kvtailor.cache_for(pipe.model, PLAN)
    first = told(pipe, PROMPTS[0], cache)
    cache.reset()
    told(pipe, PROMPTS[1], cache)
    cache.reset()
    assert told(pipe, PROMPTS[0], cache) == first


def test_a_second_call_or_a_list_without_its_size_is_refused_with_what_to_do(pipe: Any) -> None:
    cache = kvtailor.cache_for(pipe.model, PLAN)
    told(pipe, PROMPTS[0], cache)
    with pytest.raises(CacheMisuse, match=r"make a new cache or call cache.reset\(\)"):
        told(pipe, PROMPTS[1], cache)
    with pytest.raises(CacheMisuse, match="a pipeline takes a list of prompts as one batch with batch_size"):
        told(pipe, PROMPTS, kvtailor.cache_for(pipe.model, PLAN))
    # A longer prompt could be taken for the first one going on.
    with pytest.raises(CacheMisuse):
        told(pipe, PROMPTS[::-1], kvtailor.cache_for(pipe.model, PLAN))
