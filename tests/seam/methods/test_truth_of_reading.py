"""Truth of sparse reading: the logits are those of a full cache in which exactly the unread tokens are masked.

What was read is what reached the softmax: the keys that the method hands over are looked up among all that the model
has made, so that nobody's word is taken for it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import kvtailor
import kvtailor.attend.quest
import kvtailor.attend.rocket
from kvtailor.engine.state import LayerState
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import dispatch
from kvtailor.ops.attention.lanes import Lanes
from kvtailor.ops.segments.coded import Whole
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, MaskedReference, build, error, held_columns, prompts

PLANS = (
    "quest(tokens=12, least=1, dense_layers=0) + indexed(page=4, block_size=8)",
    "quest(tokens=12, least=1, dense_layers=1) + indexed(page=4, block_size=8)",
    "rocket(tokens=16, expect=8)",
    "rocket(tokens=30, expect=150)",
    "snapkv(window=6, kernel=9, pooling=max, reduce=sum) + rocket(tokens=16, expect=30)",
    "snapkv(window=6) + adakv + rocket(tokens=12, expect=40) @ tokens=24",
    "snapkv(window=4) + rocket(tokens=12, expect=40) @ tokens=24, slack=3",
    "rocket(tokens=16, expect=12, turns=true, window=4, kernel=5)",
)


class Watched:
    """Keys of every layer as they were made, and what the attention of each layer read last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made: dict[int, list[Tensor]] = {}
        self.read: dict[int, Tensor] = {}
        self.now = 0
        append = LayerState.append

        def appended(state: LayerState, keys: Tensor, values: Tensor, **options) -> None:
            self.made.setdefault(state.index, []).append(keys.clone())
            self.read.pop(state.index, None)
            self.now = state.index
            append(state, keys, values, **options)

        monkeypatch.setattr(LayerState, "append", appended)
        for module in (kvtailor.attend.quest, kvtailor.attend.rocket):
            monkeypatch.setattr(module, "read_lanes", self.watched(module.read_lanes))
        self.in_place: list[Lanes] = []
        page_attention = dispatch.page_attention

        def pages_of(*sides):
            attend = page_attention(*sides)
            return None if attend is None else partial(self.of_pages, attend)

        monkeypatch.setattr(dispatch, "page_attention", pages_of)

    def of_pages(self, attend, inputs, pages, page):
        """What a kernel reads where it lies joins what `read_lanes` is given beside it."""
        keys, values = inputs.keys.states, inputs.values.states
        slots = torch.arange(keys.shape[1])
        # (m, k, s): whether a slot is in a named page.
        named = (slots // page == pages[..., None]).any(1)
        seen = named if inputs.visible is None else named & inputs.visible[:, 0]
        self.in_place.append(Lanes(keys=keys, values=values, visible=seen[:, None], owner=inputs.owner))
        nothing = torch.where(named[..., None], values, torch.nan)
        return attend(inputs._replace(values=Whole(states=nothing)), pages, page)

    def watched(self, read_lanes):
        def reads(query, heads, lanes, scaling, **more):
            every = torch.cat(self.made[self.now], 2)
            found = torch.zeros(every.shape[:3], dtype=torch.bool)
            for lane in [*lanes, *self.in_place]:
                owners = torch.arange(len(lane.keys)) if lane.owner is None else lane.owner
                seen = torch.ones(lane.keys.shape[:2], dtype=torch.bool)
                seen = seen if lane.visible is None else lane.visible.expand(len(seen), 1, -1)[:, 0]
                for owner, keys in zip(
                    owners.tolist(), [k[s] for k, s in zip(lane.keys, seen, strict=True)], strict=True
                ):
                    row, head = divmod(owner, heads)
                    same = (every[row, head][:, None] == keys[None]).all(-1)
                    assert bool((same.sum(0) == 1).all()), "a key that the model never made, or made twice"
                    assert not bool(found[row, head][same.any(1)].any()), "a token was read twice"
                    found[row, head] |= same.any(1)
            self.read[self.now] = found
            self.in_place.clear()
            return read_lanes(query, heads, lanes, scaling, **more)

        return reads


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox", "gemma3"], PLANS))
def test_logits_equal_a_full_cache_with_the_unread_tokens_masked(
    family: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_reading(family, plan, monkeypatch)


def test_so_where_pages_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "page_attention", lambda *_: None)
    check_reading("llama", PLANS[0], monkeypatch)


@torch.no_grad()
def check_reading(
    family: str, plan: str, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...] = (56, 43, 31), steps: int = 18
) -> None:
    """A padded batch of three: prompt, single tokens, a second turn after two thirds of the steps, single tokens."""
    watched = Watched(monkeypatch)
    model, reference = build(family), MaskedReference(family)
    ids, mask = prompts(lengths)
    cache = kvtailor.cache_for(model, plan)
    token, held, unread = ids, {}, 0
    for step in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token.shape[1] :]
        logits = model(token, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits
        allowed = dict(held)
        for index, read in watched.read.items():
            layer = cache.geometry.compressed[index]
            state = cache.engine.states[index]
            assert torch.equal(read.sum(-1), state.observed.tokens_read), "says that it read something else"
            before = held.get(layer, torch.zeros_like(read))
            before = torch.cat([before, torch.ones_like(read[..., before.shape[-1] :])], -1)
            assert not bool((read & ~before).any()), "read what it does not hold"
            unread += int((before & mask.bool()[:, None] & ~read).sum())
            allowed[layer] = read
        real = mask[:, -token.shape[1] :, None]
        assert error(logits * real, reference(token, mask, allowed) * real) < ROUNDING, f"at forward {step}"
        assert bool(watched.read) == (token.shape[1] == 1), "several tokens at a time read everything, one does not"
        held = held_columns(cache)
        for state, columns in zip(cache.engine.states, held.values(), strict=True):
            indexed = state.observed.carry.get("columns", torch.full((3, columns.shape[1], 1), -1)).long()
            assert bool((columns.gather(2, indexed.clamp(min=0)) | (indexed < 0)).all()), "bounds of what is gone"
        token = prompts((5,) * 3, state=20 + step)[0] if step == steps * 2 // 3 else logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(token.shape)], 1)
    assert unread > 1000, "everything was read, so this test has shown nothing"
    if "turns" in plan:
        assert all(
            bool(columns[mask[:, : columns.shape[-1]].bool()[:, None].expand_as(columns)].all())
            for columns in held.values()
        )


@torch.no_grad()
def test_the_reference_notices_other_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick can fail: what two heads read, swapped, gives other logits."""
    watched = Watched(monkeypatch)
    model, reference = build("llama"), MaskedReference("llama")
    ids, mask = prompts((56,))
    cache = kvtailor.cache_for(model, "rocket(tokens=16, expect=8)")
    token = model(ids, **hand_cache(cache)).logits[:, -1:].argmax(-1)
    reference(ids, mask, {})
    mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
    logits = model(token, **hand_cache(cache)).logits
    swapped = {layer: read.flip(1) for layer, read in watched.read.items()}
    assert len(swapped) == 3 and error(logits, reference(token, mask, swapped)) > 1e-2


EVICTING = "snapkv(window=4, kernel=5, pooling=max, reduce=sum) + rocket(tokens=16, expect=12)"
TURNS = "rocket(tokens=16, expect=12, turns=true, window=4, kernel=5)"


@pytest.mark.parametrize(("family", "chunk"), crossed(["llama", "gpt_neox", "gemma3"], [None, 19, 17]))
@torch.no_grad()
def test_a_turn_chooses_what_the_eviction_would_keep(family: str, chunk: int | None) -> None:
    """Until the next turn the two are the same, however the prompt was fed to the one that forgets nothing."""
    model = build(family)
    ids, mask = prompts((70, 43, 61))
    evicting, turns = kvtailor.cache_for(model, EVICTING), kvtailor.cache_for(model, TURNS)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    one = model(ids, attention_mask=mask, position_ids=positions, **hand_cache(evicting)).logits[:, -1:]
    begin = 0
    for piece in ids.split(chunk or 70, 1):
        end = begin + piece.shape[1]
        two = model(piece, attention_mask=mask[:, :end], position_ids=positions[:, begin:end], **hand_cache(turns))
        begin = end
    kept = held_columns(evicting)
    assert 0 < max(int(columns[0].sum(-1).max()) for columns in kept.values()) < 70
    for state, columns in zip(turns.engine.states, kept.values(), strict=True):
        for row in range(3):
            for head in range(state.heads):
                chosen = state.observed.carry["chosen"][row, head]
                assert chosen[chosen >= 0].tolist() == columns[row, head].nonzero()[:, 0].tolist()
    logits, token = two.logits[:, -1:], one.argmax(-1)
    assert error(logits, one) < ROUNDING
    for _ in range(20):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        one = model(token, **hand_cache(evicting), **options).logits
        assert error(model(token, **hand_cache(turns), **options).logits, one) < ROUNDING
        token = one.argmax(-1)
    assert all("queries" not in state.observed.carry for state in turns.engine.states)


@torch.no_grad()
def test_what_one_turn_leaves_out_another_may_choose() -> None:
    model = build("llama")
    ids, _ = prompts((70,))
    cache = kvtailor.cache_for(model, TURNS)
    model(ids, **hand_cache(cache))
    first = [state.observed.carry["chosen"] for state in cache.engine.states]
    model(prompts((9,), state=5)[0], **hand_cache(cache))
    for state, before in zip(cache.engine.states, first, strict=True):
        after = state.observed.carry["chosen"]
        again = {int(column) for column in after.flatten() if 0 <= column < 66} - set(before.flatten().tolist())
        assert again and state.counts().tolist() == [[79, 79]]


@torch.no_grad()
def test_a_rejected_draft_is_no_part_of_the_turn() -> None:
    """Recorded tokens are decoded ones, which choose nothing, and a draft of which nothing stays changes nothing."""
    model = build("llama")
    ids, _ = prompts((60,))
    drafted, plain = kvtailor.cache_for(model, TURNS), kvtailor.cache_for(model, TURNS)
    for cache in (drafted, plain):
        cache.activate_past_recording()
        model(ids, **hand_cache(cache))
        cache.crop(0)
    good, wrong = prompts((3,), state=2)[0], prompts((4,), state=6)[0]
    model(torch.cat([good, wrong], 1), **hand_cache(drafted))
    waiting = drafted.ledger()
    assert waiting.total == waiting.closed_form
    drafted.crop(-4)
    model(good, **hand_cache(plain))
    plain.crop(0)
    model(wrong, **hand_cache(drafted))
    drafted.crop(-4)
    for one, two in zip(drafted.engine.states, plain.engine.states, strict=True):
        assert (
            one.observed.carry.keys() == two.observed.carry.keys()
            and {"chosen", "capacity"} <= one.observed.carry.keys()
        )
        assert all(
            torch.allclose(tensor, two.observed.carry[name], atol=1e-5) for name, tensor in one.observed.carry.items()
        )


@torch.no_grad()
def test_tokens_taken_back_outside_of_a_recording_take_the_choice_with_them() -> None:
    model = build("llama")
    ids, _ = prompts((60,))
    cache = kvtailor.cache_for(model, TURNS)
    model(ids, **hand_cache(cache))
    assert "chosen" in cache.engine.states[0].observed.carry
    cache.crop(-10)
    assert not cache.engine.states[0].observed.carry
    model(ids[:, 50:51], **hand_cache(cache))
    assert "chosen" not in cache.engine.states[0].observed.carry and cache.engine.states[
        0
    ].observed.tokens_read.tolist() == [[8, 8]]
