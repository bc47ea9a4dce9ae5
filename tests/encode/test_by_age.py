"""Precision by age: each token's numbers are those of its chain of codings, whatever leaves the tail when."""

from __future__ import annotations

import pytest
import torch
from tests.support.segments_of import states
from torch import Tensor

from kvtailor.encode.by_age import AgedSegment, ByAge
from kvtailor.encode.contract import Codec
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.vector import Vector
from kvtailor.engine.apply import encode_tail
from kvtailor.engine.state import LayerState
from kvtailor.errors import PlanError
from kvtailor.plan import Plan, parse
from kvtailor.types import Layout

BITS, BLOCK, AGES = (8, 4, 2), 16, (40, 90)
CODEC = ByAge(of=tuple(Vector(bits=bits, recent=BLOCK, block_size=BLOCK) for bits in BITS), ages=AGES)
PROMPT, DECODED = 163, 141


def rounded(vector: Tensor, bits: int) -> Tensor:
    """The nearest multiples of a step, of which the largest magnitude is the last."""
    most = 2 ** (bits - 1) - 1
    step = vector.abs().max() / most
    return torch.stack([(number / step).round().clamp(-most, most) * step for number in vector])


def chains(vectors: Tensor, turns: list[int]) -> Tensor:
    """What a plain loop makes of vectors (n, d) that came in such turns; the newest stay as they are."""
    now, done, seen = vectors.clone(), 0, 0
    blocks: list[tuple[int, int, int]] = []
    for new in turns:
        seen += new
        leaving = seen - done - BLOCK
        leaving = leaving // BLOCK * BLOCK if new == 1 else leaving
        if leaving <= 0:
            continue
        fresh, end = [], done + leaving
        while end > done:
            begin = max(done, end - BLOCK)
            fresh.append((begin, end, -1))
            end = begin
        done += leaving
        # The last token of a block has seen all that came after it.
        aged = [(begin, end, sum(seen - end >= age for age in AGES), level) for begin, end, level in blocks + fresh]
        for begin, end, level, before in aged:
            if level > before:
                now[begin:end] = torch.stack([rounded(vector, BITS[level]) for vector in now[begin:end]])
        blocks = [(begin, end, max(level, before)) for begin, end, level, before in aged]
    return now


@pytest.mark.parametrize("turns", [[PROMPT], [63, 70, 30], [20, 143]], ids=str)
@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 63, 11)], ids=str)
def test_numbers_are_those_of_each_tokens_chain(turns: list[int], padding: tuple[int, ...]) -> None:
    turns = turns + [1] * DECODED
    keys, values = (states((3, 2, sum(turns), 12), seed) for seed in (1, 2))
    real = None
    if any(padding):
        real = torch.arange(sum(turns))[None] >= torch.tensor(padding)[:, None]
    state, plan = LayerState(0), Plan(encode=CODEC)
    for new in turns:
        begin = state.stored.seen
        state.append(keys[:, :, begin : begin + new], values[:, :, begin : begin + new], exactly=False)
        encode_tail(state, plan, new, None if real is None else real[:, : begin + new])
    found, expected = ({}, {})
    for part in state.parts():
        filled = part.layout.filled(torch.device("cpu"))
        columns, owners = part.layout.columns(torch.device("cpu")), part.layout.owners(torch.device("cpu"))
        for lane in range(part.layout.lanes):
            for slot in range(part.layout.size):
                if filled is None or filled[lane, slot]:
                    column = int(columns.expand(part.layout.lanes, -1)[lane, slot])
                    found[int(owners[lane]), column] = [each[lane, slot] for each in part.decode()]
    for row, head in [(0, 0), (1, 1), (2, 1)]:
        both = [chains(each[row, head], turns) for each in (keys, values)]
        for column in range(padding[row], sum(turns)):
            expected[row * 2 + head, column] = [each[column] for each in both]
    for at, pair in expected.items():
        for mine, due in zip(found.pop(at), pair, strict=True):
            assert torch.allclose(mine, due, rtol=1e-5, atol=1e-6), at
    levels = [each.level for each in state.stored.segments if isinstance(each, AgedSegment)]
    assert levels == sorted(levels, reverse=True) and set(levels) == {0, 1, 2}


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 74, 75, 200])
@pytest.mark.parametrize("youngest", [16, 31, 40, 89, 90, 500])
@pytest.mark.parametrize("whole", [False, True])
def test_runs_have_the_codec_of_their_ages(tokens: int, youngest: int, whole: bool) -> None:
    runs = CODEC.runs(tokens, youngest, whole=whole)
    ages = [age for size, age in runs for age in range(age + size - 1, age - 1, -1)]
    assert ages == list(range(youngest + tokens - 1, youngest - 1, -1))
    level = lambda age: sum(age >= each for each in AGES)  # noqa: E731
    for size, age in runs:
        late = [each for each in range(age, age + size) if level(each) > level(age)]
        assert not late if whole or age >= AGES[1] else len(late) < BLOCK and size <= BLOCK
    assert len(runs) <= 3 or not whole
    assert sum(age >= AGES[1] for _, age in runs) <= 1


def loss(codec: Codec, keys: Tensor, values: Tensor, through: ByAge) -> float:
    """Squared error of a chain of codings, over that of the last codec alone."""
    layout = Layout(rows=1, heads=keys.shape[0], size=keys.shape[1], start=0)
    segment, once = through.encode(layout, keys, values), codec.encode(layout, keys, values)
    assert segment.level == 0
    for seen in (keys.shape[1] + age for age in through.ages):
        renewed = through.renewed(segment, seen)
        assert renewed is not segment and through.renewed(renewed, seen) is renewed
        segment = renewed
    error = [
        sum(float((a.double() - b.double()).square().sum()) for a, b in zip(each.decode(), (keys, values), strict=True))
        for each in (segment, once)
    ]
    return error[0] / error[1]


@pytest.mark.parametrize(
    ("kind", "bits", "dtype", "most"),
    [
        (Kivi, (8, 4, 2), torch.float32, 1e-4),
        (Kivi, (8, 4, 2), torch.bfloat16, 0.005),
        (Kivi, (8, 4), torch.bfloat16, 0.005),
        (Vector, (8, 4, 2), torch.float32, 1e-4),
        (Vector, (8, 4), torch.float32, 0.01),
    ],
    ids=str,
)
def test_what_the_later_codings_lose(kind: type[Codec], bits: tuple[int, ...], dtype: torch.dtype, most: float) -> None:
    """Where the steps of one coding are an odd number of those before, both have the same boundaries."""
    keys, values = states((4, 640, 64), 3, dtype), states((4, 640, 64), 4, dtype)
    codecs = tuple(kind(bits=each) for each in bits)  # type: ignore[call-arg]
    ratio = loss(codecs[-1], keys, values, ByAge(of=codecs, ages=(512, 2048)[: len(bits) - 1]))
    print(f"{kind.__name__} {bits} {dtype}: {ratio - 1:+.5f} squared error beside one coding")
    assert -0.005 < ratio - 1 < most
    if kind is Vector and bits == (8, 4):
        # 127 steps to 7: no boundary is shared but the one in the middle.
        assert ratio - 1 > 1e-3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("by_age(of=[kivi])", "of must be two or three codecs, found 1"),
        ("by_age(of=[kivi, kivi, kivi, kivi], ages=[200, 300, 400])", "encoded anew at most twice"),
        ("by_age(of=[kivi, vector])", "must agree in the recent window and in the block, and Kivi has 128 and 128"),
        ("by_age(ages=[512])", r"ages must be 2 ascending numbers of tokens.*found \[512\]"),
        ("by_age(ages=[512, 512])", "ages must be 2 ascending"),
        ("by_age(ages=[128, 512])", "first age must be above the 128 newest tokens"),
        ("by_age(of=[plain, kivi], ages=[512])", "Plain, which encodes nothing"),
        ("by_age(of=[by_age, kivi], ages=[512])", "is by age itself"),
        ("by_age(of=[minicache(of=kivi), kivi], ages=[512])", "stores two layers' tokens together"),
        ("hadamard(of=by_age)", "by_age encodes segments anew.*write by_age outside"),
        ("sides(keys=by_age, values=kivi)", "must have a codec that codes keys and values on their own"),
    ],
)
def test_refusals(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parse(text)


def test_a_table_of_layers_may_have_it() -> None:
    plan = parse("by_layer(of=[by_age, kivi(bits=4)])")
    assert plan == parse(str(plan)) and "by_age" in str(plan)
