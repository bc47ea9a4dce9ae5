"""What a model's attention does is asked of its code, on a copy without numbers; the user's model does not notice."""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import kvtailor
from kvtailor.errors import UnsupportedModel
from kvtailor.hf.model import geometry, layer_shapes, probe
from kvtailor.hf.model.modules import attending_by_source
from kvtailor.hf.versions import CACHE_ARGUMENTS, hand_cache
from tests.support.every_model.build import NotBuilt, build
from tests.support.every_model.judge import WORKS, error, judge
from tests.support.every_model.pairs import Pair, every_pair
from tests.support.every_model.shrink import shrunk
from tests.support.seam.zoo import ROUNDING

PAIRS = every_pair()


def pair_of(model_type: str) -> Pair:
    found = [pair for pair in PAIRS if pair.model_type == model_type]
    if not found:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return found[0]


def prompt(rows: int = 1, tokens: int = 24) -> Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is known from another test."""
    monkeypatch.setattr(probe, "_known", {})


def test_the_users_model_and_random_numbers_do_not_notice(unknown: None) -> None:
    model = build(pair_of("gemma3_text"))
    called: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append("forward"))
        module.register_forward_pre_hook(lambda *_: called.append("before"))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    name, said = model.config._attn_implementation, copy.deepcopy(model.config.to_dict())
    verbosity = transformers.logging.get_verbosity()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert probe.probed(model) == probe.Attending()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]
    assert not called and model.training and model.config._attn_implementation == name
    assert model.config.to_dict() == said and transformers.logging.get_verbosity() == verbosity
    assert all(torch.equal(value, before[each]) for each, value in model.state_dict().items())
    assert all(torch.equal(value, buffers[each]) for each, value in model.named_buffers())


def test_no_memory_is_taken_for_a_large_model(unknown: None) -> None:
    """Llama 3.1 405B has 810 GB of weights in bfloat16."""
    config = transformers.LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    assert probe._probe(transformers.LlamaForCausalLM, config) == probe.Attending()


def test_an_answer_is_asked_for_once(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    own = probe._probe
    monkeypatch.setattr(probe, "_probe", lambda kind, config: asked.append(kind) or own(kind, config))
    pair = pair_of("llama")
    for _ in range(2):
        kvtailor.cache_for(build(pair), "full")
    assert len(asked) == 1
    model = build(pair)
    model.config.rms_norm_eps = 1e-3
    kvtailor.cache_for(model, "full")
    assert len(asked) == 2


@torch.no_grad()
def test_big_bird_is_the_same_fresh_and_after_a_forward() -> None:
    pair = pair_of("big_bird")
    model = build(pair)
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 18):
        with pytest.raises(UnsupportedModel, match="computes its attention itself"):
            kvtailor.cache_for(model, "full")
        return
    fresh = kvtailor.cache_for(model, "full")
    found = model(prompt(), **hand_cache(fresh)).logits
    assert error(found, build(pair)(prompt()).logits) < ROUNDING
    assert kvtailor.cache_for(model, "full").geometry.multiplies


@pytest.mark.parametrize(
    ("model_type", "changes", "sentence"),
    [
        ("dory", {}, "puts layers of its own into the cache"),
        ("dory", {"recurrent_kv_cache_mode": "last_loop"}, "read what a layer of the cache holds"),
        ("inkling2_loop_text", {}, "hands sinks= to its attention"),
    ],
)
def test_what_a_model_does_with_its_cache_is_refused_before_any_work(
    model_type: str, changes: dict[str, Any], sentence: str
) -> None:
    pair = pair_of(model_type)
    model = build(pair)
    for name, value in changes.items():
        setattr(model.config, name, value)
    own = model(prompt()).logits
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=sentence):
            kvtailor.cache_for(model, "full")
        # The same after a forward, and the model is what it was.
        assert torch.equal(model(prompt()).logits, own)


class Changing(modeling_llama.LlamaAttention):
    """Attends to other values than the cache gave."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **given: Any) -> Any:
        cache = next((given.pop(name) for name in CACHE_ARGUMENTS if name in given), None)

        class Between:
            def update(self, keys: Tensor, values: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Tensor]:
                keys, values = cache.update(keys, values, *args, **given)
                return keys, values * 2

        taken = inspect.signature(modeling_llama.LlamaAttention.forward).parameters
        name = next(name for name in CACHE_ARGUMENTS if name in taken)
        given[name] = None if cache is None else Between()
        return super().forward(hidden_states, position_embeddings, attention_mask, **given)


class ChangedLlama(transformers.LlamaForCausalLM):
    def __init__(self, config: Any):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = Changing(config, index)


def test_a_family_that_no_list_knows_is_seen_by_what_it_does(unknown: None) -> None:
    model = ChangedLlama(shrunk(transformers.LlamaConfig)).eval()
    with pytest.raises(UnsupportedModel, match="changes keys or values between cache and attention"):
        kvtailor.cache_for(model, "full")


def test_code_that_does_not_run_without_numbers_is_asked_by_its_source(unknown: None) -> None:
    model = build(pair_of("llama"))
    inner = type(model)

    class Reads(inner):  # type: ignore[misc,valid-type]
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            if int(input_ids[0, 0]) < 0:
                raise ValueError("no such token")
            return super().forward(input_ids, **given)

    made = Reads(model.config).eval()
    assert probe.probed(made) is None
    assert kvtailor.cache_for(made, "full").geometry.compressed


# What stands in `_RESTARTS` goes wrong under transformers' own cache as well, and `_TWICE_IN_WINDOWS` is about sizes.
LISTS = {
    "_CHANGES_STATES": geometry,
    "_STATES_IN_MODULES": geometry,
    "_ADDS_TO_LOGITS": geometry,
    "_BY_BLOCKS": geometry,
    "_MASKS_BY_STATES": geometry,
    "_CONVOLUTIONS_ALONE": layer_shapes,
}
ENTRIES = [(name, entry) for name, module in LISTS.items() for entry in sorted(getattr(module, name))]


@pytest.mark.parametrize(("name", "entry"), ENTRIES)
def test_every_family_of_a_list_still_needs_its_entry(
    name: str, entry: str, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if entry not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {entry}")
    whole = entry.removesuffix("_text")
    pairs = [pair for pair in PAIRS if pair.model_type in (entry, whole)]
    assert pairs, f"no class of transformers takes a {entry}: take it out of {name}"
    monkeypatch.setattr(LISTS[name], name, getattr(LISTS[name], name) - {entry})
    assert judge(pairs[0]).verdict != WORKS, f"{entry} works without its entry: take it out of {name}"


def _agrees(pair: Pair) -> str | None:
    """Where the source of a family's classes says something else than its code does; None where they agree."""
    try:
        model = build(pair)
    except NotBuilt:
        return None
    found, said = probe.probed(model), attending_by_source(model)
    if found is None or geometry.refusal(model.config) is not None:
        return None
    same = found.hands_over == said.hands_over and bool(found.itself) == bool(said.itself)
    return None if same else f"{pair}: {found} by its code, {said} by its source"


# One of each kind, and the families whose words changed in 5.24.
@pytest.mark.parametrize("model_type", ["llama", "bart", "bloom", "openai-gpt", "falcon", "megatron-bert", "gptj"])
def test_the_words_of_the_source_say_what_the_code_does(model_type: str) -> None:
    assert _agrees(pair_of(model_type)) is None


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_words_of_every_familys_source_say_what_the_code_does() -> None:
    assert [found for found in map(_agrees, PAIRS) if found is not None] == []
