"""A cache in 16 bits of a model in float32: what is held is rounded once, and all that reads it computes in float32."""

from __future__ import annotations

import copy

import pytest
import torch

import kvtailor
from kvtailor.engine.engine import Engine
from kvtailor.engine.fast_path import slow_path
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.hf.graphs.obstacles import obstacle
from kvtailor.hf.layers.compressed import CompressedLayer
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.model.cache_dtype import set_cache_dtype
from kvtailor.hf.run import stock
from kvtailor.hf.run.kept_prompt import fill, keep
from kvtailor.hf.run.stock import dynamic_cache, rounded_cache
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.support.calibrated import shipped_for
from tests.support.every_plan import every_plan, first_of_each_method
from tests.support.seam.latent_zoo import build_latent
from tests.support.seam.zoo import VOCABULARY, build, prompts

HALF = torch.bfloat16
# A model on the CPU has no host to go to.
CASES = {case: plan for case, plan in every_plan().items() if not case.startswith("store: host")}
DEFAULT = {*first_of_each_method()} | {case for case in CASES if case.startswith("preset: ")}
# How many bytes it takes depends on what deflates, and so on hidden states.
BY_CONTENT = ("store: disk(pack=deflate)",)
EXACT = ("full", "snapkv(window=6) + adakv @ tokens=24, slack=4", "h2o(recent=6) @ tokens=24, slack=4")


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory):
    llama = build("llama")
    with shipped_for([llama, copy.deepcopy(llama).to(HALF)], tmp_path_factory.mktemp("calibrations")):
        yield


def made(family: str):
    return build_latent(family) if family == "deepseek_v2" else build(family)


@torch.no_grad()
def decoded(model, plan: str, *, chunk: int | None = None, dtype=HALF, first: int = 90):
    """Logits of tokens one by one after a padded prompt, and the cache."""
    ids, mask = prompts((96, 61))
    cache = kvtailor.cache_for(model, plan, cache_dtype=dtype)
    kvtailor.prefill(model, ids[:, :first], mask[:, :first], cache=cache, chunk=chunk)
    found = []
    for last in range(first, 96):
        columns = mask[:, : last + 1]
        places = (columns.cumsum(-1) - 1).clamp(min=0)[:, -1:]
        fed = {"attention_mask": columns, "position_ids": places, **hand_cache(cache)}
        found.append(model(ids[:, last : last + 1], **fed).logits)
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_every_plan_has_the_bytes_of_a_model_in_16_bits(case: str) -> None:
    """And what is observed and carried is in 16 bits as well; only a model that is in 16 bits says how much that is."""
    model = build("llama")
    logits, cache = decoded(model, CASES[case])
    _, of_half = decoded(copy.deepcopy(model).to(HALF), CASES[case], dtype=None)
    ledger, due = cache.ledger(), of_half.ledger()
    assert logits.dtype is torch.float32 and bool(logits.isfinite().all())
    assert ledger.full == due.full
    assert ledger.closed_form is None or ledger.closed_form == ledger.total
    # Other hidden states may be given other budgets.
    if case not in BY_CONTENT and torch.equal(cache.held(), of_half.held()):
        assert ledger.by_stage == due.by_stage


@pytest.mark.parametrize("case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_the_short_way_gives_what_the_general_way_gives(case: str) -> None:
    model = build("llama")
    short, one = decoded(model, CASES[case])
    with slow_path():
        general, two = decoded(model, CASES[case])
    assert torch.equal(one.held(), two.held())
    assert float((short - general).abs().max()) <= 2e-3 * float(general.abs().max())


@pytest.mark.parametrize("plan", EXACT)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "deepseek_v2"])
def test_it_is_a_float32_cache_of_rounded_states(family: str, plan: str, monkeypatch) -> None:
    model = made(family)
    ours, cache = decoded(model, plan)
    attend = CompressedLayer.attend

    def rounded(self, query, *args, **more):
        if self.arriving is not None:
            self.arriving = tuple(states.to(HALF).float() for states in self.arriving)
        return attend(self, query, *args, **more)

    monkeypatch.setattr(CompressedLayer, "attend", rounded)
    monkeypatch.setattr(Engine, "as_evidence", lambda self, query: query.to(HALF).float())
    with slow_path():
        truth, twin = decoded(model, plan, dtype=None)
    assert torch.equal(cache.held(), twin.held())
    size = float(truth.abs().max())
    assert float((ours - truth).abs().max()) <= 1e-3 * size
    monkeypatch.undo()
    unrounded, _ = decoded(model, plan, dtype=None)
    # So this test sees a rounding: what nobody rounds is farther away.
    assert float((unrounded - truth).abs().max()) > 5 * float((ours - truth).abs().max())


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2"])
def test_chunks_and_single_tokens_give_what_a_prompt_at_once_gives(family: str) -> None:
    model = made(family)
    whole, one = decoded(model, "full")
    in_chunks, two = decoded(model, "full", chunk=17)
    assert float((whole - in_chunks).abs().max()) <= 1e-3 * float(whole.abs().max())
    singly, _ = decoded(model, "full", first=70)
    assert float((whole - singly[:, 20:]).abs().max()) <= 1e-3 * float(whole.abs().max())
    assert one.ledger().full == two.ledger().full


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2", "qwen3_next"])
@pytest.mark.parametrize("plan", ["full", "snapkv(window=6) @ tokens=24"])
def test_forecasts_and_the_share_count_the_models_own_layers_in_float32(family: str, plan: str) -> None:
    model = made(family)
    ids = torch.randint(3, VOCABULARY, (2, 63), generator=torch.Generator().manual_seed(3))
    cache = kvtailor.prefill(model, ids, plan=plan, cache_dtype=HALF)
    size = kvtailor.cache_size(model, plan, context=63, batch=2, dtype=HALF)
    ledger = cache.ledger()
    assert (size.low, size.high, size.full) == (ledger.total, ledger.total, ledger.full)
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            assert {t.dtype for t in layer.state.stored.tail.tensors().values() if t.is_floating_point()} <= {HALF}
        elif isinstance(layer, WindowLayer):
            assert layer.keys.dtype is torch.float32
    if plan == "full":
        assert 1 <= ledger.ratio < 1.5


def test_a_saved_cache_goes_on_in_its_dtype(tmp_path) -> None:
    model, plan = build("llama"), "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=16) @ tokens=40"
    _, cache = decoded(model, plan)
    cache.save(tmp_path / "saved.safetensors")
    again = kvtailor.load_cache(model, tmp_path / "saved.safetensors")
    assert again.layers[0].dtype is HALF
    mask = torch.cat([prompts((96, 61))[1], torch.ones((2, 1), dtype=torch.int64)], 1)
    token = {"input_ids": torch.full((2, 1), 7), "attention_mask": mask}
    with torch.no_grad():
        ours, theirs = (model(**token, **hand_cache(each)).logits for each in (cache, again))
    assert torch.equal(ours, theirs)
    assert cache.ledger().full == again.ledger().full and torch.equal(cache.held(), again.held())


def test_what_a_model_was_said_to_hold_is_what_every_cache_of_it_holds(tmp_path) -> None:
    """Until another dtype is asked for, or the model is in another one itself."""
    model, plan = build("llama"), "vector(bits=8, block_size=16)"
    _, own = decoded(model, plan, dtype=None)
    set_cache_dtype(model, HALF)
    _, half = decoded(model, plan, dtype=None)
    assert half.layers[0].dtype is HALF and half.ledger().full * 2 == own.ledger().full
    assert kvtailor.cache_size(model, "full", context=100).total * 2 == full_size(build("llama"))
    asked = decoded(model, plan, dtype=torch.float32)[1]
    assert asked.layers[0].dtype is torch.float32
    asked.save(tmp_path / "saved.safetensors")
    assert kvtailor.load_cache(model, tmp_path / "saved.safetensors").layers[0].dtype is torch.float32
    assert decoded(copy.deepcopy(model).to(HALF), plan, dtype=None)[1].guard.stored_dtype is None
    set_cache_dtype(model, torch.float32)
    assert decoded(model, plan, dtype=None)[1].guard.stored_dtype is None
    with pytest.raises(ArgumentError, match="asked for a cache in float64 of a model in float32"):
        set_cache_dtype(model, torch.float64)


def full_size(model) -> int:
    return kvtailor.cache_size(model, "full", context=100).total


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "deepseek_v2"])
def test_the_null_plan_is_transformers_cache_with_the_same_rounding(family: str) -> None:
    model = made(family)
    assert rounded_cache(model) is None
    set_cache_dtype(model, HALF)
    ids, _ = prompts((96, 96))

    @torch.no_grad()
    def logits(cache):
        fed = hand_cache(cache)
        first = model(ids[:, :90], **fed).logits
        return torch.cat([first, *(model(ids[:, at : at + 1], **fed).logits for at in range(90, 96))], 1)

    ours, twin, unrounded = (
        logits(each) for each in (kvtailor.cache_for(model, "full"), rounded_cache(model), dynamic_cache(model))
    )
    assert float((ours - twin).abs().max()) < 0.2 * float((unrounded - twin).abs().max())


def test_rows_crops_and_drafts_are_those_of_any_cache() -> None:
    model = build("llama")
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(4))
    how = {"plan": "snapkv(window=6) + vector(bits=8, block_size=16) @ tokens=24, slack=4", "max_new_tokens": 24}
    plain = kvtailor.generate(model, ids, cache_dtype=HALF, **how)
    drafted = kvtailor.generate(model, ids, cache_dtype=HALF, draft_plan="snapkv(window=6) @ tokens=12", **how)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.cache.layers[0].dtype is drafted.drafts[0].layers[0].dtype is HALF
    with kvtailor.session(model, "full", cache_dtype=HALF) as s:
        output = s.generate(ids, max_new_tokens=8, do_sample=False, num_beams=2)
        assert output.shape[1] == 48 and s.last.layers[0].dtype is HALF


def test_what_was_not_tried_is_refused() -> None:
    model = build("llama")
    with pytest.raises(ArgumentError, match="asked for a cache in float64 of a model in float32"):
        kvtailor.cache_for(model, "full", cache_dtype=torch.float64)
    with pytest.raises(ArgumentError, match="asked for a cache in float32 of a model in bfloat16"):
        kvtailor.cache_for(copy.deepcopy(model).to(HALF), "full", cache_dtype=torch.float32)
    held = kvtailor.cache_for(model, "full", cache_dtype=HALF)
    assert "holds bfloat16 of a model in float32" in obstacle(held, model)
    with pytest.raises(ArgumentError, match="which has its own"):
        cache = kvtailor.cache_for(model, "full")
        kvtailor.prefill(model, torch.full((1, 4), 7), cache=cache, cache_dtype=HALF)
    kept = keep(model, torch.full((1, 40), 7), Plan().needs)
    with pytest.raises(KvtailorError, match="let it read the prompt itself"):
        fill(kvtailor.cache_for(model, "full", cache_dtype=HALF), kept)


@torch.no_grad()
def test_states_that_are_put_into_a_cache_are_held_as_it_holds_them():
    """Benchmarks timed caches in float32 that were said to be of 16 bits."""
    model = build("llama")
    ids, _ = prompts((64,))
    own, cache, asked = dynamic_cache(model), *(kvtailor.cache_for(model, "full", cache_dtype=HALF) for _ in range(2))
    model(ids, **hand_cache(own))
    model(ids, **hand_cache(asked))
    stock.fill(cache, {number: (layer.keys, layer.values) for number, layer in enumerate(own.layers)})
    assert cache.ledger().total == asked.ledger().total
    token = ids[:, :1]
    # One prompt read its own states as they are held, the other as they came: 2^-8 of them in each layer.
    torch.testing.assert_close(
        *(model(token, **hand_cache(each)).logits for each in (cache, asked)), atol=0.1, rtol=0.02
    )
