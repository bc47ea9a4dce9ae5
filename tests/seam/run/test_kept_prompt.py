"""A cache that is filled from a kept prompt is the cache that has read it: every method, every preset, every family."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import transformers

import kvtailor
from kvtailor.attend.rocket import Rocket
from kvtailor.attend.segments import Segments
from kvtailor.errors import CacheMisuse, CalibrationError, PlanError, UnsupportedModel
from kvtailor.hf.model.calibrated import UNTRAINED
from kvtailor.hf.run.feeding import fed
from kvtailor.hf.run.kept_prompt import keep, why_own
from kvtailor.hf.run.prefill import read
from kvtailor.plan import Plan
from kvtailor.types import Needs
from tests.support.every_plan import every_plan, first_of_each_method, plans_of_presets
from tests.support.seam.latent_zoo import build_latent, latent_configs
from tests.support.seam.layer_kinds import hybrid_configs, mixed_configs
from tests.support.seam.same_cache import assert_same_cache, storages_of
from tests.support.seam.zoo import FAMILIES, SOFTMAX_FAMILIES, build, prompts

INSTRUCTION = torch.tensor([5, 6])
OTHERS = [*hybrid_configs(), *mixed_configs(), *latent_configs()]
EVERY_FAMILY = tuple(dict.fromkeys([*FAMILIES, *SOFTMAX_FAMILIES, *OTHERS]))
# Read once by its window, by its mass, by samples, across layers, in groups of layers, twice, and not at all.
PLANS = (
    "snapkv(window=6) + adakv @ tokens=24, slack=2",
    "h2o(recent=6) @ tokens=24, slack=2",
    "snapkv(window=6) + cake + kivi(bits=4, group=8, recent=8) @ keep=0.5",
    "kvzip(chunk=30) @ keep=0.5",
    "full",
)
SHARED = {case: plan for case, plan in every_plan().items() if why_own(Plan.parse(plan)) is None}
# Of each method and preset one.
FIRST = [case for case in [*first_of_each_method(), *plans_of_presets()] if case in SHARED]


@functools.cache
def model_of(family: str, dtype: torch.dtype = torch.float32):
    if family == "odd":
        # 5 numbers a head, so that hardly any head begins where a register would like it to.
        config = transformers.LlamaConfig(
            vocab_size=131,
            hidden_size=40,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=10,
            max_position_embeddings=512,
        )
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if family in latent_configs():
        return build_latent(family)
    model = build(family, dtype=dtype)
    # Methods that read a calibration get one of random numbers.
    setattr(model, UNTRAINED, True)
    return model


def union_of(plan: Plan) -> Needs:
    """More than a plan needs: what others in its run may ask for."""
    own = plan.needs.of_prompt
    return own | Needs(window=41, rows=37, moments=True, moments_skip=own.moments_skip if own.moments else 3)


@functools.cache
def kept_of(family: str, lengths: tuple[int, ...], needs: Needs, dtype: torch.dtype = torch.float32):
    ids, mask = prompts(lengths)
    model = model_of(family, dtype)
    try:
        return keep(model, ids, needs, mask)
    except (UnsupportedModel, ValueError):
        # Of this family no rotation is known, and so no plan needs moments.
        return keep(model, ids, Needs(window=needs.window, rows=needs.rows, mass=needs.mass), mask)


def check(family: str, plan: str, lengths: tuple[int, ...], tokens: int, dtype: torch.dtype = torch.float32) -> None:
    model = model_of(family, dtype)
    ids, mask = prompts(lengths)
    parsed = Plan.parse(plan)
    try:
        own, mine = (kvtailor.cache_for(model, parsed) for _ in range(2))
    except (CalibrationError, PlanError, UnsupportedModel):
        # This family cannot have the plan, whichever way the prompt is read.
        return
    kept = kept_of(family, lengths, union_of(parsed), dtype)
    assert kept.serves(parsed)
    before = _bytes(kept)
    try:
        expected = read(model, own, ids, mask, instruction=INSTRUCTION)
    except CacheMisuse as error:
        with pytest.raises(CacheMisuse, match=re.escape(str(error))):
            read(model, mine, ids, mask, instruction=INSTRUCTION, kept=kept)
        return
    found = read(model, mine, ids, mask, instruction=INSTRUCTION, kept=kept)
    assert torch.equal(found, expected)
    assert_same_cache(mine, own)
    for step in range(tokens):
        token = torch.full((len(lengths), 1), 7 + step)
        mask = torch.cat([mask, mask.new_ones(len(lengths), 1)], 1)
        padded = None if bool(mask.all()) else mask
        logits = [fed(model, cache, token, padded, keep=1) for cache in (own, mine)]
        assert torch.equal(*logits), step
    assert_same_cache(mine, own)
    assert not storages_of(mine) & storages_of(kept.cache)
    assert _bytes(kept) == before, "the kept prompt has changed"


def _bytes(kept) -> list[bytes]:
    """All that a kept prompt holds; free slots of buffers may hold anything, NaN too."""
    found = [kept.logits]
    for layer in kept.cache.layers:
        state = getattr(layer, "state", None)
        found += [] if state is None else [t for entry in state.entries(0) for t in entry.tensors.values()]
        found += [getattr(layer, name) for name in ("keys", "values") if getattr(layer, name, None) is not None]
        found += layer.states().values() if hasattr(layer, "states") else ()
    return [each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in found]


@pytest.mark.parametrize("case", FIRST)
@torch.no_grad()
def test_every_plan(case: str) -> None:
    """On padded rows, of which some codecs encode blocks; then tokens, among which plans evict and encode."""
    check("llama", SHARED[case], (150, 101), 6)


@pytest.mark.long
@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("case", SHARED)
@torch.no_grad()
def test_every_plan_on_every_family(case: str, family: str) -> None:
    check(family, SHARED[case], (201, 150), 24)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@torch.no_grad()
def test_every_family(family: str) -> None:
    for plan in PLANS[:2]:
        check(family, plan, (70, 43), 2)


@pytest.mark.long
@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize("plan", PLANS[2:])
@torch.no_grad()
def test_every_family_with_more_plans(family: str, plan: str) -> None:
    check(family, plan, (70, 43), 3)


@pytest.mark.parametrize("plan", ["snapkv(window=6) @ tokens=20", "h2o(recent=4) @ tokens=20", "full", "kivi"])
@pytest.mark.parametrize("tokens", [9, 37, 63, 64, 65, 147])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_buffers_of_any_size_and_alignment(plan: str, tokens: int, dtype: torch.dtype) -> None:
    """A head's keys begin where the buffer's slots say, which are more under plans that evict nothing."""
    check("odd", plan, (tokens,), 2, dtype)


def test_only_attention_that_says_so_is_shared() -> None:
    own = {plan for plan in every_plan().values() if why_own(Plan.parse(plan)) is not None}
    named = {each.attend for each in map(Plan.parse, own) if not each.encode.rounds_on_write}
    assert {type(each).__name__ for each in named} == {"Reference", "Rocket"}
    assert all(each.turns for each in named if isinstance(each, Rocket))

    class Other(Segments):
        def attend(self, request):
            return super().attend(request)

    assert Other().prompt_pass() == Segments().prompt_pass() and Other().shared_pass() is None
    assert "reads a prompt in a way of its own" in str(why_own(Plan.parse("reference")))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("plan", PLANS[:2])
@torch.no_grad()
def test_whatever_is_done_to_a_filled_cache_leaves_the_kept_prompt_as_it_is(family: str, plan: str) -> None:
    model, lengths = model_of(family), (70, 43)
    ids, mask = prompts(lengths)
    kept = kept_of(family, lengths, union_of(Plan.parse(plan)))
    before, drawn = _bytes(kept), torch.random.get_rng_state()
    cache = kvtailor.cache_for(model, plan)
    read(model, cache, ids, mask, kept=kept)
    assert torch.equal(torch.random.get_rng_state(), drawn), "a method has drawn from torch's own generator"
    copied = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 1]))
    for name in ("evidence", "carry"):
        held = getattr(copied.engine.states[0].observed, name)
        for tensor in (held.tensors() if name == "evidence" else held).values():
            tensor.zero_()
    for layer in copied.layers:
        state = getattr(layer, "state", None)
        held = [] if state is None else [*state.parts()]
        for tensor in [t for part in held for t in part.tensors().values()]:
            tensor.zero_()
        for tensor in layer.states().values() if hasattr(layer, "states") else ():
            tensor.zero_()
    cache.reset()
    assert _bytes(kept) == before
