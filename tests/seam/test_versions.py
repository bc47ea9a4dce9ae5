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

TEXT = "The old mill stood at the end of the village, and its wheel had not turned for years. " * 3
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


def _asked_of_a_document(model, tokenizer):
    reading = kvtailor.read(model, tokenizer, TEXT, plan="snapkv(window=8) @ tokens=24")
    assert len(reading.ask(["What is it?", "Where?"], max_new_tokens=2).texts) == 2


def _scored(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with kvtailor.session(model, "snapkv(window=8) @ tokens=24") as session:
        assert session.score(ids[:, :40], ids[:, 40:44], chunk=1).shape == (1, 4)
        for name in CACHE_ARGUMENTS:
            mine = session.cache()
            assert session.generate(ids, **{name: mine}, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2
            assert mine.seen == ids.shape[1] + 1
        with pytest.raises(CacheMisuse, match="two names of one argument"):
            session.generate(ids, cache=session.cache(), past_key_values=session.cache())


def _read_twice(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    for plan in ("kvzip @ tokens=24", "kvgrad @ tokens=24"):
        assert kvtailor.prefill(model, ids, plan=plan, tokenizer=tokenizer).seen == ids.shape[1]


def _prompt_lookup(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    cache = kvtailor.cache_for(model, "snapkv(window=8) @ tokens=24")
    model.generate(ids, **hand_cache(cache), prompt_lookup_num_tokens=3, max_new_tokens=6, do_sample=False)


def _assisted(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    cache, draft = kvtailor.cache_for(model, "kivi4"), copy.deepcopy(model)
    model.generate(ids, **hand_cache(cache), assistant_model=draft, max_new_tokens=6, do_sample=False)


def _speculated(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    found = kvtailor.generate(model, ids, plan="full", draft_plan="streamingllm @ tokens=40", max_new_tokens=6)
    assert found.sequences.shape[1] == ids.shape[1] + 6
    for name in CACHE_ARGUMENTS:
        with pytest.raises(CacheMisuse, match=f"makes the cache of its plan by itself, and got {name}"):
            kvtailor.generate(model, ids, plan="full", **{name: found.cache})
    with pytest.raises(CacheMisuse, match="got a cache as past_key_values among the inputs"):
        kvtailor.prefill(model, ids, plan="full", past_key_values=found.cache)


def _replayed(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtailor.hf.graphs.replay.recorder_of", lambda device: lambda run: run)
        cache = kvtailor.cache_for(model, "full", graphs=True, cache_dtype=model.dtype)
        model.generate(ids, **hand_cache(cache), max_new_tokens=8, do_sample=False)
    assert cache.replays.replayed > 3


def _saved(model, tokenizer, folder):
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    kvtailor.prefill(model, ids, plan="kivi4").save(folder / "cache.safetensors")
    cache = kvtailor.load_cache(model, folder / "cache.safetensors")
    whole = torch.cat([ids, ids[:, :3]], 1)
    assert model.generate(whole, **hand_cache(cache), max_new_tokens=2, do_sample=False).shape[1] == whole.shape[1] + 2


def _measured(model, tokenizer, folder):
    found = kvtailor.evaluate(
        "demo", plans=["kivi4"], tasks=["perplexity"], context=64, windows=1, out=folder / "results"
    )
    assert found.records


@pytest.mark.parametrize(
    "work",
    [_asked_of_a_document, _scored, _read_twice, _prompt_lookup, _assisted, _speculated, _replayed, _saved, _measured],
)
def test_nothing_of_ours_is_warned_of(work, tmp_path):
    model, tokenizer = kvtailor.load_model("demo")
    more = (tmp_path,) if work in (_saved, _measured) else ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        work(model, tokenizer, *more)
