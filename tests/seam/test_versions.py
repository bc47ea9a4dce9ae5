"""What differs between releases of transformers stands in one place, and what is assumed of all of them holds."""

import copy
import warnings

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf import versions
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS, find_cache, hand_cache, read_cache, rename_cache
from tests.support.seam.zoo import build

OTHER = next(name for name in CACHE_ARGUMENTS if name != CACHE_ARGUMENT)


def test_the_installed_transformers_is_as_it_is_read():
    assert versions.broken_assumptions() == []


@pytest.mark.parametrize("function", sorted(versions._FRAMES))
def test_what_a_release_changes_is_named(function, monkeypatch):
    module, owner, names = versions._FRAMES[function]
    monkeypatch.setattr(versions, "_FRAMES", {function: (module, owner, (*names, "its_new_name"))})
    (found,) = versions.broken_assumptions()
    assert function in found and "its_new_name" in found and not any(f"no {name}" in found for name in names)
    monkeypatch.setattr(versions, "_FRAMES", {f"{function}_renamed": (module, owner, names)})
    (found,) = versions.broken_assumptions()
    assert f"no function {function}_renamed" in found


def test_a_new_question_to_layers_is_named(monkeypatch):
    asked = versions.CacheLayerMixin.__abstractmethods__
    monkeypatch.setattr(versions.CacheLayerMixin, "__abstractmethods__", (asked - {"update"}) | {"shrink"})
    assert versions.broken_assumptions() == [
        "layers of a cache need no update any more",
        "layers of a cache need shrink, which is new",
    ]


@torch.no_grad()
def test_the_argument_is_taken_without_a_warning_and_the_output_has_the_cache():
    model = build("llama")
    assert read_cache(model(torch.tensor([[1, 2]]), use_cache=False)) is None
    cache = kvtailor.cache_for(model, "snapkv @ tokens=8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model(torch.tensor([[1, 2, 3]]), **hand_cache(cache))
        assert read_cache(output) is cache and cache.seen == 3
        words = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
        output = model.generate(torch.tensor([[1, 2, 3, 4, 5]]), **hand_cache(cache), **words)
    assert read_cache(output) is cache and cache.seen == 6


def test_a_cache_is_found_by_either_name():
    cache = object()
    for name in CACHE_ARGUMENTS:
        given = {name: cache, "use_cache": True}
        before = copy.copy(given)
        assert find_cache(given) is cache
        assert rename_cache(given) == {CACHE_ARGUMENT: cache, "use_cache": True} and given == before
    assert find_cache({OTHER: None}) is None and rename_cache({OTHER: None, "use_cache": True}) == {"use_cache": True}
    assert find_cache({CACHE_ARGUMENT: cache, OTHER: None}) is cache
    for ask in (find_cache, rename_cache):
        with pytest.raises(CacheMisuse, match="as cache and as past_key_values"):
            ask({"cache": cache, "past_key_values": cache})
