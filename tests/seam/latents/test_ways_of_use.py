"""Models that cache latents: files, sessions, speculation, tiers, rows that move, adapters, bytes."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

import kvtailor
from kvtailor.hf.run.sharing import remake, sharing_prefill
from kvtailor.hf.versions import hand_cache
from tests.seam.model.test_adapters import Adapted
from tests.seam.test_speculation import assert_same_state
from tests.support.crossed import crossed
from tests.support.seam.latent_zoo import LATENT_FAMILIES, LatentReference, build_latent, own_bytes
from tests.support.seam.zoo import ROUNDING, error, prompts

PLANS = (
    "full",
    "snapkv(window=6) @ tokens=16",
    "h2o(recent=6) @ tokens=16, slack=3",
    "kivi(bits=4, group=4, recent=8)",
    "critical(of=snapkv(window=6)) + vector(bits=8, block_size=4) @ tokens=20, slack=4",
    "streaming + fp8(group=4, block_size=4) @ tokens=16, slack=3",
    "vector(bits=8, block_size=4) + disk(resident_layers=1)",
)
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@torch.no_grad()
def continued(model, cache, mask: Tensor, steps: int = 6) -> tuple[Tensor, Tensor]:
    """Greedy tokens (b, steps) and logits of a cache that goes on."""
    token, tokens, logits = prompts((1,) * len(mask), state=11)[0], [], []
    for _ in range(steps):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        logits.append(model(token, **hand_cache(cache), **options).logits)
        token = logits[-1].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, 1), torch.cat(logits, 1)


def used(model, plan: str, lengths: tuple[int, ...] = (40, 33)):
    """A cache that has read a prompt and some tokens, and its mask."""
    ids, mask = prompts(lengths)
    cache = kvtailor.prefill(model, ids, mask, plan=plan)
    continued(model, cache, mask, 3)
    return cache, torch.cat([mask, mask.new_ones(len(mask), 3)], 1)


@pytest.mark.parametrize(("family", "plan"), crossed(LATENT_FAMILIES, PLANS))
def test_a_saved_cache_goes_on_identically(family: str, plan: str, tmp_path: Path) -> None:
    model = build_latent(family)
    cache, mask = used(model, plan)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvtailor.load_cache(model, tmp_path / "cache.safetensors")
    assert loaded.seen == cache.seen and torch.equal(loaded.held(), cache.held())
    expected, found = continued(model, cache, mask), continued(model, loaded, mask)
    assert torch.equal(found[0], expected[0])
    assert error(found[1], expected[1]) < ROUNDING


@pytest.mark.long
def test_a_saved_cache_goes_on_in_another_process(tmp_path: Path) -> None:
    model = build_latent("deepseek_v3")
    cache, mask = used(model, PLANS[4])
    cache.save(tmp_path / "cache.safetensors")
    torch.save(mask, tmp_path / "mask.pt")
    script = (
        "import sys, torch, kvtailor\n"
        "from tests.seam.latents.test_ways_of_use import continued\n"
        "from tests.support.seam.latent_zoo import build_latent\n"
        "model = build_latent('deepseek_v3')\n"
        "cache = kvtailor.load_cache(model, sys.argv[1] + '/cache.safetensors')\n"
        "torch.save(continued(model, cache, torch.load(sys.argv[1] + '/mask.pt')), sys.argv[1] + '/found.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])
    found, expected = torch.load(tmp_path / "found.pt"), continued(model, cache, mask)
    assert torch.equal(found[0], expected[0])
    assert error(found[1], expected[1]) < ROUNDING


@pytest.mark.parametrize(("family", "plan"), crossed(LATENT_FAMILIES, PLANS))
@torch.no_grad()
def test_rows_move_and_copies_are_apart(family: str, plan: str) -> None:
    model = build_latent(family)
    ids, mask = prompts((40, 33, 37))
    order = torch.tensor([2, 0, 2, 1])
    cache = kvtailor.prefill(model, ids, mask, plan=plan)
    direct = kvtailor.prefill(model, ids[order], mask[order], plan=plan)
    twin = copy.deepcopy(cache)
    cache.reorder_cache(order)
    found, expected = continued(model, cache, mask[order]), continued(model, direct, mask[order])
    assert error(found[1], expected[1]) < ROUNDING
    alone = kvtailor.prefill(model, ids, mask, plan=plan)
    assert error(continued(model, twin, mask)[1], continued(model, alone, mask)[1]) < ROUNDING


@pytest.mark.parametrize(("family", "plan"), crossed(LATENT_FAMILIES, PLANS))
def test_speculation_writes_what_plain_decoding_writes(family: str, plan: str) -> None:
    model = build_latent(family)
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(model, plan)
    expected = model.generate(ids, **hand_cache(cache), **GREEDY)
    draft = "streaming @ tokens=16" if plan == "full" else "full"
    options = {"plan": plan, "draft_plan": draft, "gamma": 4, "min_gain": None, "max_new_tokens": 12}
    found = kvtailor.generate(model, ids, **options)
    assert torch.equal(found.sequences, expected)
    assert found.statistics.levels[0].verifications > 1
    assert_same_state(found.cache, cache)


@pytest.mark.parametrize("plan", PLANS)
def test_prompt_lookup_and_assisted_decoding(plan: str) -> None:
    model = build_latent("deepseek_v2")
    ids = prompts((14,))[0].repeat(1, 3)
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build_latent("deepseek_v2")}):
        cache = kvtailor.cache_for(model, plan)
        found = model.generate(ids, **hand_cache(cache), **how, **GREEDY)
        assert found.shape[1] == 54 and cache.ledger().total == cache.ledger().closed_form
        if plan == "full":
            assert torch.equal(found, build_latent("deepseek_v2").generate(ids, **GREEDY))


@pytest.mark.parametrize("plan", PLANS)
def test_sessions_crop_and_reset(plan: str) -> None:
    model = build_latent("glm4_moe_lite")
    ids, _ = prompts((36,))
    with kvtailor.session(model, plan) as talk:
        first = talk.generate(ids, **GREEDY)
        whole = torch.cat([first, prompts((7,), state=4)[0]], 1)
        second = talk.generate(whole, **GREEDY)
    assert second.shape[1] == 36 + 12 + 7 + 12
    cache = kvtailor.cache_for(model, plan)
    again = model.generate(ids, **hand_cache(cache), **GREEDY)
    assert torch.equal(again, first)
    cache.reset()
    assert torch.equal(model.generate(ids, **hand_cache(cache), **GREEDY), first)
    if plan == "full":
        cache.crop(-5)
        assert cache.seen == 42
        found = model.generate(first, **hand_cache(cache), **GREEDY)
        assert torch.equal(found, build_latent("glm4_moe_lite").generate(first, **GREEDY))


@torch.no_grad()
def test_kvzip_reads_a_context_twice_as_its_definition_says() -> None:
    """The repetition's attention is found on expanded keys here, and on latents by the cache."""
    ids, words = prompts((50,))[0], torch.tensor([9, 4, 77])
    reference, model = LatentReference("deepseek_v3"), build_latent("deepseek_v3")
    weights: dict[int, list[Tensor]] = {}
    attention = reference._attention

    def kept(module, query, key, value, mask, scaling=None, **kwargs):
        allowed = mask.expand(*query.shape[:3], key.shape[2])
        logits = (query.double() @ key.double().transpose(-1, -2) * scaling).masked_fill(~allowed, -torch.inf)
        weights.setdefault(module.layer_idx, []).append(logits)
        return attention(module, query, key, value, mask, scaling, **kwargs)

    AttentionInterface.register(LatentReference.NAME, kept)
    reference(ids, torch.ones_like(ids), {})
    repeated = torch.cat([words[None], ids], 1)
    reference(repeated, torch.ones(1, 50 + 53, dtype=torch.int64), {})
    cache = kvtailor.cache_for(model, "kvzip(chunk=64, lead=3, sinks=2) @ keep=0.5, slack=64")
    kvtailor.prefill(model, ids, cache=cache, instruction=words)
    for layer, state in enumerate(cache.engine.states):
        # (H, 53, 50): what each repeated token gives to the context, in any head; the highest of all.
        due = weights[layer][1][0].softmax(-1)[..., :50].amax((0, 1))
        found = state.observed.reconstruction
        assert found is not None and found.shape == (1, 1, 50)
        assert (found[0, 0] - due).abs().max() < 1e-5 and float(due.max()) > 0.3
    assert cache.ledger().held == 25


@torch.no_grad()
def test_caches_share_a_prefill_and_are_remade() -> None:
    model = build_latent("deepseek_v2")
    ids, mask = prompts((50, 33))
    plan = "snapkv(window=4) + vector(bits=8, block_size=4) @ tokens=20"
    source, mine, own = (kvtailor.cache_for(model, each) for each in ("full", plan, plan))
    with sharing_prefill(source, [mine]):
        kvtailor.prefill(model, ids, mask, cache=source)
    kvtailor.prefill(model, ids, mask, cache=own)
    assert_same_state(mine, own)
    other, due = kvtailor.cache_for(model, "kivi(bits=4, group=4, recent=8)"), None
    remake(other, source, mask)
    due = kvtailor.prefill(model, ids, mask, plan="kivi(bits=4, group=4, recent=8)")
    assert error(continued(model, other, mask)[1], continued(model, due, mask)[1]) < ROUNDING


@pytest.mark.parametrize(("family", "plan"), crossed(LATENT_FAMILIES, PLANS))
@torch.no_grad()
def test_bytes_are_those_of_latents(family: str, plan: str) -> None:
    model = build_latent(family)
    ids, mask = prompts((200, 151))
    cache, theirs = kvtailor.cache_for(model, plan), DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions)
    model(ids, attention_mask=mask, **hand_cache(theirs), position_ids=positions)
    ledger = cache.ledger()
    assert ledger.total == ledger.closed_form and ledger.full == own_bytes(theirs)
    # Per token r + e numbers in float32, and nothing of the heads: 36 + 8.
    assert ledger.full == len(cache.layers) * 2 * 200 * 44 * 4
    if plan == "full":
        assert ledger.full <= ledger.by_stage["tail"] <= ledger.full * 1.1


@pytest.mark.parametrize(
    "plan", ["snapkv @ bytes=60KiB", "streaming + vector(bits=8) @ bytes=40KiB", "h2o @ bytes=50KiB"]
)
@torch.no_grad()
def test_a_budget_in_bytes_is_kept_and_used(plan: str) -> None:
    model = build_latent("deepseek_v2")
    cache = kvtailor.cache_for(model, plan)
    model(prompts((400,))[0], **hand_cache(cache))
    assert cache.plan.bytes is not None
    stored = cache.ledger().total - cache.ledger().by_stage["observe"]
    assert 0.8 * cache.plan.bytes < stored <= cache.plan.bytes


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@torch.no_grad()
def test_the_output_projection_of_latents_is_that_of_the_values_they_make(family: str) -> None:
    """What critical weighs values by: each head's sum of latents, through its values and its rows of the projection."""
    model = build_latent(family)
    cache = kvtailor.cache_for(model, "critical(of=snapkv(window=6)) @ tokens=16")
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for state, module in zip(cache.engine.states, modules, strict=True):
        weight = state.model.output()
        latents = torch.randn(4, 36, generator=torch.Generator().manual_seed(2))
        # (1, H, 4, dv) values of four latents; head j is given the latent j.
        values = module.expand_kv(latents[None, None], torch.zeros(1, 1, 4, 8))[1]
        own = torch.cat([values[0, head, head] for head in range(4)])
        due = module.o_proj(own) - module.o_proj(torch.zeros_like(own))
        assert error(torch.einsum("hr,hrd->d", latents, weight), due) < ROUNDING


@torch.no_grad()
def test_adapters_and_changed_weights_count_at_once() -> None:
    """What the cache absorbs is the projection as it is now: adapted, switched off, scaled, or written over."""
    ids, mask = prompts((40, 33))
    model, own = build_latent("deepseek_v3"), build_latent("deepseek_v3")
    adapted = {}
    for each in (model, own):
        torch.manual_seed(3)
        for layer in each.model.layers:
            wrapped = Adapted(layer.self_attn.kv_b_proj)
            layer.self_attn.kv_b_proj = wrapped
            adapted.setdefault(id(each), []).append(wrapped)
    cache, theirs = kvtailor.prefill(model, ids, mask, plan="full"), DynamicCache(config=own.config)
    own(ids, attention_mask=mask, **hand_cache(theirs), position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    before = continued(model, copy.deepcopy(cache), mask, 1)[1]

    def change(name: str) -> None:
        for each in (*adapted[id(model)], *adapted[id(own)]):
            if name == "off":
                each.disable_adapters = True
            elif name == "scaled":
                each.disable_adapters, each.scaling = False, {**each.scaling, "one": 5.0}
            elif name == "written":
                each.base_layer.weight.mul_(0.5)

    for name in ("as it is", "off", "scaled", "written"):
        change(name)
        found, due = continued(model, copy.deepcopy(cache), mask, 2), continued(own, copy.deepcopy(theirs), mask, 2)
        assert error(found[1], due[1]) < ROUNDING, name
        if name != "as it is":
            assert error(found[1][:, :1], before) > 1e-2, "the change has changed nothing"


@torch.no_grad()
def test_plain_weights_that_are_written_over_count_at_once() -> None:
    ids, mask = prompts((40, 33))
    model, own = build_latent("youtu"), build_latent("youtu")
    cache, theirs = kvtailor.prefill(model, ids, mask, plan="full"), DynamicCache(config=own.config)
    own(ids, attention_mask=mask, **hand_cache(theirs), position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for each in (model, own):
        for number, layer in enumerate(each.model.layers):
            if number == 1:
                layer.self_attn.kv_b_proj.weight = torch.nn.Parameter(layer.self_attn.kv_b_proj.weight.flip(0))
            else:
                layer.self_attn.kv_b_proj.weight.mul_(-0.7)
    assert error(continued(model, cache, mask)[1], continued(own, theirs, mask)[1]) < ROUNDING


@torch.no_grad()
def test_autocast() -> None:
    ids, mask = prompts((40, 33))
    model, own = build_latent("deepseek_v3"), build_latent("deepseek_v3")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache, theirs = kvtailor.cache_for(model, "full"), DynamicCache(config=own.config)
        options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        found = model(ids, **hand_cache(cache), **options).logits[:, -1]
        due = own(ids, **hand_cache(theirs), **options).logits[:, -1]
    exact = build_latent("deepseek_v3")(ids, **options).logits[:, -1]
    assert error(found.float(), exact) < 2 * error(due.float(), exact) + 0.03
