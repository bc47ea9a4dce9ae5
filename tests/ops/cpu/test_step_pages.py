"""Tokens that read chosen pages, in one call each, against quest as torch does it."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cpu.test_chosen_tokens import every_variant
from tests.support.attention_cases import request_of
from tests.support.segments_of import Padded, states

from kvtailor.attend.contract import AttentionContext
from kvtailor.attend.quest import Quest
from kvtailor.encode.indexed import Indexed
from kvtailor.ops.attention.cpu.step import TokenStep
from kvtailor.ops.cpu.library import Library
from kvtailor.ops.dispatch import using
from kvtailor.types import Layout, PlainSegment, Segment, Softmax

PAGE = 4
DEEP = AttentionContext(layer=2, layers=4)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@every_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape, spans, tokens, softmax",
    [
        ((3, 5, 2), (63,), 6 * PAGE, Softmax()),
        ((1, 1, 1), (40, 8, 8), 1, Softmax()),
        ((2, 3, 3), (37, 4), 5 * PAGE, Softmax(softcap=5.0, sinks=torch.linspace(-2, 3, 9))),
    ],
    ids=["odd heads", "one head, three segments", "a cap and sinks"],
)
def test_tokens_read_the_pages_that_quest_reads(
    library: Library,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    spans: tuple[int, ...],
    tokens: int,
    softmax: Softmax,
) -> None:
    b, h, g = shape
    parts, exact, column = list[Segment](), list[Segment](), 0
    for i, span in enumerate(spans):
        layout = Layout(rows=b, heads=h, size=span, start=column)
        encoded = [states((b * h, span, size), i + 20 * size, dtype) for size in (32, 64)]
        parts.append(Indexed(page=PAGE, block_size=PAGE).encode(layout, *encoded))
        exact.append(Indexed(page=PAGE, block_size=PAGE).encode(layout, *(each.float() for each in encoded)))
        column += span
    # A tail of three tokens, room for two more, and other buffers after these.
    new = 6
    keys, values = (states((b * h, 3 + new, size), 90 + size, dtype) for size in (32, 64))
    buffers = [torch.full((b * h, 5, each.shape[2]), torch.nan, dtype=dtype) for each in (keys, values)]

    def tail(size: int, of: list[torch.Tensor]) -> PlainSegment:
        layout = Layout(rows=b, heads=h, size=size, start=column)
        return PlainSegment(layout=layout, keys=of[0][:, :size], values=of[1][:, :size])

    for buffer, each in zip(buffers, (keys, values), strict=True):
        buffer[:, :3] = each[:, :3]
    quest = Quest(tokens=tokens, least=2)
    pages = quest.read_on_fast_path(2, [*parts, tail(3, buffers)]).pages
    assert pages is not None and TokenStep.unsuited([*parts, tail(3, buffers)], mass=False, pages=pages) is None
    step = TokenStep(
        [*parts, tail(3, buffers)],
        [None] * (len(parts) + 1),
        buffers[0],
        buffers[1],
        None,
        query_heads=h * g,
        scaling=0.2,
        softcap=softmax.softcap,
        mass=False,
        using=library,
        pages=pages,
    )
    assert step.complete and step.chooses
    for i in range(3, 3 + new):
        if i == step.slots:
            buffers = [torch.cat([each, torch.full_like(each, torch.nan)], 1) for each in buffers]
            step.moves_to(tail(i, buffers), buffers[0], buffers[1], None)
        query, read = states((b, h * g, 1, 32), 200 + i, dtype), torch.full((b, h), -1)
        mine = [each[:, i].reshape(b, h, 1, -1) for each in (keys, values)]
        out, _ = step.take(query, *mine, slot=i, column=column + i, sinks=softmax.sinks, tokens_read=read)
        visible = Padded(new_tokens=1, first_column=column + i)
        # Of the same numbers, in float32.
        whole = [*exact, tail(i + 1, [keys.float(), values.float()])]
        request = request_of(query.float(), whole, visible, 0.2, context=DEEP, softmax=softmax)
        with using("reference"):
            expected = quest.attend(request)
        assert expected.tokens_read is not None and torch.equal(read, expected.tokens_read)
        assert int(read.max()) < column + i + 1
        near = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        # Each output is a sum over all slots, whose terms are as large as the largest output, or larger.
        rounded = 64 * torch.finfo(torch.float32).eps * float(expected.output.abs().max())
        assert torch.allclose(out.transpose(1, 2).float(), expected.output, rtol=near, atol=rounded)
    assert torch.equal(buffers[0][:, : 3 + new], keys) and torch.equal(buffers[1][:, : 3 + new], values)


def test_what_cannot_be_chosen_is_told() -> None:
    layout = Layout(rows=1, heads=2, size=63, start=0)
    part = Indexed(page=PAGE, block_size=PAGE).encode(layout, states((2, 63, 24), 1), states((2, 63, 24), 2))
    tail = PlainSegment(
        layout=Layout(rows=1, heads=2, size=1, start=63), keys=states((2, 1, 24), 3), values=states((2, 1, 24), 4)
    )
    pages = Quest(tokens=PAGE).read_on_fast_path(2, [part, tail]).pages
    assert pages is not None
    why = TokenStep.unsuited([part, tail], mass=False, pages=pages)
    assert why is not None and "a multiple of 32 channels" in why
    assert TokenStep.unsuited([part, tail], mass=False) is None
