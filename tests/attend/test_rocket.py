"""Which tokens Rocket reads, against its definition walked slowly, and its split of a budget, worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.attention_cases import MIXES, SIZES, Case, case, request_of
from tests.support.crossed import crossed
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.attend.contract import AttentionContext, FlopsRequest, IndexRequest
from kvtailor.attend.rocket import Rocket
from kvtailor.errors import CacheMisuse
from kvtailor.ops.lanes.chunks import chunk_bounds, reduce_channels
from kvtailor.ops.lanes.rows import rows_of
from kvtailor.types import Layout, PlainSegment

CPU = torch.device("cpu")


def tokens_of(made: Case, row: int, head: int) -> list[tuple[int, Tensor, Tensor]]:
    """Column, key and value of each real token that a row and head hold, in time order."""
    h, found = made.sizes[1], []
    for part in made.parts:
        keys, values = part.decode()
        for lane in range(part.layout.lanes):
            if int(part.layout.owners(CPU)[lane]) == row * h + head:
                length = part.layout.size if part.layout.lengths is None else int(part.layout.lengths[lane])
                columns = part.layout.columns(CPU).expand(part.layout.lanes, -1)[lane].tolist()
                found += [(columns[i], keys[lane, i].double(), values[lane, i].double()) for i in range(length)]
    real = made.visible.real
    return [one for one in found if real is None or real[row, one[0]]]


def slow(made: Case, tokens: int, capacity: list[int], covered: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of the spec, one number at a time: output, tokens read. The first `covered` tokens lie in chunks."""
    b, h, g, d, dv = made.sizes
    out, count = torch.zeros((b, h * g, 1, dv), dtype=torch.float64), torch.zeros((b, h), dtype=torch.int64)
    for row in range(b):
        ratio = max(1.0, capacity[row] / tokens)
        size = math.ceil(math.sqrt(ratio))
        size = 1 if size > ratio else size
        kept = max(1, int(d * size / ratio))
        for head in range(h):
            held = tokens_of(made, row, head)
            query = made.query[row, head * g : head * g + g, 0].double()
            order = sorted(range(d), key=lambda i: -float(query[:, i].abs().sum()))[:kept]
            inside = held[:covered] if size > 1 else []
            chunks = [list(range(i, min(i + size, len(inside)))) for i in range(0, len(inside), size)]
            chunks += [[i] for i in range(len(inside), len(held))]
            logits = torch.zeros((g, len(chunks)), dtype=torch.float64)
            for c, chunk in enumerate(chunks):
                for channel in order:
                    values = [float(held[i][1][channel]) for i in chunk]
                    best = max(values) if float(query[:, channel].sum()) >= 0 else min(values)
                    logits[:, c] += query[:, channel] * best
            for member in range(g):
                share = float(query[member, order].abs().sum() / query[member].abs().sum())
                logits[member] *= scaling / math.sqrt(share)
            promised = logits.softmax(-1).mean(0)
            of_token = [(-float(promised[c]), i) for c, chunk in enumerate(chunks) for i in chunk]
            read = sorted(i for _, i in sorted(of_token)[: tokens // 2])
            keys, values = (torch.stack([held[i][n] for i in read]) for n in (1, 2))
            out[row, head * g : head * g + g, 0] = (query @ keys.T * scaling).softmax(-1) @ values
            count[row, head] = len(read)
    return out, count


def capacities(made: Case, expect: int) -> list[int]:
    b, h = made.sizes[:2]
    return [sum(len(tokens_of(made, row, head)) for head in range(h)) // h + expect for row in range(b)]


@pytest.mark.parametrize(
    ("mix", "asked"),
    crossed(
        [mix for mix in MIXES if mix != "prompt"],
        [
            (16, 4, False),
            (24, 200, True),
            (60, 30, False),
            (9, 1, True),
            (16, 4, True),
            (24, 200, False),
            (60, 30, True),
        ],
        each=2,
    ),
    ids=str,
)
def test_reads_what_the_definition_reads(mix: str, asked: tuple[int, int, bool]) -> None:
    tokens, expect, padded = asked
    made = case(SIZES[2], mix, 1, seed=4)
    if padded:
        real = torch.arange(made.seen)[None] >= torch.tensor([0, 25])[:, None]
        made.visible = dataclasses.replace(made.visible, real=real)
    got = Rocket(tokens=tokens, expect=expect).attend(request_of(made.query, made.parts, made.visible, 0.3))
    out, count = slow(made, tokens, capacities(made, expect), made.seen, 0.3)
    assert got.tokens_read is not None and torch.equal(got.tokens_read, count)
    assert torch.allclose(got.output.double(), out, atol=1e-4)


@pytest.mark.parametrize(("tokens", "newer"), [(16, 1), (24, 40), (12, 200)])
def test_tokens_newer_than_the_chunks_stand_for_themselves(tokens: int, newer: int) -> None:
    """An index over a prompt of 100 tokens, then so many more, one at a time; past 128 the chunks are made anew."""
    b, h, g, d = 2, 3, 2, 20
    keys, values = states((b * h, 100 + newer, d), 1), states((b * h, 100 + newer, d), 2)
    rocket = Rocket(tokens=tokens, expect=30)

    def until(count: int) -> Case:
        part = PlainSegment(
            layout=Layout(rows=b, heads=h, size=count, start=0), keys=keys[:, :count], values=values[:, :count]
        )
        made = case((b, h, g, d, d), "prompt", 1, seed=3)
        visible = dataclasses.replace(made.visible, first_column=count - 1)
        return dataclasses.replace(made, parts=[part], seen=count, visible=visible)

    prompt = until(100)
    carry = rocket.index(IndexRequest(parts=prompt.parts, visible=prompt.visible, context=AttentionContext()))
    covered = 100
    for count in range(101, 101 + newer):
        made = until(count)
        got = rocket.attend(
            request_of(made.query, made.parts, made.visible, 0.3, context=AttentionContext(carry=carry))
        )
        carry = got.carry
        covered = count if count - covered > 128 else covered
        assert int((carry["columns"] >= 0).sum()) == covered * b * h and carry["capacity"].tolist() == [130, 130]
        if count in (101, 100 + newer):
            out, read = slow(made, tokens, [130, 130], covered, 0.3)
            assert torch.equal(got.tokens_read, read) and torch.allclose(got.output.double(), out, atol=1e-4)


def test_a_hand_worked_choice() -> None:
    """Two query heads, 4 channels, 6 tokens in chunks of 2 by 2 channels.

    tokens=4 and a capacity of 16 give c2 = 4: chunks of ceil(sqrt 4) = 2 tokens and int(4 * 2 / 4) = 2 channels. The
    absolute values sum to 3, 0.5, 5, 0.25: channels 2 and 0. The queries sum to -5 in channel 2, so its least key
    counts, and to 1 in channel 0, so its greatest does:
        chunk 0: channel 0 max(1, 0) = 1, channel 2 min(0, 1) = 0; head 0: 2 * 1 - 2 * 0 = 2, head 1: -1 - 0 = -1
        chunk 1: channel 0 max(0, 0) = 0, channel 2 min(-1, 2) = -1; head 0: 0 + 2 = 2, head 1: 0 + 3 = 3
        chunk 2: channel 0 max(-1, 4) = 4, channel 2 min(3, 3) = 3; head 0: 8 - 6 = 2, head 1: -4 - 9 = -13
    Head 0 finds all alike, head 1 prefers chunk 1: its tokens, 2 and 3, are the tokens // 2 that are read.
    """
    query = torch.tensor([[2.0, 0.25, -2.0, 0.25], [-1.0, 0.25, -3.0, 0.0]])
    keys = torch.zeros(1, 6, 4)
    keys[0, :, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0, 4.0])
    keys[0, :, 2] = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, 3.0])
    values = torch.arange(6.0)[None, :, None].expand(1, 6, 1).contiguous()
    part = PlainSegment(layout=Layout(rows=1, heads=1, size=6, start=0), keys=keys, values=values)
    visible = dataclasses.replace(case((1, 1, 1, 4, 1), "prompt", 1).visible, first_column=5)
    got = Rocket(tokens=4, expect=10).attend(request_of(query[None, :, None], [part], visible, 0.5))
    assert got.carry["capacity"].tolist() == [16] and got.tokens_read is not None and got.tokens_read.tolist() == [[2]]
    weights = (query @ keys[0, 2:4].T * 0.5).softmax(-1)
    assert torch.allclose(got.output[0, :, 0, 0], weights @ torch.tensor([2.0, 3.0]))
    # The factor of head 0: the root of (4.5 / 4), since 4 of its 4.5 are left; head 1 keeps 4 of 4.25.
    reduced = reduce_channels(query[None], torch.tensor([2]), 0.5)
    assert reduced.channels.tolist() == [[2, 0]] and reduced.low.tolist() == [[True, False]]
    expected = torch.tensor([[-2.0, 2.0], [-3.0, -1.0]]) * 0.5 * torch.tensor([[4.5 / 4], [4.25 / 4]]).sqrt()
    assert torch.allclose(reduced.query[0], expected)


@pytest.mark.parametrize(
    ("seen", "keeps"),
    [
        (100, 100),  # S = 356 is within the budget
        (7936, 3461),  # S = 8192 = 8 t: r = 0.38, 8 ** 0.38 = 2.2038, int(3717.2) - 256
        (130816, 6216),  # S = 131072 = 128 t: r = 0.62, 128 ** 0.62 = 2 ** 4.34 = 20.252, int(6472.0) - 256
        (2096896, 4449),  # S = 2048 t: 0.86 is cut to 0.8, 2048 ** 0.8 = 2 ** 8.8 = 445.72, int(4705.1) - 256
    ],
)
def test_the_split_of_the_budget(seen: int, keeps: int) -> None:
    found = Rocket().held_tokens(torch.tensor([seen]))
    assert found is not None and found.tolist() == [keeps]
    assert Rocket(turns=True).held_tokens(torch.tensor([seen])) is None


def test_at_least_the_expected_tokens_are_kept_of_a_prompt() -> None:
    """int(S / c ** r) is below 2 * expect, as the answer alone would fill it: min(2 * expect, S) - expect stay."""
    rocket = Rocket(tokens=8, expect=100)
    assert rocket.held_tokens(torch.tensor([30, 100, 5000])).tolist() == [30, 100, 100]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("capacity", "chunk", "channels"),
    [(512, 1, 64), (1024, 1, 64), (1536, 1, 42), (2048, 2, 64), (4096, 2, 32), (9217, 4, 28), (102400, 10, 6)],
)
def test_sizes_of_chunks_and_channels(capacity: int, chunk: int, channels: int) -> None:
    """ceil(sqrt(c2)), 1 where it exceeds c2 = capacity / 1024; int(64 * chunk / c2)."""
    found = Rocket()._sizes(torch.tensor([capacity]), 64)
    assert [each.tolist() for each in found] == [[chunk], [channels]]


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize("mix", ["dense", "ragged", "all"])
def test_bounds_are_tight(size: int, mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are made in several blocks, and where only some rows have any."""
    monkeypatch.setattr("kvtailor.ops.lanes.chunks._BLOCK", 37)
    made = case(SIZES[2], mix, 1, seed=5)
    b, h, _, d, _ = made.sizes
    rows = rows_of(made.parts, None, CPU)
    sizes = torch.tensor([size] * h + [0] * h)
    bounds = chunk_bounds([part.decode()[0] for part in made.parts], rows, sizes)
    assert not bounds[h:].any()
    for head in range(h):
        keys = torch.stack([one[1] for one in tokens_of(made, 0, head)]).float()
        assert int(rows.counts[head]) == keys.shape[0]
        for chunk, run in enumerate(keys.split(size)):
            assert torch.equal(bounds[head, :d, chunk], run.amax(0))
            assert torch.equal(bounds[head, d:, chunk], run.amin(0))
        assert not bounds[head, :, -(-keys.shape[0] // size) :].any()


def test_what_is_not_read_may_hold_anything() -> None:
    """Keys and values of tokens that have bounds and are not chosen; the bounds are from before."""
    made = case((1, 1, 2, 16, 16), "dense", 1, seed=6)
    rocket = Rocket(tokens=20, expect=20)
    carry = rocket.index(IndexRequest(parts=made.parts[:1], visible=made.visible, context=AttentionContext()))
    before = rocket.attend(request_of(made.query, made.parts, made.visible, 0.3, context=AttentionContext(carry=carry)))
    changed = 0
    for token in range(67):
        part = made.parts[0]
        poisoned = []
        for x in part.decode():
            poisoned.append(x.clone())
            poisoned[-1][0, token] = float("nan")
        parts = [PlainSegment(layout=part.layout, keys=poisoned[0], values=poisoned[1]), *made.parts[1:]]
        after = rocket.attend(request_of(made.query, parts, made.visible, 0.3, context=AttentionContext(carry=carry)))
        changed += not torch.equal(before.output, after.output)
    assert before.tokens_read is not None and 0 < changed <= int(before.tokens_read[0, 0]) == 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mix", ["dense", "all"])
def test_sixteen_bits_choose_as_the_same_numbers_in_thirty_two(dtype: torch.dtype, mix: str) -> None:
    short = case(SIZES[2], mix, 1, seed=8, dtype=dtype)
    parts = []
    for part in short.parts:
        keys, values = (x.float() for x in part.decode())
        parts.append(PlainSegment(layout=part.layout, keys=keys, values=values))
    rocket = Rocket(tokens=20, expect=90)
    found = rocket.attend(request_of(short.query, short.parts, short.visible, 0.1))
    wide = rocket.attend(request_of(short.query.float(), parts, short.visible, 0.1))
    assert found.output.dtype == dtype and torch.equal(found.tokens_read, wide.tokens_read)
    assert torch.allclose(found.output.float(), wide.output, atol=5e-2)
    assert torch.equal(found.carry["bounds"].float(), wide.carry["bounds"])


def test_where_nothing_is_seen_there_are_zeros() -> None:
    """All held tokens are padding; and all are hidden by a mask."""
    made = case(SIZES[2], "tail", 1, seed=9)
    for visible in (
        dataclasses.replace(made.visible, real=torch.zeros((2, made.seen), dtype=torch.bool)),
        dataclasses.replace(made.visible, window=0),
    ):
        got = Rocket(tokens=16).attend(request_of(made.query, made.parts, visible, 0.1))
        assert bool((got.output == 0).all())


def test_a_carry_of_other_tokens_is_made_anew() -> None:
    """What was evicted or taken back since leaves bounds that are of nothing that is held."""
    made, other = case(SIZES[2], "moved tail", 1, seed=7), case(SIZES[2], "tail", 1, seed=7)
    rocket = Rocket(tokens=16, expect=90)
    stale = rocket.index(IndexRequest(parts=other.parts, visible=other.visible, context=AttentionContext()))
    stale = {**stale, "capacity": torch.tensor([121, 121])}
    fresh = rocket.attend(request_of(made.query, made.parts, made.visible, 0.3))
    found = rocket.attend(request_of(made.query, made.parts, made.visible, 0.3, context=AttentionContext(carry=stale)))
    assert torch.equal(found.output, fresh.output)
    assert all(torch.equal(found.carry[name], tensor) for name, tensor in fresh.carry.items())


def test_bad_numbers_and_mass_are_refused() -> None:
    for given, match in (
        ({"tokens": 1}, "^rocket: tokens must be 2"),
        ({"expect": 0}, "^rocket: expect must be at least 1"),
        ({"window": 0}, "^rocket: window must be at least 1"),
        ({"kernel": 4}, "^rocket: kernel must be odd"),
    ):
        with pytest.raises(ValueError, match=match):
            Rocket(**given)  # type: ignore[arg-type]
    made = case(SIZES[2], "tail", 1)
    with pytest.raises(CacheMisuse, match="attend=segments"):
        Rocket().attend(request_of(made.query, made.parts, made.visible, 0.3, want_mass=True))


def test_what_a_step_costs_where_no_chunk_has_bounds() -> None:
    """Capacity within the budget: each token stands for itself, in all channels."""
    rocket = Rocket(tokens=16, expect=4)
    context = AttentionContext(carry={"capacity": torch.tensor([12])})
    held = torch.tensor([[12, 10]])
    assert rocket.flops(FlopsRequest(encoded=[], group=2, size=8, held=held, context=context)) == (12 + 10) * (
        2 * 2 * 8 + 5 * 2
    )
