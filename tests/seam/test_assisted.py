"""Prompt lookup and assisted decoding through plain `generate()`: text, held tokens and logits of plain decoding."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, build, error, held_columns, prompts

PLANS = (
    "snapkv(window=8) @ tokens=32",
    "snapkv(window=6) + adakv @ keep=0.4",
    "position(sinks=2) @ tokens=16, slack=3",
    "h2o(recent=6) @ tokens=16, slack=2",
    "h2o(recent=6) @ tokens=16, slack=0",
    "kivi(bits=4, group=8, recent=8)",
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24",
    "vector(bits=8, block_size=1)",
    "quest(tokens=16, dense_layers=1) + indexed(page=4)",
    "position + rolling @ tokens=16, slack=3",
    "random + adakv + rocket(tokens=8, expect=40) @ tokens=20, slack=4",
    "rocket(tokens=10, expect=9, turns=true, window=4, kernel=3)",
    "lagkv(sinks=2, lag=4) + chunks(size=4) @ tokens=16, slack=3",
    "tova + threshold(at=0.5) @ tokens=20, slack=3",
    "expected @ tokens=24",
    "snapkv(window=6) + cam @ tokens=20",
)
# Plans under which layers wait for each other, so that no layer can tell prompt from draft in one forward.
REFUSED = ("snapkv(window=6) + pooled @ tokens=20", "minicache(start=0.0, block_size=4)")
NEW = 24


def assistant_of(family: str, how: str):
    """Keyword arguments of `generate` for an assistant that is always, sometimes or never right, or looks words up."""
    if how == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    small = build(family, state=0)
    if how != "always":
        with torch.no_grad():
            head, generator = small.get_output_embeddings().weight, torch.Generator().manual_seed(3)
            noise = torch.randn(head.shape, generator=generator) * head.std()
            head.copy_(-head if how == "never" else head + noise * 0.7)
    small.generation_config.num_assistant_tokens = 5
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": small}


def generated(model, plan: str, ids, **options):
    cache = kvtailor.cache_for(model, plan)
    told = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, **hand_cache(cache), **told, **options), cache


def most_error(plan: str) -> float:
    """Where codes are made, another order of sums can turn one over to its neighbour."""
    return 2e-5 if Plan.parse(plan).encode.exact else 1e-3


def settled(cache) -> None:
    """Both ways of decoding have read all but the last token; a crop that never came is made up for."""
    cache.crop(0)


def assert_like_plain(family: str, plan: str, how: str, ids) -> None:
    model = build(family)
    expected, plain = generated(model, plan, ids)
    found, cache = generated(model, plan, ids, **assistant_of(family, how))
    assert torch.equal(found.sequences, expected.sequences)
    assert max(error(a, b) for a, b in zip(found.logits, expected.logits, strict=True)) < most_error(plan)
    settled(cache)
    assert cache.seen == plain.seen
    assert torch.equal(cache.held(), plain.held())
    for layer, columns in held_columns(plain).items():
        assert torch.equal(held_columns(cache)[layer], columns), f"layer {layer}"
    assert cache.ledger().total == cache.ledger().closed_form


FAMILIES = ["gpt_neox", "gemma3", "qwen3", "gpt2"]
OF_FAMILIES = [plan for plan in PLANS if "rolling" not in plan][:8]


@pytest.mark.parametrize(("how", "plan"), crossed(["lookup", "always", "sometimes", "never"], PLANS))
def test_text_held_tokens_and_logits_are_those_of_plain_decoding(how: str, plan: str) -> None:
    assert_like_plain("llama", plan, how, prompts((20,))[0].repeat(1, 3))


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *crossed(FAMILIES, OF_FAMILIES[:4]),
        *(pytest.param(family, plan, marks=pytest.mark.long) for family in FAMILIES for plan in OF_FAMILIES[4:]),
    ],
)
def test_other_families(family: str, plan: str) -> None:
    if family == "gpt2" and Plan.parse(plan).needs.rotation:
        pytest.skip("gpt2 has no rotary embedding")
    ids = prompts((20,))[0].repeat(1, 3)
    for how in ("lookup", "sometimes"):
        try:
            build(family).generate(ids, max_new_tokens=NEW, do_sample=False, **assistant_of(family, how))
        except RuntimeError as broken:
            pytest.skip(f"transformers {transformers.__version__} itself cannot do this with its own cache: {broken}")
        assert_like_plain(family, plan, how, ids)


def test_drafts_are_accepted_and_rejected_in_these_tests() -> None:
    """Else nothing above would show a wrong rollback."""
    ids = prompts((20,))[0].repeat(1, 3)

    def forwards(how: str, state: int = 0) -> int:
        model, calls = build("llama", state=state), list[int]()
        handle = model.register_forward_hook(lambda *_: calls.append(1))
        generated(model, PLANS[0], ids, **assistant_of("llama", how))
        handle.remove()
        return len(calls)

    assert forwards("always") < forwards("sometimes") < forwards("never") == NEW
    # Whether a random model repeats its prompt is chance.
    assert any(forwards("lookup", state) < NEW for state in range(4))


@pytest.mark.parametrize("plan", REFUSED)
def test_plans_that_cannot_are_refused_before_any_work(plan: str) -> None:
    model, ids = build("llama"), prompts((20,))[0].repeat(1, 3)
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(CacheMisuse, match="prompt lookup and assisted decoding"):
        generated(model, plan, ids, prompt_lookup_num_tokens=4)
    handle.remove()
    assert not calls


def test_a_turn_after_assisted_decoding_is_a_turn() -> None:
    """The recording that assisted decoding leaves behind does not turn the next prompt into a draft."""
    model, ids = build("llama"), prompts((20,))[0].repeat(1, 3)
    plan = "snapkv(window=8) @ tokens=32"
    outcome = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        found, cache = generated(model, plan, ids, **options)
        more = torch.cat([found.sequences, prompts((30,), state=5)[0]], 1)
        out = model.generate(
            more,
            **hand_cache(cache),
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        outcome.append((out, cache))
    (plain, held), (after, cache) = outcome
    assert torch.equal(plain.sequences, after.sequences)
    assert max(error(a, b) for a, b in zip(plain.logits, after.logits, strict=True)) < ROUNDING
    assert torch.equal(cache.held(), held.held())


def test_assisted_decoding_on_a_used_cache_is_refused_before_any_work() -> None:
    model, ids = build("llama"), prompts((20,))[0].repeat(1, 3)
    cache = kvtailor.prefill(model, ids[:, :40], plan="snapkv(window=8) @ tokens=32")
    before = copy.deepcopy(cache)
    with pytest.raises(CacheMisuse, match="feed the whole prompt again"):
        model.generate(ids, **hand_cache(cache), prompt_lookup_num_tokens=4, max_new_tokens=4, do_sample=False)
    assert cache.seen == 40
    token = ids[:, 40:41]
    with torch.no_grad():
        assert torch.equal(model(token, **hand_cache(cache)).logits, model(token, **hand_cache(before)).logits)


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_recorded_forward_on_a_used_cache_is_decoded_tokens(plan: str) -> None:
    """By hand: several tokens after `activate_past_recording`, of which some are taken back, are tokens one by one."""
    model, ids = build("llama"), prompts((48,))[0]
    new, wrong = prompts((9,), state=2)[0], prompts((4,), state=6)[0]
    drafted, plain = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    for cache in (drafted, plain):
        model(ids, **hand_cache(cache))
    drafted.activate_past_recording()
    first = model(torch.cat([new[:, :5], wrong], 1), **hand_cache(drafted)).logits[:, :5]
    drafted.crop(-4)
    second = model(torch.cat([new[:, 5:], wrong[:, :1]], 1), **hand_cache(drafted)).logits[:, :4]
    drafted.crop(-1)
    found = torch.cat([first, second], 1)
    for i in range(9):
        expected = model(new[:, i : i + 1], **hand_cache(plain)).logits[:, 0]
        assert error(found[:, i], expected) < most_error(plan), f"token {i}"
    assert torch.equal(drafted.held(), plain.held())
    for layer, columns in held_columns(plain).items():
        assert torch.equal(held_columns(drafted)[layer], columns)
