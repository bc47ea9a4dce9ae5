"""Plans of the scope "progressive": cut as layers come, less held at the peak, the same kept sets however they came."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvtailor
from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.engine.state import LayerState
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.allocate.test_dynamickv import rounds
from tests.seam.test_modes import decoded
from tests.support.live_bytes import LiveBytes
from tests.support.seam.zoo import ROUNDING, MaskedReference, build, error, held_columns, prompts

SNAP = "snapkv(window=6, kernel=3)"
DYNAMIC = f"{SNAP} + dynamickv(interval=2, most=2.5)"
CODEC = "kivi(bits=4, group=8, recent=8)"
PLANS = (
    f"{DYNAMIC} @ tokens=16",
    f"{DYNAMIC} + {CODEC} @ tokens=24",
    f"{SNAP} + cake(window=8) @ tokens=16",
    f"h2o(recent=6) + cake(window=8) + {CODEC} @ tokens=24",
    "h2o(recent=6) + cake(window=8) @ tokens=20, slack=3",
    "random + dynamickv(interval=2, most=2.5) @ keep=0.4",
    f"{DYNAMIC} + indexed(page=4) + quest(tokens=12) @ tokens=24",
)


@torch.no_grad()
def prefilled(model, plan, ids: Tensor, mask: Tensor):
    cache = kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache), position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    return cache


def snapkv_of(attention: Tensor, window: int, kernel: int, heads: int) -> Tensor:
    """(h, n - window) SnapKV's votes from a whole attention matrix (q, n, n) of one row."""
    votes = attention[:, -window:, :-window].sum(1).unflatten(0, (heads, -1)).mean(1)
    return F.avg_pool1d(votes[None], kernel, stride=1, padding=kernel // 2)[0]


@pytest.mark.parametrize(("tokens", "interval", "most"), [(16, 2, 2.5), (9, 4, 10.0), (30, 3, 1.2)])
@torch.no_grad()
def test_dynamickv_keeps_what_its_definition_keeps(tokens: int, interval: int, most: float) -> None:
    """From eager attention matrices, pooled votes and sorted lists alone."""
    model, eager = build("llama", layers=7), build("llama", layers=7, attention="eager")
    ids, mask = prompts((63,))
    plan = f"{SNAP} + dynamickv(interval={interval}, most={most}) @ tokens={tokens}"
    held = held_columns(prefilled(model, plan, ids, mask))
    scores = [snapkv_of(each[0], 6, 3, 2) for each in eager(ids, output_attentions=True).attentions]
    budgets = rounds([each.tolist() for each in scores], tokens, 6, interval, most)[-1]
    assert sum(budgets) == 7 * (tokens - 6) and len(set(budgets)) > 1
    for layer, (of_layer, budget) in enumerate(zip(scores, budgets, strict=True)):
        for head in range(2):
            kept = sorted(of_layer[head].topk(budget).indices.tolist()) + list(range(57, 63))
            assert held[layer][0, head].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("plan", PLANS)
def test_batched_equals_solo(plan: str) -> None:
    model = build("llama", layers=5)
    lengths = (48, 31, 40)
    ids, mask = prompts(lengths)
    forced = prompts((10, 10, 10), state=3)[0]
    together, batch = decoded(model, ids, mask, plan, forced=forced)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone, solo = decoded(model, ids[one, -length:], mask[one, -length:], plan, forced=forced[one])
        assert error(together[row], alone[0]) < ROUNDING, f"row {row}"
        for layer, columns in held_columns(solo).items():
            assert torch.equal(held_columns(batch)[layer][row, :, -columns.shape[-1] :], columns[0])


@pytest.mark.parametrize(
    "plan", [PLANS[0], PLANS[2], f"{DYNAMIC} @ keep=0.4, slack=6", f"{SNAP} + cake @ tokens=16, slack=4"]
)
@torch.no_grad()
def test_logits_equal_a_full_cache_with_the_dropped_tokens_masked(plan: str) -> None:
    model, reference = build("llama"), MaskedReference("llama")
    ids, mask = prompts((56, 43, 31))
    cache = kvtailor.cache_for(model, plan)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    token = model(ids, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits[:, -1:].argmax(-1)
    reference(ids, mask, {})
    for step in range(12):
        held = held_columns(cache)
        assert sum(int((~columns & mask.bool()[:, None]).sum()) for columns in held.values()) > 0
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        positions = mask.sum(-1, keepdim=True) - 1
        logits = model(token, attention_mask=mask, **hand_cache(cache), position_ids=positions).logits
        assert error(logits, reference(token, mask, held)) < ROUNDING, f"at decoded token {step}"
        token = logits.argmax(-1)


def most_held(model, plan: str, ids: Tensor, mask: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of all layers, heads and rows at the moment when the last layer's arrive; where that is the peak."""
    held: list[int] = []
    append = LayerState.append

    def spied(self: LayerState, *args, **kwargs) -> None:
        append(self, *args, **kwargs)
        held.append(sum(int(s.counts().sum()) for s in cache.engine.states if s.rows))

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(LayerState, "append", spied)
        cache = kvtailor.cache_for(model, plan)
        model(ids, attention_mask=mask, **hand_cache(cache))
    return max(held)


@pytest.mark.parametrize("score", [SNAP, "h2o(recent=6)", "random"])
def test_the_peak_of_a_prefill_is_below_that_of_a_plan_that_waits(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", layers=8)
    ids, mask = prompts((200, 150))
    tokens, heads, n = 16, 2, 200 + 200
    budget = tokens * 8 * 2 * heads
    waiting = most_held(model, f"{score} + pooled @ tokens={tokens}", ids, mask, monkeypatch)
    assert waiting == 8 * heads * n
    cascade = most_held(model, f"{score} + cake(window=8) @ tokens={tokens}", ids, mask, monkeypatch)
    assert cascade <= budget + heads * n, "the budget and one layer"
    rounds_of_two = most_held(
        model, f"{score} + dynamickv(interval=2, most=2) @ tokens={tokens}", ids, mask, monkeypatch
    )
    assert rounds_of_two <= budget + heads * n + 2 * heads * 2 * tokens, "the budget, one layer, and a generous share"
    assert max(cascade, rounds_of_two) < waiting / 3


@pytest.mark.parametrize("codec", [CODEC, "indexed(page=4)"])
@pytest.mark.parametrize("allocator", ["cake(window=8)", "dynamickv(interval=2, most=2.5)"])
def test_a_codec_encodes_once_what_stays_in_the_end(codec: str, allocator: str) -> None:
    """The same tokens as without a codec, in the bytes of segments that were never moved."""
    model = build("llama", layers=5)
    ids, mask = prompts((63, 40))
    plan = f"{SNAP} + {allocator} @ tokens=24"
    plain, encoded = prefilled(model, plan, ids, mask), prefilled(model, plan.replace(" @", f" + {codec} @"), ids, mask)
    for layer, columns in held_columns(plain).items():
        assert torch.equal(held_columns(encoded)[layer], columns)
    kind = encoded.plan.encode.segment_type()
    segments = [segment for state in encoded.engine.states for segment in state.stored.segments]
    assert segments and all(isinstance(segment, kind) for segment in segments)
    assert all(getattr(segment, "key_group", None) is None for segment in segments)
    assert encoded.ledger().total == encoded.ledger().closed_form


@dataclass(frozen=True, kw_only=True)
class AtOnce(Allocator):
    """The same for all, each layer when it comes and never again: what waits to be encoded is not cut a second time.

    Attributes:
        less: tokens that each row has less than the one before.
    """

    less: int = 0
    scope: ClassVar[str] = "progressive"
    needs_scores: ClassVar[bool] = True
    even_heads: ClassVar[bool] = True

    def allocate(self, request: BudgetRequest) -> Tensor:
        assert request.scores is not None
        for scores, capacity in zip(request.scores, request.capacity.unbind(1), strict=True):
            assert torch.equal((scores > -torch.inf).sum(-1), capacity), "a score for each token that is held"
        each = request.total // (request.num_layers * request.capacity.shape[-1])
        each = each - self.less * torch.arange(len(each))
        return torch.minimum(request.capacity, each[:, None, None])


@pytest.mark.parametrize("lengths", [(63,), (63, 40, 50)], ids=str)
@pytest.mark.parametrize("codec", ["plain", CODEC, "indexed(page=4)"])
def test_layers_that_were_cut_early_are_encoded_in_the_end(codec: str, lengths: tuple[int, ...]) -> None:
    model = build("llama", layers=4)
    ids, mask = prompts(lengths)
    usual = Plan.parse(f"{SNAP} + {codec} @ keep=0.4")
    expected, found = prefilled(model, usual, ids, mask), prefilled(model, replace(usual, allocate=AtOnce()), ids, mask)
    for one, other in zip(found.engine.states, expected.engine.states, strict=True):
        assert [type(segment) for segment in one.stored.segments] == [
            type(segment) for segment in other.stored.segments
        ]
    token = prompts((1,) * len(lengths), state=11)[0]
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
    with torch.no_grad():
        logits = model(token, **hand_cache(found), **options).logits
        assert error(logits, model(token, **hand_cache(expected), **options).logits) < ROUNDING
    assert found.ledger().total == expected.ledger().total


def test_scores_stay_with_their_tokens_where_rows_hold_different_numbers() -> None:
    """See the assertion in `AtOnce`."""
    ids, mask = prompts((63, 63, 63))
    plan = replace(Plan.parse("random @ tokens=20"), allocate=AtOnce(less=7))
    cache = prefilled(build("llama"), plan, ids, mask)
    assert cache.held()[:, 0, 0].tolist() == [20, 13, 6]


@pytest.mark.parametrize(
    "plan", [f"{DYNAMIC} @ tokens=16", f"{SNAP} + cake @ tokens=16", f"{SNAP} + pooled @ tokens=16"]
)
def test_nothing_outlives_the_walk_but_what_the_ledger_lists(plan: str) -> None:
    model = build("llama", layers=5)
    ids, mask = prompts((63, 40))
    prefilled(model, plan, ids, mask)
    with torch.inference_mode(), LiveBytes() as count:
        cache = kvtailor.cache_for(model, plan)
        model(ids, attention_mask=mask, **hand_cache(cache))
        gc.collect()
        torch.zeros(1)
    # The ids of the forward are no layer's.
    assert count.now <= cache.ledger().total + cache.conversation.bytes + 64


@pytest.mark.parametrize("plan", PLANS)
def test_a_chunked_prefill_is_bounded_and_ends_within_the_budget(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", layers=5)
    ids, mask = prompts((120, 90))
    most = []
    append = LayerState.append

    def spied(self, *args, **kwargs):
        append(self, *args, **kwargs)
        most.append(sum(float(s.counts().double().mean()) for s in cache.engine.states if s.rows))

    monkeypatch.setattr(LayerState, "append", spied)
    cache = kvtailor.cache_for(model, plan)
    out = model.generate(
        ids, attention_mask=mask, **hand_cache(cache), prefill_chunk_size=16, max_new_tokens=4, do_sample=False
    )
    assert out.shape == (2, 124)
    # Each layer: its budget, the chunk, what is decoded, and a generous share where one waits for the next update.
    share = 48 if "keep" in plan else 24
    assert max(most) <= 5 * (share + 3) + 16 * 5 and max(most) < 0.75 * 5 * 120
    assert float(cache.held().double().mean()) <= share + 4


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_rejected_draft_leaves_no_trace(plan: str) -> None:
    model = build("llama", layers=5)
    ids, _ = prompts((40,))
    # Layers that share a budget can only be cut after a whole forward: with slack=3 after 4 tokens.
    count = 1 if "slack" in str(plan) else 2
    good, wrong = prompts((3,), state=2)[0], prompts((count,), state=6)[0]
    drafted, plain = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    for cache in (drafted, plain):
        cache.activate_past_recording()
        model(ids, **hand_cache(cache))
        cache.crop(0)
    assert float(plain.held().double().mean()) < 40
    model(torch.cat([good, wrong], 1), **hand_cache(drafted))
    drafted.crop(-count)
    model(good, **hand_cache(plain))
    plain.crop(0)
    token = prompts((1,), state=11)[0]
    expected = model(token, **hand_cache(plain)).logits
    assert error(model(token, **hand_cache(drafted)).logits, expected) < ROUNDING


@torch.no_grad()
def test_a_forward_that_broke_off_half_way_leaves_nothing_behind() -> None:
    model, plan = build("llama", layers=5), PLANS[0]
    ids, mask = prompts((40,))
    broken, fresh = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
    layer = model.model.layers[3]
    hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(ids, attention_mask=mask, **hand_cache(broken))
    hook.remove()
    broken.reset()
    logits = model(ids, attention_mask=mask, **hand_cache(broken)).logits
    assert torch.equal(logits, model(ids, attention_mask=mask, **hand_cache(fresh)).logits)
    assert torch.equal(broken.held(), fresh.held())
