"""Plans that evict at each decoded token, beside a codec: blocks are encoded, and codes of several segments joined."""

import pytest
import torch
from tests.support.seam.zoo import VOCABULARY, build

import kvtailor
from kvtailor.encode.gaussian import Gaussian
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.nuq import Nuq
from kvtailor.encode.unrotated import UnrotatedSegment
from kvtailor.encode.vector import Vector
from kvtailor.engine.budget import waiting_tokens
from kvtailor.hf.versions import hand_cache
from kvtailor.ledger import storage_bytes
from kvtailor.ops.lanes.ragged import cut_of_part, slots_of_part
from kvtailor.ops.segments.around import Weighted
from kvtailor.plan import Plan
from kvtailor.types import Layout, PlainSegment, Rotation

CODEC = "kivi(bits=4, group=16, recent=32)"


@torch.no_grad()
def decoded(plan, steps, rows=3, prompt=63, model=None):
    model = model or build("llama")
    cache = kvtailor.cache_for(model, plan)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps + 1):
        ids = torch.randint(3, VOCABULARY, (rows, 1 if step else prompt), generator=generator)
        logits = model(ids, **hand_cache(cache)).logits[:, -1]
        yield cache, logits


@pytest.mark.parametrize("score", ["h2o(recent=6)", "streaming", "snapkv(window=6) + adakv", "position + rolling"])
def test_an_eviction_at_each_token_leaves_few_segments(score):
    plan = f"{score} + {CODEC} @ tokens=40, slack=0"
    for cache, logits in decoded(plan, 70):
        assert torch.isfinite(logits).all() and cache.held().sum(-1).max() <= 40 * 2
        assert cache.ledger().total == cache.ledger().closed_form
        for state in cache.engine.states:
            segments = state.stored.segments
            # One of the prompt, at most two of its first tokens, blocks of 32 of which each has lost some, and one that
            # waits, which is the newest.
            assert len(segments) <= 5
            plain = [isinstance(each, PlainSegment) for each in segments]
            assert sum(plain) <= 1 and not any(plain[:-1])
            waiting = [int(each.layout.counts().max()) for each in segments if isinstance(each, PlainSegment)]
            assert max(waiting, default=0) < waiting_tokens(Plan.parse(plan), state.codec(Plan.parse(plan))) == 32


@pytest.mark.parametrize("slack", [0, 1, 5])
def test_between_two_evictions_a_layer_grows_by_the_slack_and_no_less(slack):
    lengths = [int(cache.held().max()) for cache, _ in decoded(f"streaming @ tokens=40, slack={slack}", 13)]
    assert lengths == [40 + step % (slack + 1) for step in range(14)]


@pytest.mark.parametrize(
    "line", ["streaming + kivi4 @ tokens=64", "h2o + kivi4 @ tokens=64", f"h2o + {CODEC} @ tokens=64"]
)
def test_what_evicts_rarely_waits_for_nothing(line):
    plan = Plan.parse(line)
    assert waiting_tokens(plan, plan.encode) == 0


def test_a_budget_in_bytes_pays_for_what_waits():
    """Keys and values take what the plan allows, at each token."""
    limit = 60_000
    for cache, _ in decoded(f"h2o(recent=6) + {CODEC} @ bytes={limit}, slack=0", 70, rows=1, prompt=200):
        stages = cache.ledger().by_stage
        assert stages["encode"] + stages["tail"] <= limit * 1.01


@pytest.mark.parametrize("tokens", [63, 32])
def test_a_turn_encodes_what_waited(tokens):
    model = build("llama")
    *_, (cache, _) = decoded(f"h2o(recent=6) + {CODEC} @ tokens=40, slack=0", 20, model=model)
    assert any(isinstance(each, PlainSegment) for state in cache.engine.states for each in state.stored.segments)
    with torch.no_grad():
        model(torch.full((3, tokens), 9), **hand_cache(cache))
    assert not any(isinstance(each, PlainSegment) for state in cache.engine.states for each in state.stored.segments)


def _layout(rows, heads, size, start):
    return Layout(rows=rows, heads=heads, size=size, start=start)


@pytest.mark.parametrize(
    "codec",
    [
        Kivi(bits=4, group=16, recent=32),
        Vector(bits=4),
        Gaussian(bits=3),
        Hadamard(of=Kivi(bits=2, group=16, recent=32)),
    ],
    ids=lambda codec: type(codec).__name__,
)
@pytest.mark.parametrize("around", ["plain", "weighted", "moved", "unrotated"])
def test_tokens_of_several_segments_are_joined_without_another_encoding(codec, around):
    """Each token decodes to what it did in its own segment, bit for bit."""
    torch.manual_seed(1)
    rows, heads, sizes = 3, 3, (63, 17, 32)
    parts = []
    for i, size in enumerate(sizes):
        keys, values = (torch.randn(rows * heads, size, 64) + 3 for _ in range(2))
        segment = codec.encode(_layout(rows, heads, size, 70 * i), keys, values)
        if around == "weighted":
            segment = Weighted(layout=segment.layout, inner=segment, log_weight=torch.randn(rows * heads, size))
        elif around == "unrotated":
            rotation = ROTATION
            first = torch.arange(rows).repeat_interleave(heads)
            segment = UnrotatedSegment(layout=segment.layout, inner=segment, rotation=rotation, first=first)
        elif around == "moved" and i == 1:
            lane = torch.arange(rows * heads)[:, None].expand(-1, size)
            segment = segment.regather(lane, torch.arange(size).flip(0).expand_as(lane), segment.layout)
        parts.append(segment)
    at = torch.stack([torch.randperm(sum(sizes))[:29] for _ in range(rows * heads)]).sort(-1).values
    ends = torch.tensor(sizes).cumsum(0)
    part = torch.searchsorted(ends, at, right=True)
    slot = at - (ends - torch.tensor(sizes))[part]
    lane = torch.arange(rows * heads)[:, None] + part * rows * heads
    columns = (70 * part + slot).to(torch.int32)
    layout = Layout(rows=rows, heads=heads, size=29, positions=columns)
    joined = parts[0].regather_with(parts[1:], lane, slot, layout)
    each = [torch.cat([part.decode()[side] for part in parts], 1) for side in (0, 1)]
    index = torch.arange(rows * heads)[:, None]
    assert joined is not None and joined.layout is layout
    assert all(torch.equal(found, states[index, at]) for found, states in zip(joined.decode(), each, strict=True))
    assert storage_bytes(joined.tensors().values()) == joined.closed_form_bytes()
    if around == "weighted":
        assert torch.equal(joined.log_weight, torch.cat([part.log_weight for part in parts], 1)[index, at])


ROTATION = Rotation(frequencies=torch.logspace(0, -3, 32))


def test_segments_of_other_encodings_are_left_apart():
    keys, values = torch.randn(2, 32, 64), torch.randn(2, 32, 64)
    of = lambda codec: codec.encode(_layout(1, 2, 32, 0), keys, values)  # noqa: E731
    lane, slot = torch.arange(2)[:, None].expand(-1, 4), torch.arange(4).expand(2, -1)
    kivi = of(Kivi(bits=4, group=16, recent=32))
    others = (
        of(Kivi(bits=2, group=16, recent=32)),
        of(Vector(bits=4)),
        of(Hadamard(of=Kivi(bits=4, group=16, recent=32))),
        PlainSegment(layout=_layout(1, 2, 32, 0), keys=keys, values=values),
    )
    for other in others:
        assert kivi.regather_with([other], lane, slot, _layout(1, 2, 4, 0)) is None
    # What is kept aside of a token is of no fixed size.
    nuq = of(Nuq(bits=4, group=16, block_size=32))
    assert nuq.regather_with([nuq], lane, slot, _layout(1, 2, 4, 0)) is None


def test_a_part_of_which_all_stays_is_cut_where_it_lies():
    """Also of ragged lanes, whose filler repeats the last token."""
    owner, lengths = torch.tensor([0, 0, 1, 2]), torch.tensor([4, 2, 3, 4], dtype=torch.int32)
    positions = torch.arange(16, dtype=torch.int32).view(4, 4)
    layout = Layout(rows=1, heads=3, size=4, positions=positions, owner=owner, lengths=lengths)
    slots = slots_of_part(layout, torch.tensor([5, 0, 7]))
    cut = cut_of_part(layout, slots)
    assert cut.index.tolist() == [[5, 6, 7, 8], [9, 10, 10, 10], [0, 1, 2, 2], [7, 8, 9, 10]]
    assert cut.counts.tolist() == [6, 3, 4] and cut.owners.tolist() == owner.tolist()
