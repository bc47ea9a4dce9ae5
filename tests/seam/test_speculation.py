"""`kvtailor.generate`: the target's own text whoever drafts, caches as plain decoding leaves them, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.engine.phase import Compressing
from kvtailor.errors import CacheMisuse, PlanError, UnsupportedModel
from kvtailor.hf.model.loading import load
from kvtailor.hf.versions import hand_cache
from tests.support.seam.zoo import ROUNDING, VOCABULARY, build, error, held_columns, prompts

TARGETS = [
    "full",
    "kivi(bits=4, recent=32)",
    "snapkv(window=4) + adakv @ tokens=12, slack=9",
    "h2o(recent=4) @ tokens=12, slack=11",
    "tova + vector(bits=8, block_size=6) @ tokens=20, slack=13",
    "streaming + rolling @ tokens=12, slack=10",
    "minicache(start=0, block_size=10)",
    "h2o(recent=4) + d2o @ tokens=16, slack=12",
    "snapkv(window=4) @ keep=0.5",
    "disk(on_device_layers=1, block=8)",
    "vector(bits=8, block_size=6) + disk(resident_layers=1)",
]
DRAFTS = [
    "full",
    "streaming @ tokens=16",
    "h2o(recent=4) @ tokens=24",
    "retrieval(chunk=4) @ tokens=24",
    "indexed(page=4) + quest(tokens=16)",
    "disk(block=8)",
]
LENGTH = 20


def plain(model, ids: Tensor, plan: str, count: int = LENGTH, mask: Tensor | None = None) -> tuple[Tensor, object]:
    """transformers' own greedy decoding, one token at a time."""
    cache = kvtailor.cache_for(model, plan)
    options = {} if mask is None else {"attention_mask": mask}
    return model.generate(ids, **hand_cache(cache), max_new_tokens=count, do_sample=False, **options), cache


def nearly(family: str, strength: float = 0.05):
    """A draft model that is like `build(family)`."""
    other = build(family)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * strength * parameter.std()
    return other


@pytest.mark.parametrize("target", TARGETS)
def test_greedy_text_is_that_of_plain_decoding_and_so_is_the_cache(target: str) -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    expected, cache = plain(model, ids, target)
    draft = "streaming @ tokens=16" if target == "full" else "full"
    found = kvtailor.generate(model, ids, plan=target, draft_plan=draft, gamma=4, min_gain=None, max_new_tokens=LENGTH)
    assert torch.equal(found.sequences, expected)
    assert found.statistics.levels[0].verifications > 3
    assert_same_state(found.cache, cache)


def assert_same_state(found, expected, mask: Tensor | None = None) -> None:
    """Held columns, segments, evidence and running mass of two caches; `mask`: padding may differ."""
    assert found.seen == expected.seen
    for layer, columns in held_columns(expected).items():
        assert torch.equal(held_columns(found)[layer], columns)
    for mine, other in zip(found.engine.states, expected.engine.states, strict=True):
        assert mine.pending is None and isinstance(found.engine.phase, Compressing)
        assert (mine.clock.growth, mine.clock.evict_at) == (other.clock.growth, other.clock.evict_at)
        assert len(mine.stored.segments) == len(other.stored.segments)
        for one, two in zip(mine.parts(), other.parts(), strict=True):
            real = torch.ones(one.layout.lanes, one.layout.size, dtype=torch.bool)
            if mask is not None:
                columns = one.layout.columns(torch.device("cpu")).expand_as(real)
                real = mask[one.layout.owners(torch.device("cpu")) // one.layout.heads].gather(1, columns) > 0
            for a, b in zip(one.decode(), two.decode(), strict=True):
                assert error(a[real], b[real]) < 1e-3
        for one, two in zip(mine.observed.evidence.mass, other.observed.evidence.mass, strict=True):
            assert error(one, two[:, : one.shape[1]]) < 1e-4


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_kind_of_plan_can_draft(draft: str) -> None:
    model = build("llama")
    ids, _ = prompts((63,))
    expected, _ = plain(model, ids, "full", 30)
    found = kvtailor.generate(model, ids, draft_plan=draft, gamma=3, min_gain=None, max_new_tokens=30)
    assert torch.equal(found.sequences, expected)
    assert (found.statistics.acceptance == 1.0) == draft.startswith(("full", "disk"))


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3", "mistral_window", "gpt2"])
def test_models_of_other_kinds(family: str) -> None:
    """Two of them have sliding windows of their own, which are rolled back too."""
    model = build(family)
    ids, _ = prompts((40,))
    expected = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)
    found = kvtailor.generate(
        model, ids, draft=nearly(family), middle_plan="full", gamma=4, min_gain=None, max_new_tokens=LENGTH
    )
    assert torch.equal(found.sequences, expected)
    assert found.cache.seen == 40 + LENGTH - 1
    assert found.statistics.levels[1].accepted > 0


@pytest.mark.parametrize("middle", [None, "retrieval @ tokens=32"])
def test_a_draft_model_and_the_hierarchy(middle: str | None) -> None:
    model = build("llama")
    ids, _ = prompts((63,))
    target = "kivi(bits=4, recent=32)"
    expected, cache = plain(model, ids, target, 28)
    found = kvtailor.generate(
        model,
        ids,
        plan=target,
        draft=nearly("llama"),
        draft_plan="streaming @ tokens=48",
        middle_plan=middle,
        gamma=5,
        min_gain=None,
        max_new_tokens=28,
    )
    assert torch.equal(found.sequences, expected)
    assert len(found.statistics.levels) == (1 if middle is None else 2)
    assert all(level.accepted > 0 for level in found.statistics.levels)
    assert_same_state(found.cache, cache)


@pytest.mark.parametrize("target", ["full", "h2o(recent=4) + adakv @ tokens=12, slack=11"])
def test_a_padded_batch_goes_in_step(target: str) -> None:
    model = build("llama")
    ids, mask = prompts((40, 23, 31))
    expected, cache = plain(model, ids, target, mask=mask)
    found = kvtailor.generate(
        model, ids, mask, plan=target, draft_plan="full", gamma=4, min_gain=None, max_new_tokens=LENGTH
    )
    assert torch.equal(found.sequences, expected)
    assert_same_state(found.cache, cache)


def test_the_controller_changes_the_speed_and_not_the_text() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    expected, _ = plain(model, ids, "full", 90)
    found = kvtailor.generate(model, ids, draft_plan="streaming @ tokens=8", min_gain=1.05, max_new_tokens=90)
    assert torch.equal(found.sequences, expected)
    assert found.statistics.plain_tokens > 45
    assert found.statistics.speed_up is not None and found.statistics.plain_seconds > 0


def test_a_refreshed_cache_is_made_of_the_whole_text() -> None:
    model = build("llama")
    ids, _ = prompts((63,))
    expected, _ = plain(model, ids, "full", 45)
    seen: list[int] = []
    for refresh in (None, 20):
        found = kvtailor.generate(
            model,
            ids,
            draft_plan="retrieval(chunk=4) @ tokens=60",
            gamma=3,
            min_gain=None,
            refresh=refresh,
            max_new_tokens=45,
        )
        assert torch.equal(found.sequences, expected)
        seen.append(found.statistics.levels[0].accepted)
    assert seen[0] != seen[1]


def test_eos_inside_an_accepted_run_ends_text_and_cache_there() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    whole, _ = plain(model, ids, "full", 30)
    eos = int(whole[0, 40 + 13])
    first = int((whole[0, 40:] == eos).nonzero()[0])
    found = kvtailor.generate(
        model, ids, draft_plan="full", gamma=8, min_gain=None, max_new_tokens=30, eos_token_id=[VOCABULARY, eos]
    )
    assert torch.equal(found.sequences, whole[:, : 40 + first + 1])
    assert found.cache.seen == 40 + first
    # The conversation goes on from there as if nothing had been drafted beyond.
    token = torch.tensor([[7]])
    more = model(torch.cat([found.sequences[:, -1:], token], 1), **hand_cache(found.cache)).logits[:, -1]
    alone = model(torch.cat([found.sequences, token], 1)).logits[:, -1]
    assert error(more, alone) < ROUNDING


@pytest.mark.parametrize("target", ["full", "h2o(recent=4) @ tokens=12, slack=11"])
@pytest.mark.parametrize("strength", [0.0, 0.02])
@pytest.mark.parametrize("place", [5, 9])
def test_ended_rows_of_a_batch_are_padded(target: str, strength: float, place: int) -> None:
    """In the text and in the cache, whatever was drafted behind a row's end."""
    model = build("llama")
    ids, mask = prompts((30, 30, 30))
    whole, _ = plain(model, ids, target, 30)
    eos = int(whole[0, 30 + place])
    options = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": 30}
    cache = kvtailor.cache_for(model, target)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **hand_cache(cache), **options)
    assert (expected[:, 30:] == 0).any()
    draft = nearly("llama", strength)
    found = kvtailor.generate(model, ids, mask, plan=target, draft=draft, gamma=4, min_gain=None, **options)
    assert torch.equal(found.sequences, expected)
    level = found.statistics.levels[0]
    assert level.accepted > 0 and (level.accepted == level.proposed or (target, strength) != ("full", 0.0))
    assert_same_state(found.cache, cache)
    more = torch.cat([expected, prompts((6, 6, 6), state=8)[0]], 1)
    turns = [
        model.generate(more, attention_mask=torch.ones_like(more), do_sample=False, **hand_cache(each), **options)
        for each in (found.cache, cache)
    ]
    assert torch.equal(*turns)


def test_a_streamer_gets_the_prompt_and_then_each_token_in_order() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[list[int]] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            assert not self.ended
            self.got.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    model = build("llama")
    ids, _ = prompts((40,))
    streamer = Streamer()
    found = kvtailor.generate(
        model, ids, draft_plan="full", gamma=4, min_gain=None, max_new_tokens=25, streamer=streamer
    )
    assert streamer.ended and streamer.got[0] == ids[0].tolist()
    assert streamer.got[1:] == [[token] for token in found.sequences[0, 40:].tolist()]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"plan": "indexed + quest", "draft_plan": "full"}, PlanError, "may be the draft's plan"),
        ({"plan": "rocketkv", "draft_plan": "full"}, PlanError, "may be the draft's plan"),
        ({"plan": "h2o(recent=4) @ tokens=12, slack=0", "draft_plan": "full"}, PlanError, "evicts after every token"),
        ({"plan": "vector(block_size=1)", "draft_plan": "full"}, PlanError, "encodes after every token"),
        ({"middle_plan": "full"}, CacheMisuse, "there is no draft model"),
        ({"refresh": 8}, CacheMisuse, "give draft_plan= or middle_plan="),
        ({"draft_plan": "full", "gamma": "best"}, CacheMisuse, "or 'adaptive'"),
        ({"draft_plan": "full", "gamma": 0}, ValueError, "gamma must be at least 1"),
        ({"draft_plan": "full", "inner_gamma": 0}, ValueError, "inner_gamma must be at least 1"),
        ({"draft_plan": "full", "refresh": 0}, ValueError, "refresh must be at least 1"),
        ({"draft_plan": "full", "min_gain": 0.0}, ValueError, "min_gain must be above 0"),
        ({"max_new_tokens": 0}, CacheMisuse, "max_new_tokens of at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(options, kind, message: str) -> None:
    model = build("llama")

    def refuse(*args, **kwargs):
        raise AssertionError("the model was asked")

    model.forward = refuse
    with pytest.raises(kind, match=message):
        kvtailor.generate(model, prompts((20,))[0], **options)


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    model = build("llama")
    with pytest.raises(UnsupportedModel, match="5120 tokens and the target 131"):
        kvtailor.generate(model, prompts((20,))[0], draft=load("demo-draft")[0])


def test_nobody_drafts_by_default() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    expected, _ = plain(model, ids, "full", 20)
    found = kvtailor.generate(model, ids, max_new_tokens=20)
    assert torch.equal(found.sequences, expected)
    assert found.statistics.acceptance is None and found.statistics.plain_tokens == 19
