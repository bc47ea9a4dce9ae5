"""Plans that hold a text's first tokens and the newest, as codes: the oldest goes as an eviction by scores has it."""

import copy
from functools import partial

import pytest
import torch
from tests.support import decoded_by_age as by_age
from tests.support.seam.zoo import VOCABULARY, build, prompts

import kvtailor
from kvtailor.engine.apply import count_first_tokens, count_waiting_in_tail
from kvtailor.engine.evict import score_layer
from kvtailor.engine.fast_path import FastPathOfCodes, slow_path
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.cpu.library import library
from kvtailor.plan import Plan
from kvtailor.types import PlainSegment

KIVI = "kivi(bits=4, group=16, recent=32)"
PLANS = (
    f"streaming + {KIVI} @ tokens=70, slack=0",
    f"streamingllm + {KIVI} @ tokens=70, slack=0",
    "position(sinks=0) + rolling + vector(bits=8) @ tokens=40, slack=0",
    "streamingllm + hadamard(of=vector(bits=4)) @ tokens=120, slack=0",
    "streaming + unrotated(of=kivi(bits=4, group=8, recent=8)) @ tokens=40, slack=0",
    f"streaming + {KIVI} @ tokens=40, slack=5",
    f"streamingllm + {KIVI} @ keep=0.3, slack=0",
    f"streaming + {KIVI} @ tokens=3, slack=0",
    # The prompt fits its budget.
    f"streamingllm + {KIVI} @ tokens=170, slack=0",
)
STEPS = 75
CPU = torch.device("cpu")


decoded = partial(by_age.decoded, rows=2, prompt=150, steps=STEPS)


@pytest.fixture
def taken(monkeypatch):
    found, take = [], FastPathOfCodes.take
    monkeypatch.setattr(FastPathOfCodes, "take", lambda self, *args: found.append(1) or take(self, *args))
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_what_stays_is_what_scores_would_leave(plan, monkeypatch):
    """Token for token, and bit for bit in what is answered."""
    assert count_first_tokens(Plan.parse(plan)) is not None
    expected, scored = decoded(plan, by_scores=True), []
    score = lambda state, *args, **more: scored.append(state.clock.decoding) or score_layer(state, *args, **more)  # noqa: E731
    monkeypatch.setattr("kvtailor.engine.evict.score_layer", score)
    found = decoded(plan)
    by_age.assert_same(found, expected)
    layers = len(found[2].engine.states)
    # Of decoded tokens the first that drops any, which parts the text's first tokens from the rest.
    assert sum(scored) <= layers or "tokens=3," in plan
    for state in found[2].engine.states:
        stored = state.stored
        assert not any(isinstance(each, PlainSegment) for each in stored.segments)
        assert stored.tail.length < max(count_waiting_in_tail(Plan.parse(plan), state.codec(Plan.parse(plan))), 33)
    assert found[2].ledger().total == found[2].ledger().closed_form


@pytest.mark.skipif(library() is None, reason="there are no C++ kernels, and so no fast path")
@pytest.mark.parametrize(
    "plan, family, dtype",
    [
        (PLANS[0], "llama", torch.float32),
        (PLANS[1], "llama", torch.float32),
        (PLANS[1], "gpt_neox", torch.bfloat16),
        (PLANS[1], "gpt_oss", torch.float16),
        (PLANS[2], "llama", torch.float32),
        (PLANS[3], "llama", torch.bfloat16),
        (PLANS[4], "llama", torch.float32),
    ],
)
def test_the_short_way_gives_the_same_bits(plan, family, dtype, taken):
    with slow_path():
        expected = decoded(plan, family=family, dtype=dtype)
    assert not taken
    found = decoded(plan, family=family, dtype=dtype)
    by_age.assert_same(found, expected)
    assert found[2].ledger() == expected[2].ledger()
    for mine, theirs in zip(found[2].engine.states, expected[2].engine.states, strict=True):
        assert mine.clock == theirs.clock and mine.observed.carry.keys() == theirs.observed.carry.keys()
    layers = len(found[2].engine.states)
    # All but the first, those at which a block is encoded or a segment loses its last token, and those behind them.
    assert len(taken) >= (36 if "recent=8" in plan else STEPS - 12) * layers


@torch.no_grad()
def test_little_moves_at_each_token_of_a_long_layer(taken):
    """Of a long prompt one block at a time is a segment that loses tokens."""
    cache = decoded(f"streaming + {KIVI} @ tokens=300, slack=0", prompt=310, rows=1, steps=40)[2]
    for state in cache.engine.states:
        sizes = [each.layout.size for each in state.stored.segments]
        assert sizes[0] == 4 and sizes[1] <= 64 and sum(sizes) + state.stored.tail.length == 300
    assert taken


def test_padding_is_left_to_scores():
    """The first tokens of a row that begins later are not those of the others."""
    plan, (ids, mask) = f"streamingllm + {KIVI} @ tokens=40, slack=0", prompts((61, 50, 44))
    new = torch.randint(3, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(5))
    (ours, cache), (scored, by_scores) = (
        by_age.logits_behind_padding(plan, ids, mask, new, by_scores=each) for each in (False, True)
    )
    assert torch.equal(ours, scored) and torch.equal(cache.held(), by_scores.held())


@torch.no_grad()
@pytest.mark.parametrize("plan", PLANS[:2])
def test_copies_saved_caches_and_turns_go_on_alike(plan, tmp_path, taken):
    model = build("llama")
    with slow_path():
        reference = decoded(plan, steps=20, model=model)[2]
    cache = decoded(plan, steps=20, model=model)[2]
    cache.save(tmp_path / "cache")
    caches = [reference, cache, copy.deepcopy(cache), kvtailor.load_cache(model, tmp_path / "cache")]
    before, logits = len(taken), []
    for i, each in enumerate(caches):
        found = []
        for ids in (torch.full((2, 1), 9), torch.full((2, 1), 7), torch.full((2, 11), 8), *[torch.full((2, 1), 5)] * 9):
            if i:
                found.append(model(ids, **hand_cache(each)).logits[:, -1])
                continue
            with slow_path():
                found.append(model(ids, **hand_cache(each)).logits[:, -1])
        logits.append(torch.stack(found))
    assert all(torch.equal(each, logits[0]) for each in logits[1:]) and len(taken) > before


@torch.no_grad()
def test_what_is_taken_back_is_as_it_was(taken):
    """A recorded forward ends the fast path, and its rejected tokens leave no trace."""
    model, plan = build("llama"), PLANS[1]
    cache, reference = (decoded(plan, steps=10, model=model)[2] for _ in range(2))
    cache.activate_past_recording()
    model(torch.full((2, 4), 6), **hand_cache(cache))
    cache.crop(-3)
    model(torch.full((2, 1), 6), **hand_cache(reference))
    logits = [
        [model(torch.full((2, 1), 5 + i), **hand_cache(each)).logits for i in range(8)] for each in (cache, reference)
    ]
    assert cache.seen == reference.seen and torch.equal(cache.held(), reference.held())
    assert all(float((a - b).abs().max()) < 1e-4 for a, b in zip(*logits, strict=True))


@torch.no_grad()
def test_joined_codes_stand_for_the_tokens_that_stay() -> None:
    """In the first layer a token's key depends on the token alone."""
    model = build("llama")
    ids, _ = prompts((120, 120))
    cache, full = (
        kvtailor.cache_for(model, plan)
        for plan in ("tova + kivi(bits=8, group=4, recent=4) @ tokens=40, slack=8", "full")
    )
    for piece in [ids[:, :60], *ids[:, 60:].split(1, 1)]:
        model(piece, **hand_cache(cache))
    model(ids, **hand_cache(full))
    keys = full.engine.states[0].stored.tail.as_segment().keys
    for segment in cache.engine.states[0].stored.segments:
        layout, found = segment.layout, segment.view().keys
        columns = layout.columns(CPU).expand(layout.lanes, -1)
        wanted = torch.stack([keys[owner][at] for owner, at in zip(layout.owners(CPU), columns, strict=True)])
        real = layout.filled(CPU)
        apart = (found - wanted).abs() if real is None else (found - wanted)[real].abs()
        assert float(apart.max()) < 0.05 * float(wanted.abs().max())
