"""Models that cache latents: what is refused before any work starts, and forwards that go wrong."""

from __future__ import annotations

import copy
import gc
import threading
import types
import weakref

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

import kvtailor
from kvtailor.calibration.run import calibrate
from kvtailor.errors import CacheMisuse, CalibrationError, KvtailorError, PlanError, UnsupportedModel
from kvtailor.hf.graphs.replaying import Replays
from kvtailor.hf.layers.latent import LatentLayer
from kvtailor.hf.model.attending.latents import projections_of
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.support.every_plan import every_plan
from tests.support.seam.latent_zoo import LATENT_FAMILIES, build_latent
from tests.support.seam.zoo import ROUNDING, build, error, prompts

SNAP = "snapkv(window=6) @ tokens=16"


@pytest.mark.parametrize("name", every_plan())
def test_every_plan_works_or_is_refused_in_a_sentence_before_any_work(name: str) -> None:
    """What is right of those that work is shown by `tests/engine/test_reading.py`, plan by plan."""
    plan, model = every_plan()[name], build_latent("deepseek_v2")
    before = model.config._attn_implementation
    reasons = Plan.parse(plan).latent_misfits()
    if reasons:
        with pytest.raises(PlanError) as caught:
            kvtailor.cache_for(model, plan)
        assert all(reason in str(caught.value) for reason in reasons)
        assert model.config._attn_implementation == before, "refused, yet changed"
        return
    try:
        cache = kvtailor.cache_for(model, plan)
    except KvtailorError as error:
        known = ("calibrat", "host: the model is on the cpu", "its weights are for 2 kv heads")
        assert any(each in str(error) for each in known), error
        return
    ids, mask = prompts((60, 51))
    if cache.plan.needs.reconstruction:
        kvtailor.prefill(model, ids[:, :-1], mask[:, :-1], cache=cache)
    out = model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=6, do_sample=False)
    assert out.shape == (2, 66) and cache.ledger().total == cache.ledger().closed_form
    if cache.plan.evicts:
        assert cache.ledger().held < 60


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_by_an_indexer_is_refused(family: str) -> None:
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        index_topk=16,
        index_head_dim=8,
        index_n_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="lets an indexer choose the tokens that each query sees"):
        kvtailor.cache_for(model, "full")


def test_what_needs_keys_of_each_head_is_refused(tmp_path) -> None:
    model = build_latent("deepseek_v2")
    with pytest.raises(CalibrationError, match="hold one latent for all heads"):
        calibrate(model, "erank", texts={"text": "a text " * 99}, out=tmp_path / "e.safetensors", tokenizer=len)
    cache = kvtailor.prefill(model, prompts((20,))[0], plan="full")
    with pytest.raises(UnsupportedModel, match="reads latents"):
        Replays(model, cache, expected=4, record=lambda run: run)


@torch.no_grad()
def test_a_module_that_changes_expanded_keys_is_refused() -> None:
    """What the cache computes is what `expand_kv` gives; a forward that does more would not be the model's own."""
    model = build_latent("minicpm3")
    attention = model.model.layers[1].self_attn
    inner = type(attention).expand_kv
    cache = kvtailor.cache_for(model, "full")
    calls = []

    def changed(self, latents, rotated):
        keys, values = inner(self, latents, rotated)
        calls.append(len(calls))
        return keys * 1.5, values

    # Not seen by what was read when the cache was made: as a norm behind the expansion would not be.
    attention.expand_kv = types.MethodType(changed, attention)
    with pytest.raises(UnsupportedModel, match="changes keys between the expansion of its latents and its attention"):
        model(prompts((20,))[0], **hand_cache(cache))
    assert calls


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys, values, latents, rotated: (keys.square(), values), "something else than multiply"),
        (lambda keys, values, latents, rotated: (keys, values + 1), "adds a bias"),
        (lambda keys, values, latents, rotated: (keys, values + rotated.mean(-1, keepdim=True)), "something else"),
        (lambda keys, values, latents, rotated: (keys.flip(-1), values), "bias|something else|does not lay out"),
        (lambda keys, values, latents, rotated: (keys.flip(1), values), "does not lay out"),
    ],
)
def test_an_expansion_of_another_kind_is_refused(change, said: str) -> None:
    model = build_latent("youtu")
    attention = model.model.layers[0].self_attn
    inner = attention.expand_kv
    attention.expand_kv = lambda latents, rotated: change(*inner(latents, rotated), latents, rotated)
    with pytest.raises(UnsupportedModel, match=said):
        kvtailor.cache_for(model, "full")


@torch.no_grad()
def test_a_projection_with_a_bias_is_refused() -> None:
    model = build_latent("youtu")
    linear = model.model.layers[0].self_attn.kv_b_proj
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))
    with pytest.raises(UnsupportedModel, match="bias"):
        kvtailor.cache_for(model, "full")


def broken_off(model, cache, ids) -> None:
    """A forward that ends between an update and its attention, at the first layer."""
    attention = model.model.layers[0].self_attn
    inner = attention.expand_kv

    def stop(*_):
        raise KeyboardInterrupt

    attention.expand_kv = stop
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(ids, **hand_cache(cache))
    attention.expand_kv = inner


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 16, 17, 30])
@pytest.mark.parametrize("own_mask", [False, True])
def test_a_forward_without_the_cache_after_one_that_was_broken_off(length: int, own_mask: bool) -> None:
    """Its attention is the model's own, to the bit, also where it brings a mask and as many tokens as were given."""
    model, own = build_latent("deepseek_v3"), build_latent("deepseek_v3")
    ids = prompts((length,))[0]
    cache = kvtailor.cache_for(model, "full")
    broken_off(model, cache, prompts((length,), state=8)[0])
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None] if own_mask else None
    assert torch.equal(model(ids, attention_mask=mask).logits, own(ids, attention_mask=mask).logits)
    with pytest.raises(CacheMisuse, match="updated this cache, but its attention never used it"):
        model(ids, **hand_cache(cache))
    cache.reset()
    assert error(model(ids, **hand_cache(cache)).logits, own(ids).logits) < ROUNDING


@torch.no_grad()
def test_a_new_forward_forgets_what_a_broken_one_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where keys cannot be looked at without waiting for a device: the mask that begins a forward comes first."""
    model, own = build_latent("deepseek_v3"), build_latent("deepseek_v3")
    ids, cache = prompts((17,))[0], kvtailor.cache_for(model, "full")
    broken_off(model, cache, prompts((17,), state=8)[0])
    monkeypatch.setattr(LatentLayer, "has_given", lambda self, keys: True)
    assert torch.equal(model(ids).logits, own(ids).logits)
    assert cache.engine.states[0].stored.seen == 0


@torch.no_grad()
def test_another_attention_gives_nan_and_the_cache_says_so() -> None:
    model = build_latent("deepseek_v2")
    ids = prompts((20,))[0]
    model(ids, **hand_cache(kvtailor.cache_for(model, "full")))
    cache = kvtailor.prefill(model, ids, plan="full")
    model.config._attn_implementation = "sdpa"
    try:
        assert model(ids[:, :1], **hand_cache(cache)).logits.isnan().all()
    except CacheMisuse as error:
        assert "attn_implementation" in str(error)
    with pytest.raises(CacheMisuse, match="attn_implementation"):
        model(ids[:, :1], **hand_cache(cache))


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v2", "longcat_flash"])
def test_two_models_and_their_caches_take_turns(family: str) -> None:
    """Layers of the same number, also with transformers' own cache between, never meet each other's keys."""
    one, two = build_latent(family, state=0), build_latent(family, state=1)
    ids = prompts((24,))[0]
    caches = [kvtailor.cache_for(model, SNAP) for model in (one, two)]
    alone = []
    for model, cache in zip((one, two), caches, strict=True):
        twin = copy.deepcopy(cache)
        alone.append([model(part, **hand_cache(twin)).logits for part in (ids[:, :20], ids[:, 20:])])
    stock = DynamicCache(config=one.config)
    for step, part in enumerate((ids[:, :20], ids[:, 20:])):
        for model, cache, due in zip((one, two), caches, alone, strict=True):
            one(part, **hand_cache(stock))
            two(part)
            assert torch.equal(model(part, **hand_cache(cache)).logits, due[step])
    assert error(alone[0][0], alone[1][0]) > 0.1


def test_threads_have_layers_of_their_own() -> None:
    """Two threads at once on one model, each with its cache: what one expects is nothing to the other."""
    model = build_latent("glm4_moe_lite")
    ids = [prompts((24,), state=state)[0] for state in (1, 2)]
    due = [model.generate(each, max_new_tokens=8, do_sample=False) for each in ids]
    caches = [kvtailor.cache_for(model, "full") for _ in ids]
    found: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(3):
            caches[number].reset()
            found[number] = model.generate(ids[number], **hand_cache(caches[number]), max_new_tokens=8, do_sample=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(found[number], due[number]) for number in range(2))


@torch.no_grad()
def test_a_cache_of_another_model_is_refused_and_nothing_is_kept_alive() -> None:
    model, other = build_latent("deepseek_v2"), build_latent("deepseek_v2", state=1)
    ids = prompts((20,))[0]
    cache = kvtailor.prefill(model, ids, plan=SNAP)
    kvtailor.cache_for(other, "full")
    with pytest.raises(CacheMisuse):
        other(ids[:, :1], **hand_cache(cache))
    reference = weakref.ref(other.model.layers[0].self_attn)
    assert projections_of(reference()).verified is False
    del other, cache
    gc.collect()
    assert reference() is None


@torch.no_grad()
def test_a_cache_without_latents_is_not_disturbed() -> None:
    """A forward of another kind of model between an update and its attention cannot be; its own handle comes first."""
    latent, plain = build_latent("deepseek_v2"), build("llama")
    ids = prompts((20,))[0]
    cache = kvtailor.cache_for(latent, "full")
    broken_off(latent, cache, ids)
    found = plain(ids, **hand_cache(kvtailor.cache_for(plain, "full"))).logits
    assert error(found, build("llama")(ids).logits) < ROUNDING


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_sizes_are_read_from_the_configuration(family: str) -> None:
    from kvtailor.hf.model.geometry import Geometry

    geometry = Geometry.of(build_latent(family).config)
    assert geometry.has_latents
    for shape in geometry.compressed_shapes:
        assert (shape.q_heads, shape.kv_heads, shape.key_size, shape.value_size) == (4, 1, 36, 8)
