"""Bad input: a clear error or correct output, never a silent wrong one. And the pitfalls of transformers' seams."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import kvtailor
from kvtailor.errors import ArgumentError, CacheMisuse, PlanError
from kvtailor.hf.attention import HANDLE, NAME
from kvtailor.hf.versions import CACHE_ARGUMENTS, hand_cache
from tests.support.seam.zoo import ROUNDING, VOCABULARY, build, error, prompts

SNAP = "snapkv(window=6) @ tokens=16"
_TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match="model must be a model of transformers, and is a Linear"):
        kvtailor.cache_for(torch.nn.Linear(2, 2), SNAP)


def test_a_static_cache_asked_for_at_the_same_time_is_refused() -> None:
    model = build("llama")
    ids, _ = prompts((20,))
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            ids, **hand_cache(kvtailor.cache_for(model, SNAP)), cache_implementation="static", max_new_tokens=2
        )


def test_a_static_cache_alone_still_works_with_our_attention_on() -> None:
    own, ours = build("llama"), build("llama")
    cache = kvtailor.cache_for(ours, SNAP)
    ids, mask = prompts((20, 13))
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    found = ours.generate(ids, cache_implementation="static", **options)
    assert cache.seen == 0 and ours.config._attn_implementation == "kvtailor"
    assert torch.equal(found, own.generate(ids, **options))


def test_unknown_words_name_their_neighbours() -> None:
    with pytest.raises(PlanError, match="snapkv") as caught:
        kvtailor.cache_for(build("llama"), "snapvk + adakw @ tokns=16")
    assert len(caught.value.faults) >= 3
    assert "adakv" in str(caught.value) and "tokens" in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize(
    "plan", ["snapkv @ tokens=4096", "h2o @ tokens=4096", "snapkv + adakv @ tokens=4096", "streaming @ keep=1.0"]
)
def test_a_budget_above_the_prompt_keeps_it_whole(plan: str) -> None:
    own, ours = build("llama"), build("llama")
    ids, mask = prompts((40, 33))
    cache = kvtailor.cache_for(ours, plan)
    found = ours.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, own.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
    # All but the last token were fed, and the padding of the second row is not held.
    assert cache.seen == 45 and cache.ledger().held == (45 + 38) / 2


@pytest.mark.parametrize(
    "plan", ["full", SNAP, "snapkv(window=6) + adakv @ keep=0.3", "h2o(recent=6) @ tokens=16", "streaming @ tokens=8"]
)
def test_one_token_prompts(plan: str) -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, plan)
    out = model.generate(torch.tensor([[5]]), **hand_cache(cache), max_new_tokens=30, do_sample=False)
    assert out.shape == (1, 31)


def test_an_empty_prompt_is_an_error() -> None:
    model = build("llama")
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        model.generate(
            torch.zeros((1, 0), dtype=torch.long), **hand_cache(kvtailor.cache_for(model, SNAP)), max_new_tokens=2
        )


@torch.no_grad()
def test_a_prompt_beyond_the_models_positions_is_said() -> None:
    model = build("llama")
    ids = torch.randint(3, VOCABULARY, (1, 520))
    with pytest.warns(UserWarning, match="512 positions"):
        model(ids, **hand_cache(kvtailor.cache_for(model, SNAP)))


@torch.no_grad()
def test_nan_in_keys_is_an_error_where_it_would_decide() -> None:
    model = build("llama")
    model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    ids, _ = prompts((40,))
    for plan in (SNAP, "h2o(recent=6) @ tokens=16", "kivi(bits=4, group=8, recent=8)"):
        with pytest.raises(CacheMisuse, match="(?i)nan"):
            model(ids, **hand_cache(kvtailor.cache_for(model, plan)))


@torch.no_grad()
def test_a_cache_reused_on_another_model_is_an_error() -> None:
    one, other, third = build("llama"), build("llama", state=3), build("qwen2")
    cache = kvtailor.cache_for(one, SNAP)
    ids, _ = prompts((30,))
    one(ids, **hand_cache(cache))
    for model in (other, third):
        own = kvtailor.cache_for(model, "full")
        with pytest.raises(CacheMisuse, match="another model"):
            model(ids[:, :1], **hand_cache(cache))
        del own
        cache = kvtailor.cache_for(one, SNAP)
        one(ids, **hand_cache(cache))


@torch.no_grad()
def test_a_model_whose_attention_was_switched_away_raises_at_once() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    model.set_attn_implementation("sdpa")
    with pytest.raises(CacheMisuse, match="attn_implementation"):
        model(prompts((30,))[0], **hand_cache(cache))


@torch.no_grad()
def test_a_lost_handle_gives_nan_and_then_raises() -> None:
    """One layer, so that nothing after it in the same forward can notice."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**_TINY, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    cache = kvtailor.cache_for(model, SNAP)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 64, (1, 12))
    assert model(ids, **hand_cache(cache)).logits.isnan().any()
    with pytest.raises(CacheMisuse, match="never used it"):
        model(ids, **hand_cache(cache))


@torch.no_grad()
def test_another_batch_on_a_used_cache_is_an_error() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    model(prompts((30,))[0], **hand_cache(cache))
    with pytest.raises((CacheMisuse, ValueError, RuntimeError)):
        model(prompts((1, 1))[0], **hand_cache(cache))


@torch.no_grad()
def test_a_mask_that_contradicts_the_cache() -> None:
    model = build("llama")
    ids, mask = prompts((30, 20))
    token, grown = ids[:, :1], torch.cat([mask, mask.new_ones(2, 1)], 1)
    for wrong, match in (
        (torch.ones_like(grown), "padding"),
        (torch.ones(2, 1, dtype=torch.long), "columns|padding"),
        (grown[:, 5:], "columns"),
        (None, "padding"),
    ):
        cache = kvtailor.cache_for(model, SNAP)
        model(ids, attention_mask=mask, **hand_cache(cache))
        with pytest.raises(CacheMisuse, match=match):
            model(token, attention_mask=wrong, **hand_cache(cache))


@torch.no_grad()
def test_a_4d_mask_of_the_wrong_shape_is_an_error() -> None:
    model = build("llama")
    with pytest.raises(CacheMisuse, match="4-D"):
        model(
            prompts((8,))[0],
            attention_mask=torch.ones(1, 1, 8, 9, dtype=torch.bool),
            **hand_cache(kvtailor.cache_for(model, "full")),
        )


@torch.no_grad()
def test_cropping_into_what_is_compressed_is_an_error() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    model(prompts((30,))[0], **hand_cache(cache))
    with pytest.raises(CacheMisuse, match="activate_past_recording"):
        cache.crop(-3)
    with pytest.raises(CacheMisuse, match="minus"):
        cache.crop(3)


@torch.no_grad()
def test_a_full_cache_crops_anywhere() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "full")
    ids, _ = prompts((30,))
    model(ids, **hand_cache(cache))
    with pytest.raises(CacheMisuse, match="asked to take back 31 tokens, and 30 were seen"):
        cache.crop(-31)
    cache.crop(-10)
    found = model(ids[:, 20:], **hand_cache(cache)).logits
    assert error(found, build("llama")(ids).logits[:, 20:]) < ROUNDING


def test_a_backward_through_the_cache_is_an_error() -> None:
    model = build("llama")
    logits = model(prompts((20,))[0], **hand_cache(kvtailor.cache_for(model, "full"))).logits
    with pytest.raises(CacheMisuse, match="inference"):
        logits.sum().backward()


@torch.no_grad()
def test_dropout_is_an_error() -> None:
    config = transformers.LlamaConfig(**_TINY, attention_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config).train()
    with pytest.raises(CacheMisuse, match="eval"):
        model(torch.ones(1, 4, dtype=torch.long), **hand_cache(kvtailor.cache_for(model, "full")))


def test_the_name_of_the_attention_is_safe() -> None:
    """That importing registers nothing is asked in a fresh process, in `test_saving.py`."""
    assert "flash" not in NAME and "/" not in NAME and not NAME.startswith("paged")


def test_two_models_of_one_configuration_object() -> None:
    """They share the name of their attention; ours serves the other model's own caches just as well."""
    import copy

    from tests.support.seam.zoo import configs

    config = copy.deepcopy(configs()["llama"])
    one = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    other = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ids, _ = prompts((20,))
    before = other.generate(ids, max_new_tokens=4, do_sample=False)
    one.generate(ids, **hand_cache(kvtailor.cache_for(one, SNAP)), max_new_tokens=4, do_sample=False)
    assert torch.equal(other.generate(ids, max_new_tokens=4, do_sample=False), before)


@torch.no_grad()
def test_the_handle_is_never_put_on_a_stored_buffer() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "full")
    model(prompts((20,))[0], **hand_cache(cache))
    assert not any(hasattr(t, HANDLE) for state in cache.engine.states for t in state.stored.tail.tensors().values())


@torch.no_grad()
def test_reset_and_reuse() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    ids, mask = prompts((30, 22))
    first = model(ids, attention_mask=mask, **hand_cache(cache)).logits
    cache.reset()
    assert cache.seen == 0 and cache.ledger().total == 0
    assert torch.equal(model(ids, attention_mask=mask, **hand_cache(cache)).logits, first)


def test_a_model_of_windows_only_is_said_to_have_nothing_to_compress() -> None:
    model = build("mistral_window")
    with pytest.warns(UserWarning, match="nothing to compress"):
        kvtailor.cache_for(model, SNAP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvtailor.cache_for(model, "full")


@torch.no_grad()
def test_autocast() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(ids, **hand_cache(kvtailor.cache_for(model, SNAP))).logits
        expected = build("llama")(ids).logits
    assert error(found.float(), expected.float()) < 5e-2


def test_inputs_embeds_and_hidden_states() -> None:
    own, ours = build("llama"), build("llama")
    ids, _ = prompts((20,))
    embedded = ours.model.embed_tokens(ids)
    options = {"max_new_tokens": 4, "do_sample": False, "output_hidden_states": True, "return_dict_in_generate": True}
    found = ours.generate(inputs_embeds=embedded, **hand_cache(kvtailor.cache_for(ours, "full")), **options)
    assert torch.equal(found.sequences, own.generate(inputs_embeds=embedded, **options).sequences)


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_session_prefills_a_cache_that_is_given(name: str) -> None:
    model = build("llama")
    first, more = torch.randint(3, 60, (1, 20)), torch.randint(3, 60, (1, 5))
    with kvtailor.session(model, "streaming @ tokens=8") as s:
        cache = s.prefill(first)
        assert s.prefill(more, **{name: cache}) is cache and cache.seen == 25
        for word, said in (("plan", "a session has its plan"), ("tokenizer", "a session has its tokenizer")):
            with pytest.raises(CacheMisuse, match=said):
                s.prefill(more, **{word: "full"})
        with pytest.raises(CacheMisuse, match="two names of one argument"):
            s.prefill(more, cache=cache, past_key_values=cache)
        with pytest.raises(ArgumentError, match="cache must be"):
            s.prefill(more, **{name: object()})


def test_a_model_in_float64_is_told_once_what_its_decoded_tokens_are() -> None:
    model = build("llama", dtype=torch.float64)
    with pytest.warns(UserWarning, match="in float64, and attention that reads a cache of ours is computed in float32"):
        cache = kvtailor.cache_for(model, "full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvtailor.cache_for(model, SNAP)
        kvtailor.cache_for(build("llama"), SNAP)
    # And it is so.
    ids, _ = prompts((20,))
    with torch.no_grad():
        own = model(ids).logits
        model(ids[:, :-1], **hand_cache(cache))
        token = model(ids[:, -1:], **hand_cache(cache)).logits
    assert 1e-12 < error(token, own[:, -1:]) < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("columns", [1, 12, 29, 31])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_mask_of_other_columns_than_a_new_cache_gets_is_an_error(columns: int, padding: int) -> None:
    model, (ids, _) = build("llama"), prompts((30,))
    mask = torch.ones(1, columns, dtype=torch.int64)
    mask[:, :padding] = 0
    for plan in (SNAP, "full"):
        with pytest.raises(CacheMisuse, match=f"attention_mask has {columns} columns, and generate.* got 30 tokens"):
            cache = kvtailor.cache_for(model, plan)
            model.generate(ids, attention_mask=mask, max_new_tokens=2, **hand_cache(cache))
        with pytest.raises(CacheMisuse, match=rf"must be \(1, 30\), and is \(1, {columns}\)"):
            kvtailor.generate(model, ids, mask, plan=plan, max_new_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(30,), (2, 30), (1, 1, 30, 30)])
def test_a_mask_of_other_rows_is_an_error(shape: tuple[int, ...]) -> None:
    model, (ids, _) = build("llama"), prompts((30,))
    for filled in (1, 0):
        mask = torch.ones(shape, dtype=torch.int64)
        mask[..., 0] = filled
        with pytest.raises(CacheMisuse, match=r"must be \(1, 30\), and is"):
            kvtailor.generate(model, ids, mask, plan=SNAP, max_new_tokens=2)


@torch.no_grad()
@pytest.mark.parametrize("plan", [SNAP, "kivi4"])
def test_padding_behind_a_row_is_told_where_a_plan_goes_by_what_comes_last(plan: str) -> None:
    model, (ids, mask) = build("llama"), prompts((30, 22))
    right = mask.flip(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kvtailor.generate(model, ids, mask, plan=plan, max_new_tokens=2)
        assert not [each for each in said if "ends in padding" in str(each.message)]
        kvtailor.generate(model, ids.flip(1), right, plan=plan, max_new_tokens=2)
    told = [each for each in said if "ends in padding" in str(each.message)]
    assert len(told) == (plan == SNAP)
