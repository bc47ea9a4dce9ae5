"""Plans that hold a text's first tokens and the newest: dropping the middle where it lies is the eviction by scores."""

import contextlib
import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.support import decoded_by_age as by_age
from tests.support.seam.zoo import VOCABULARY, build

from kvtailor.engine.apply import count_first_tokens
from kvtailor.engine.fast_path import FastPathOfEnds, slow_path
from kvtailor.hf.model.cache_dtype import set_cache_dtype
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.cpu.library import library
from kvtailor.plan import Plan
from kvtailor.store.recent_window import Tail

PLANS = (
    "streamingllm @ tokens=24",
    "streaming @ tokens=24, slack=3",
    "position(sinks=0) + rolling @ tokens=24, slack=0",
    "streamingllm @ keep=0.3",
    "streamingllm @ tokens=90",
    "streamingllm @ tokens=3",
)


decoded = partial(by_age.decoded, rows=3, prompt=63, steps=24)


@pytest.mark.parametrize("plan", PLANS)
def test_what_stays_is_what_scores_would_leave(plan):
    """Token for token, and bit for bit in what is answered."""
    assert count_first_tokens(Plan.parse(plan)) is not None
    found, expected = decoded(plan), decoded(plan, by_scores=True)
    by_age.assert_same(found, expected)
    # Slots in front that hold nothing are counted, and are as many as those of any tail that grows.
    for state in found[2].engine.states:
        tail = state.stored.tail
        assert sum(each.untyped_storage().nbytes() for each in tail.tensors().values()) == tail.closed_form_bytes()
        assert tail.slots <= tail.length + 3 + 17


@pytest.mark.skipif(library() is None, reason="there are no C++ kernels, and so no fast path")
@pytest.mark.parametrize(
    "plan, family, dtype, held",
    [
        (PLANS[0], "llama", torch.bfloat16, None),
        (PLANS[0], "gpt_neox", torch.float16, None),
        (PLANS[0], "gpt_oss", torch.float32, None),
        (PLANS[2], "gpt_neox", torch.float32, None),
        ("streaming @ tokens=24, slack=0", "llama", torch.float32, None),
        # Keys that are turned were read as the model's type, and every second one was none of them.
        (PLANS[0], "llama", torch.float32, torch.bfloat16),
        (PLANS[0], "gpt_neox", torch.float32, torch.float16),
    ],
)
def test_the_short_way_gives_the_same_bits(plan, dtype, family, held, monkeypatch):
    model = build(family, dtype=dtype)
    if held is not None:
        set_cache_dtype(model, held)
    taken = []
    take = FastPathOfEnds.take
    monkeypatch.setattr(FastPathOfEnds, "take", lambda self, *args: taken.append(1) or take(self, *args))
    with slow_path():
        expected = decoded(plan, model=model)
    assert not taken
    found = decoded(plan, model=model)
    by_age.assert_same(found, expected)
    assert found[2].ledger() == expected[2].ledger()
    layers = len(found[2].engine.states)
    # All but the first, also those at which the tail grows.
    assert len(taken) == 23 * layers


def test_more_than_ages_is_left_to_scores():
    others = (
        "streaming @ tokens=24",
        # Nothing of it waits to be encoded, and what grows old is encoded anew.
        "streaming + vector(bits=8) @ tokens=64",
        "streaming + by_age(of=[vector(bits=8), vector(bits=4)], ages=[70]) @ tokens=99, slack=0",
        "snapkv @ tokens=64, slack=0",
    )
    for plan in others:
        assert count_first_tokens(Plan.parse(plan)) is None


def test_padding_is_left_to_scores():
    """The first tokens of a row that begins later are not those of the others."""
    ids = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :9] = 0
    (ours, cache), (scored, by_scores) = (
        by_age.logits_behind_padding(PLANS[0], ids, mask, ids[:, :9], by_scores=each) for each in (False, True)
    )
    assert torch.equal(ours, scored) and torch.equal(cache.held(), by_scores.held())


@torch.no_grad()
def test_the_short_way_leaves_what_others_hold():
    """A draft's tokens are taken back by going to what the tail was."""
    model = build("llama")
    cache = decoded(PLANS[0], steps=5, model=model)[2]
    tails = [state.stored.tail for state in cache.engine.states]
    copies = [(tail.copied(), tail.tensors()["keys"].clone()) for tail in tails]
    model(torch.full((3, 1), 7), **hand_cache(cache))
    for tail, (copied, keys) in zip(tails, copies, strict=True):
        length = copied.length
        assert torch.equal(copied.tensors()["keys"][:, :length], keys[:, :length]) and not tail.shared


@torch.no_grad()
def test_layers_of_other_rotations_are_turned_by_their_own():
    """What one layer has worked out for a token serves the others where they turn alike, and only there."""
    model, logits = build("llama"), []
    for generally in (True, False):
        with slow_path() if generally else contextlib.nullcontext():
            cache = decoded(PLANS[0], steps=0, model=model)[2]
            last = cache.engine.states[-1].model
            last.rotation = replace(last.rotation, frequencies=last.rotation.frequencies / 2)
            logits.append([model(torch.full((3, 1), 5 + i), **hand_cache(cache)).logits for i in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def tail_of(tokens):
    tail = Tail(1, 2)
    states = torch.arange(tokens, dtype=torch.float32)[None, None, :, None].expand(1, 2, tokens, 3).clone()
    tail.append(states, -states, 0)
    return tail


def held(tail):
    segment = tail.as_segment()
    columns = segment.layout.columns("cpu").expand(2, -1)
    assert torch.equal(segment.keys, columns[..., None].float().expand_as(segment.keys))
    assert torch.equal(segment.values, -segment.keys)
    return columns[0].tolist()


def test_a_tail_that_others_hold_is_copied_before_its_middle_goes():
    """A draft's tokens are taken back by going to what the tail was."""
    tail = tail_of(9)
    before = tail.copied()
    tail.drop_behind(2, 3)
    assert held(tail) == [0, 1, 5, 6, 7, 8] and held(before) == list(range(9))
    kept = copy.deepcopy(tail)
    tail.drop_behind(2, 1)
    assert held(tail) == [0, 1, 6, 7, 8] and held(kept) == [0, 1, 5, 6, 7, 8]
    before.drop_behind(0, 1)
    assert held(before) == list(range(1, 9)) and held(tail) == [0, 1, 6, 7, 8]


def test_a_tail_whose_middle_goes_grows_and_shrinks_as_any():
    tail = tail_of(30)
    for column in range(30, 80):
        state = torch.full((1, 2, 1, 3), float(column))
        tail.append(state, -state, column)
        tail.drop_behind(4, 1)
        assert held(tail) == [0, 1, 2, 3, *range(column - 25, column + 1)]
        assert (tail.anchor, tail.run) == (4, 26) and tail.slots <= 30 + 17
    tail.crop(2)
    assert held(tail)[-1] == 77 and tail.run == 24
    loaded = Tail.from_state(1, 2, *tail.state())
    loaded.look(78)
    assert (loaded.anchor, loaded.run) == (4, 24)
    tail.drop_oldest(3)
    assert held(tail)[0] == 3 and tail.anchor == 0
