"""Every way in which people call a model, with plans that bind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

import kvtailor
from kvtailor.engine.state import LayerState
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.support.crossed import crossed
from tests.support.seam.zoo import COMPRESSIBLE, ROUNDING, build, error, held_columns, prompts

PLANS = (
    "streaming @ tokens=16",
    "snapkv(window=6) @ tokens=16",
    "snapkv(window=6) + adakv @ keep=0.4",
    "h2o(recent=6) @ tokens=16, slack=3",
    "kivi(bits=4, group=8, recent=8)",
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24",
    "quest(tokens=16, dense_layers=1) + indexed(page=4)",
    "position + rolling @ tokens=16, slack=3",
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) + rolling @ tokens=24",
    "snapkv(window=6) + rocket(tokens=8, expect=24) @ tokens=24",
    "random + adakv + rocket(tokens=8, expect=40) @ tokens=20, slack=4",
    "rocket(tokens=10, expect=9, turns=true, window=4, kernel=3)",
    "lagkv(sinks=2, lag=4) + chunks(size=4) @ tokens=16, slack=3",
    "tova + threshold(at=0.5) @ tokens=20, slack=3",
    "minicache(start=0.0, block_size=4, of=vector(bits=8, block_size=4))",
    "streaming + minicache(start=0.0, block_size=4) @ tokens=16, slack=3",
)


def can_rotate(family: str, plan: str) -> bool:
    """gpt2 has no rotary embedding."""
    return family != "gpt2" or not Plan.parse(plan).needs.rotation


@torch.no_grad()
def decoded(model, ids, mask, plan, steps=9, forced=None):
    """Logits (b, steps, v) of greedy (or forced) decoding on a fresh cache, and the cache."""
    cache = kvtailor.cache_for(model, plan)
    options = {} if model.config.model_type == "opt" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    logits = [model(ids, attention_mask=mask, **hand_cache(cache), **options).logits[:, -1]]
    for step in range(steps):
        token = logits[-1].argmax(-1, keepdim=True) if forced is None else forced[:, step : step + 1]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        options = {} if model.config.model_type == "opt" else {"position_ids": mask.sum(-1, keepdim=True) - 1}
        logits.append(model(token, attention_mask=mask, **hand_cache(cache), **options).logits[:, -1])
    return torch.stack(logits, 1), cache


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox", "gemma3"], PLANS))
def test_batched_equals_solo(family: str, plan: str) -> None:
    """A left-padded batch of three unequal prompts gives each row what it gets alone."""
    model = build(family)
    lengths = (48, 31, 40)
    ids, mask = prompts(lengths)
    forced = prompts((9, 9, 9), state=3)[0]
    together, batch = decoded(model, ids, mask, plan, forced=forced)
    held = held_columns(batch) if batch.plan.evicts else {}
    for row, length in enumerate(lengths):
        alone, solo = decoded(
            model, ids[row : row + 1, -length:], mask[row : row + 1, -length:], plan, forced=forced[row : row + 1]
        )
        assert error(together[row], alone[0]) < ROUNDING, f"row {row}"
        if batch.plan.evicts:
            for layer, columns in held_columns(solo).items():
                assert torch.equal(held[layer][row, :, -columns.shape[-1] :], columns[0])


@pytest.mark.parametrize(
    ("options", "plan"),
    crossed([{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 1}], PLANS),
)
def test_beams_and_several_sequences_run(options: dict, plan: str) -> None:
    model = build("llama")
    ids, mask = prompts((40, 33))
    cache = kvtailor.cache_for(model, plan)
    out = model.generate(
        ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=8, **{"do_sample": False, **options}
    )
    assert out.shape[1] == 48
    assert cache.ledger().total == cache.ledger().closed_form


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_reordered_cache_is_the_cache_of_the_reordered_batch(plan: str) -> None:
    model = build("llama")
    ids, mask = prompts((40, 33, 37))
    order = torch.tensor([2, 0, 2, 1])
    token = prompts((1,) * 4, state=9)[0]
    cache, direct = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache))
    model(ids[order], attention_mask=mask[order], **hand_cache(direct))
    cache.reorder_cache(order)
    mask = torch.cat([mask[order], torch.ones(4, 1, dtype=mask.dtype)], 1)
    found = model(token, attention_mask=mask, **hand_cache(cache)).logits
    assert error(found, model(token, attention_mask=mask, **hand_cache(direct)).logits) < ROUNDING


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox", "gpt2"], PLANS, possible=can_rotate))
def test_turn_two_equals_the_same_walk_by_hand(family: str, plan: str) -> None:
    """A second turn through plain generate() feeds only the new tokens, at the positions that follow."""
    model = build(family)
    ids, mask = prompts((36,))
    by_generate, by_hand = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    first = model.generate(ids, attention_mask=mask, **hand_cache(by_generate), max_new_tokens=6, do_sample=False)
    second = torch.cat([first, prompts((9,), state=4)[0]], 1)
    out = model.generate(
        second,
        attention_mask=torch.ones_like(second),
        **hand_cache(by_generate),
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with torch.no_grad():
        model(ids, **hand_cache(by_hand))
        for column in range(36, 41):
            model(second[:, column : column + 1], **hand_cache(by_hand))
        logits = [model(second[:, 41:], **hand_cache(by_hand)).logits[:, -1]]
        for column in range(51, 55):
            logits.append(model(out.sequences[:, column : column + 1], **hand_cache(by_hand)).logits[:, -1])
    assert max(error(a, b) for a, b in zip(out.logits, logits, strict=True)) < ROUNDING


@pytest.mark.parametrize(
    "plan", ["streaming @ tokens=20", "snapkv(window=6) + adakv @ tokens=20", "h2o(recent=6) @ tokens=20"]
)
def test_a_chunked_prefill_is_bounded(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak held tokens never exceed budget + chunk + window."""
    model = build("llama")
    ids, mask = prompts((200, 150))
    most = []
    append = LayerState.append

    def spied(self, *args, **kwargs):
        append(self, *args, **kwargs)
        most.append(float(self.counts().double().mean(1).max()))

    monkeypatch.setattr(LayerState, "append", spied)
    cache = kvtailor.cache_for(model, plan)
    model.generate(
        ids, attention_mask=mask, **hand_cache(cache), prefill_chunk_size=16, max_new_tokens=4, do_sample=False
    )
    assert cache.seen == 203
    assert 30 < max(most) <= 20 + 16 + 6
    assert float(cache.held().double().mean((1, 2)).max()) <= 20 + 33


@pytest.mark.parametrize(
    "plan",
    [
        "streaming @ tokens=12, slack=5",
        "h2o(recent=4) @ tokens=12, slack=5",
        "snapkv(window=4) + adakv @ tokens=12, slack=5",
    ],
)
@torch.no_grad()
def test_decoding_is_bounded_by_budget_and_slack(plan: str) -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    cache = kvtailor.cache_for(model, plan)
    model(ids, **hand_cache(cache))
    for token in prompts((40,), state=8)[0][0]:
        model(token[None, None], **hand_cache(cache))
        assert float(cache.held().double().mean()) <= 12 + 5
    assert cache.seen == 70


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "minicache" not in plan])
def test_prompt_lookup_with_plans_that_bind(plan: str) -> None:
    model = build("llama")
    ids = prompts((14,))[0].repeat(1, 4)
    cache = kvtailor.cache_for(model, plan)
    out = model.generate(ids, **hand_cache(cache), prompt_lookup_num_tokens=3, max_new_tokens=16, do_sample=False)
    assert out.shape[1] == 56 + 16
    assert cache.ledger().total == cache.ledger().closed_form
    if cache.plan.evicts:
        assert float(cache.held().double().mean()) < cache.seen


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "kivi" in plan])
def test_what_a_crop_accepts_is_encoded_in_whole_blocks(plan: str) -> None:
    """Under assisted decoding the tail stays as short as it does token by token, and no crumbs are encoded."""
    model = build("llama")
    ids = prompts((14,))[0].repeat(1, 4)
    cache = kvtailor.cache_for(model, plan)
    model.generate(ids, **hand_cache(cache), prompt_lookup_num_tokens=3, max_new_tokens=40, do_sample=False)
    for state in cache.engine.states:
        codec = state.codec(cache.plan)
        # The last forward waits for a crop that never came.
        assert state.stored.segments and state.stored.tail.length <= codec.tail + codec.block + 4
        assert len(state.stored.segments) <= 2 + 40 // codec.block


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_rejected_draft_leaves_no_trace(plan: str) -> None:
    """Forward of good + wrong tokens, then a crop, is the forward of the good ones."""
    model = build("llama")
    ids, _ = prompts((40,))
    # Layers that are encoded together take no more than the rest of a block at once.
    count = 1 if "minicache" in plan else 2
    good, wrong = prompts((3,), state=2)[0], prompts((count,), state=6)[0]
    drafted, plain = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    for cache in (drafted, plain):
        cache.activate_past_recording()
        model(ids, **hand_cache(cache))
        cache.crop(0)
    model(torch.cat([good, wrong], 1), **hand_cache(drafted))
    drafted.crop(-count)
    model(good, **hand_cache(plain))
    plain.crop(0)
    token = prompts((1,), state=11)[0]
    expected = model(token, **hand_cache(plain)).logits
    assert error(model(token, **hand_cache(drafted)).logits, expected) < ROUNDING
    assert drafted.seen == plain.seen == 44


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_deep_copy_is_another_cache(plan: str) -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(model, plan)
    model(ids, **hand_cache(cache))
    token = prompts((1,), state=11)[0]
    twin = copy.deepcopy(cache)
    model(prompts((5,), state=12)[0], **hand_cache(cache))
    fresh = kvtailor.cache_for(model, plan)
    model(ids, **hand_cache(fresh))
    assert torch.equal(model(token, **hand_cache(twin)).logits, model(token, **hand_cache(fresh)).logits)


def test_two_threads_on_two_caches() -> None:
    model = build("llama")
    ids = [prompts((40,), state=i)[0] for i in range(2)]
    plans = ("snapkv(window=6) + adakv @ tokens=16", "h2o(recent=6) @ tokens=16, slack=3")
    alone = [
        model.generate(i, **hand_cache(kvtailor.cache_for(model, p)), max_new_tokens=20, do_sample=False)
        for i, p in zip(ids, plans, strict=True)
    ]
    found: list = [None, None]

    def work(which: int) -> None:
        cache = kvtailor.cache_for(model, plans[which])
        found[which] = model.generate(ids[which], **hand_cache(cache), max_new_tokens=20, do_sample=False)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize(("family", "dtype"), crossed(COMPRESSIBLE, [torch.bfloat16, torch.float16]))
def test_low_precision_runs_every_family(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    ids, mask = prompts((40, 29))
    for plan in (
        "snapkv(window=6) + adakv @ tokens=16",
        "snapkv(window=6) + kivi(bits=4, group=8, recent=8) @ tokens=24",
    ):
        cache = kvtailor.cache_for(model, plan)
        out = model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=6, do_sample=False)
        assert out.shape == (2, 46)


def test_a_session_scores_and_restores() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    with kvtailor.session(model, "snapkv(window=6) @ tokens=16") as s:
        at_once = s.score(ids[:, :30], ids[:, 30:])
        held = s.last.held()
        streamed = s.score(ids[:, :30], ids[:, 30:], chunk=1)
        assert s.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 44)
    assert model.config._attn_implementation == "sdpa"
    assert at_once.shape == (1, 10) and (at_once < 0).all()
    assert float(held.double().mean()) < 39
    assert error(streamed, at_once) < 1e-4
