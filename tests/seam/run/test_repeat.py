"""A context that is read twice: what its repetition looks at, that it leaves no trace, and who may skip it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvtailor
from kvtailor.engine.engine import Engine
from kvtailor.engine.phase import Compressing, Reconstructing
from kvtailor.errors import CacheMisuse
from kvtailor.hf.layers.window import WindowLayer
from kvtailor.hf.versions import hand_cache
from tests.support.crossed import crossed
from tests.support.seam.zoo import (
    COMPRESSIBLE,
    ROUNDING,
    VOCABULARY,
    MaskedReference,
    build,
    error,
    held_columns,
    prompts,
)

CHUNK, LEAD, SINKS = 17, 3, 2
# A slack keeps the evidence after the eviction, so that it can be looked at.
KEPT = f"kvzip(chunk={CHUNK}, lead={LEAD}, sinks={SINKS}) @ keep=0.5, slack=64"
WORDS = torch.tensor([9, 4, 77])


@torch.no_grad()
def looked_at_by_hand(model, ids: Tensor, words: Tensor = WORDS, chunk: int = CHUNK) -> dict[int, Tensor]:
    """For each layer (h, n): the definition, from the whole attention matrices of a model that knows no kvtailor.

    Args:
        ids: (n,) one context without padding.
    """
    heads, n = model.config.get_text_config().num_attention_heads, len(ids)
    kv_heads = getattr(model.config, "num_key_value_heads", heads)
    count = -(-n // chunk)
    size = -(-n // count)
    full = DynamicCache(config=model.config)
    model(ids[None], **hand_cache(full))
    found: dict[int, Tensor] = {}
    for start in range(0, n, size):
        end = min(n, start + size)
        new = torch.cat([words, ids[max(0, start - LEAD) : start], ids[start:end]])
        out = model(new[None], **hand_cache(copy.deepcopy(full)), output_attentions=True)
        for layer, weights in enumerate(out.attentions):
            if weights.shape[-1] != n + len(new):
                continue
            share = torch.zeros(n + len(new), dtype=torch.bool)
            share[:SINKS] = share[start:end] = share[n:] = True
            some = weights[0].double() * share
            some = some / some.sum(-1, keepdim=True)
            best = some[..., start:end].amax(1).unflatten(0, (kv_heads, -1)).amax(1)
            found.setdefault(layer, torch.zeros(kv_heads, n, dtype=torch.float64))[:, start:end] = best
    return found


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3", "gpt2", "qwen3"])
def test_what_a_repetition_looks_at_is_the_definition(family: str) -> None:
    """Three padded rows of unequal length, at once and in chunks; each row against itself alone."""
    model, plain = build(family), build(family, attention="eager")
    lengths = (63, 40, 9)
    ids, mask = prompts(lengths)
    for chunk in (None, 16):
        cache = kvtailor.prefill(model, ids, mask, plan=KEPT, chunk=chunk, instruction=WORDS)
        for row, length in enumerate(lengths):
            expected = looked_at_by_hand(plain, ids[row, -length:])
            for layer, state in zip(cache.geometry.compressed, cache.engine.states, strict=True):
                got = state.observed.reconstruction[row]
                assert error(got[:, -length:], expected[layer]) < ROUNDING, f"layer {layer} of row {row}"
                assert not got[:, :-length].any(), "padding was looked at"


def test_the_definition_notices_another_instruction_and_another_cut() -> None:
    """The yardstick can fail."""
    model = build("llama", attention="eager")
    ids = prompts((40,))[0][0]
    mine = looked_at_by_hand(model, ids)
    for other in (looked_at_by_hand(model, ids, words=WORDS[:1]), looked_at_by_hand(model, ids, chunk=40)):
        assert error(other[0], mine[0]) > 1e-2


def test_without_a_tokenizer_the_context_alone_is_fed_again() -> None:
    model, plain = build("llama"), build("llama", attention="eager")
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(model, ids, plan=KEPT)
    expected = looked_at_by_hand(plain, ids[0], words=torch.zeros(0, dtype=torch.int64))
    assert error(cache.engine.states[1].observed.reconstruction[0], expected[1]) < ROUNDING


@pytest.mark.parametrize(
    ("family", "plan"), crossed(COMPRESSIBLE, ["kvzip(chunk=17) @ keep=0.4", "kvzip_pooled @ keep=0.3"])
)
@torch.no_grad()
def test_logits_after_it_equal_a_full_cache_with_the_dropped_tokens_masked(family: str, plan: str) -> None:
    model, reference = build(family), MaskedReference(family)
    ids, mask = prompts((56, 43, 31))
    cache = kvtailor.prefill(model, ids, mask, plan=plan, instruction=WORDS)
    reference(ids, mask, {})
    held = held_columns(cache)
    assert sum(int((~columns & mask.bool()[:, None]).sum()) for columns in held.values()) > 200
    for index, new in enumerate(prompts((7, 7, 7), state=4)[0].split([5, 1, 1], 1)):
        held = held_columns(cache)
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        places = (mask.cumsum(-1) - 1)[:, -new.shape[1] :]
        options = {} if family == "opt" else {"position_ids": places}
        logits = model(new, attention_mask=mask, **hand_cache(cache), **options).logits
        assert error(logits, reference(new, mask, held)) < ROUNDING, f"forward {index}"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_the_passes_leave_no_trace(family: str) -> None:
    """With nothing to drop, tails, windows, logits and bytes are to the bit those of a plain prefill."""
    model = build(family)
    ids, mask = prompts((48, 33))
    twice = kvtailor.prefill(model, ids, mask, plan="kvzip(chunk=10) @ keep=1.0", instruction=WORDS)
    once = kvtailor.prefill(model, ids, mask, plan="random @ keep=1.0")
    assert twice.ledger().by_layer == once.ledger().by_layer
    assert twice.seen == once.seen == 48
    windows = 0
    for mine, theirs in zip(twice.layers, once.layers, strict=True):
        if isinstance(mine, WindowLayer):
            windows += 1
            assert mine.cumulative_length == theirs.cumulative_length and not isinstance(
                mine.guard.engine.phase, Reconstructing
            )
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        else:
            assert mine.state.observed.reconstruction is None
            pairs = zip(
                mine.state.stored.tail.tensors().values(), theirs.state.stored.tail.tensors().values(), strict=True
            )
            assert all(torch.equal(a, b) for a, b in pairs)
    assert windows == (2 if family == "gemma3" else 0)
    token, mask = prompts((1, 1), state=7)[0], torch.cat([mask, mask[:, -1:]], 1)
    mine, theirs = (model(token, attention_mask=mask, **hand_cache(cache)).logits for cache in (twice, once))
    assert torch.equal(mine, theirs)


@torch.no_grad()
def test_what_comes_after_the_context_stays_unless_the_plan_has_a_slack() -> None:
    model = build("llama")
    ids, _ = prompts((60,))
    question = prompts((20,), state=5)[0]
    published = kvtailor.prefill(model, ids, plan="kvzip + uniform @ tokens=20")
    bounded = kvtailor.prefill(model, ids, plan="kvzip + uniform @ tokens=20, slack=4")
    kept = held_columns(published)
    for cache in (published, bounded):
        assert cache.held().double().mean() == 20
        model(question, **hand_cache(cache))
    assert published.held().unique().tolist() == [40]
    assert all(torch.equal(columns[..., :60], kept[layer]) for layer, columns in held_columns(published).items())
    assert all(columns[..., 60:].all() for columns in held_columns(published).values())
    assert bounded.held().unique().tolist() == [20]
    for columns in held_columns(bounded).values():
        # Four sinks, and the newest of what came after.
        assert columns[..., :4].all() and columns[..., 64:].all() and not columns[..., 4:64].any()


@pytest.mark.parametrize("plan", ["kvzip @ keep=0.5", "kvzip_pooled @ keep=0.5", "kvzip + kivi(bits=4) @ keep=0.5"])
@torch.no_grad()
def test_a_plain_generate_is_refused_before_any_work(plan: str) -> None:
    model = build("llama")
    ids, mask = prompts((30, 20))
    worked = []
    model.model.layers[0].register_forward_hook(lambda *_: worked.append(1))
    cache = kvtailor.cache_for(model, plan)
    with pytest.raises(CacheMisuse, match=r"reads its context twice.*kvtailor\.prefill"):
        model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=2)
    with pytest.raises(CacheMisuse, match="reads its context twice"):
        model(ids, **hand_cache(cache))
    assert not worked
    kvtailor.prefill(model, ids, mask, cache=cache)
    assert worked and cache.seen == 30


@torch.no_grad()
def test_a_second_context_on_the_same_cache_is_refused_and_a_reset_one_takes_it() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    cache = kvtailor.prefill(model, ids, plan="kvzip @ keep=0.5")
    with pytest.raises(CacheMisuse, match="holds one already"):
        kvtailor.prefill(model, ids, cache=cache)
    cache.reset()
    with pytest.raises(CacheMisuse, match="reads its context twice"):
        model(ids, **hand_cache(cache))
    assert kvtailor.prefill(model, ids, cache=cache).seen == 30


def test_a_context_that_leaves_no_positions_is_refused_and_pieces_shrink_to_what_is_left() -> None:
    model = build("gpt2")
    ids, _ = prompts((510,))
    cache = kvtailor.cache_for(model, KEPT)
    with pytest.raises(CacheMisuse, match="510 tokens.*512 positions"):
        kvtailor.prefill(model, ids, cache=cache, instruction=WORDS)
    assert cache.seen == 0 and isinstance(cache.engine.phase, Compressing)
    # 512 positions: 6 are left for a piece after 500 tokens, 3 of instruction and 3 of lead.
    cache = kvtailor.prefill(model, ids[:, :500], plan=KEPT, instruction=WORDS)
    looked = cache.engine.states[0].observed.reconstruction
    assert looked.shape[-1] == 500 and (looked > 0).all()


def test_a_failure_between_the_passes_leaves_no_half_made_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    cache = kvtailor.cache_for(model, "kvzip @ keep=0.5")
    monkeypatch.setattr("kvtailor.engine.reading.ReconstructionPass._looked_at", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kvtailor.prefill(model, ids, cache=cache)
    assert cache.seen == 0
    monkeypatch.undo()
    whole = kvtailor.prefill(model, ids, cache=cache)
    fresh = kvtailor.prefill(model, ids, plan="kvzip @ keep=0.5")
    assert all(
        torch.equal(a, b) for a, b in zip(held_columns(whole).values(), held_columns(fresh).values(), strict=True)
    )


@pytest.mark.parametrize("plan", ["kvzip + cake @ keep=0.5", "kvzip + uniform + matching @ keep=0.5"])
def test_a_repeated_context_keeps_no_queries_since_nothing_is_evicted_after_it(plan, monkeypatch):
    model, ids = build("llama"), torch.randint(3, VOCABULARY, (1, 200), generator=torch.Generator().manual_seed(0))

    def turned():
        cache = kvtailor.prefill(model, ids[:, :190], plan=plan)
        there = [state.observed.evidence.has_queries for state in cache.engine.states]
        logits = model(ids[:, 190:], **hand_cache(cache)).logits
        ledger = cache.ledger()
        return there, ledger.by_stage.get("observe", 0), logits, ledger.held

    assert "observe" not in kvtailor.cache_size(model, plan, context=190).stages
    now = turned()
    monkeypatch.setattr(Engine, "_forget_queries", lambda *_: None)
    then = turned()
    assert not any(now[0]) and all(then[0]) and now[1] == 0 < then[1]
    assert torch.equal(now[2], then[2]) and now[3] == then[3]
