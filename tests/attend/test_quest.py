"""Which pages Quest reads, against a slow ranking, and that it reads nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.gpu.exact_attention import DEVICE, needs_triton
from tests.support.attention_cases import request_of
from tests.support.segments_of import Padded, states, uneven
from torch import Tensor

from kvtailor.attend.contract import AttentionContext, FlopsRequest
from kvtailor.attend.quest import Quest
from kvtailor.encode.indexed import Indexed
from kvtailor.errors import CacheMisuse
from kvtailor.ops.attention.definition import reference
from kvtailor.ops.dispatch import using
from kvtailor.types import Layout, PlainSegment, Segment

PAGE = 4
B, H, G, D = 3, 5, 2, 24
DEEP = AttentionContext(layer=2, layers=4)


def held(spans: tuple[int, ...], tail: int, seed: int, *, ragged: bool = False) -> tuple[list[Segment], Padded, Tensor]:
    """Indexed segments over the spans, a tail, and a query of one new token (the last of the tail)."""
    codec, parts, column = Indexed(page=PAGE, block_size=PAGE), [], 0
    for i, span in enumerate(spans):
        keys, values = states((B * H, span, D), seed + i), states((B * H, span, D), seed + 20 + i)
        layout = Layout(rows=B, heads=H, size=span, start=column)
        if ragged:
            layout, owner, at = uneven(B, H, 2 * PAGE, most=span, columns=span, seed=seed + i)
            keys, values = keys[owner, at], values[owner, at]
        parts.append(codec.encode(layout, keys, values))
        column += span
    keys, values = states((B * H, tail, D), seed + 40), states((B * H, tail, D), seed + 41)
    parts.append(PlainSegment(layout=Layout(rows=B, heads=H, size=tail, start=column), keys=keys, values=values))
    visible = Padded(new_tokens=1, first_column=column + tail - 1)
    return parts, visible, states((B, H * G, 1, D), seed + 42)


def slow(query: Tensor, parts: list[Segment], visible: Padded, pages: int) -> tuple[Tensor, Tensor]:
    """Reads the best pages of each row and head by walking over them: output, tokens read."""
    out, count = torch.zeros_like(query), torch.zeros((B, H), dtype=torch.int64)
    cpu = torch.device("cpu")
    for row in range(B):
        for head in range(H):
            rows = query[row, head * G : head * G + G, 0]
            found, chosen = [], []
            for part in parts:
                keys, values = part.decode()
                for lane in (part.layout.owners(cpu) == row * H + head).nonzero().flatten().tolist():
                    length = part.layout.size if part.layout.lengths is None else int(part.layout.lengths[lane])
                    columns = part.layout.columns(cpu).expand(part.layout.lanes, -1)[lane]
                    seen = visible.at(torch.tensor([row]), columns[None])[0, 0]
                    if part.codec == "plain":
                        chosen.append((keys[lane][seen], values[lane][seen]))
                        continue
                    for first in range(0, length, PAGE):
                        run = slice(first, min(first + PAGE, length))
                        low, high = keys[lane, run].amin(0), keys[lane, run].amax(0)
                        bound = torch.maximum(rows * low, rows * high).sum(-1).max()
                        if seen[run].any():
                            found.append((float(bound), keys[lane, run][seen[run]], values[lane, run][seen[run]]))
            found.sort(key=lambda page: -page[0])
            chosen += [(k, v) for _, k, v in found[:pages]]
            keys, values = (torch.cat([pair[i] for pair in chosen]) for i in (0, 1))
            got = reference(
                query[row : row + 1, head * G : head * G + G], keys[None, None], values[None, None], None, 0.04
            )
            out[row, head * G : head * G + G] = got[0][0]
            count[row, head] = keys.shape[0]
    return out, count


@pytest.mark.parametrize("spans", [(40,), (40, 8, 8), (37,)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4 * PAGE + 1, 6 * PAGE, 1000])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_reads_the_best_pages_and_the_tail(spans: tuple[int, ...], tokens: int, ragged: bool) -> None:
    parts, visible, query = held(spans, 5, seed=1, ragged=ragged)
    got = Quest(tokens=tokens).attend(request_of(query, parts, visible, 0.04, context=DEEP))
    out, count = slow(query, parts, visible, max(3, tokens // PAGE))
    assert torch.allclose(got.output, out, atol=1e-5)
    assert (got.tokens_read is None) == (tokens == 1000)
    assert got.tokens_read is None or torch.equal(got.tokens_read, count)


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_where_nobody_has_more_pages_than_are_read_all_is_read(ragged: bool) -> None:
    parts, visible, query = held((37, 8), 5, seed=9, ragged=ragged)
    lanes = [part.layout.owners(torch.device("cpu")).bincount().max() for part in parts[:-1]]
    most = sum(int(n) * -(-part.layout.size // PAGE) for n, part in zip(lanes, parts, strict=False))
    request = request_of(query, parts, visible, 0.04, context=DEEP)
    for pages in (most - 1, most):
        quest = Quest(tokens=pages * PAGE)
        got, reading = quest.attend(request), quest.read_on_fast_path(DEEP.layer, parts)
        assert (got.tokens_read is None) == (reading.pages is None) == (pages == most)
        assert torch.allclose(got.output, slow(query, parts, visible, pages)[0], atol=1e-5)
        flops = quest.flops(FlopsRequest(encoded=parts[:-1], group=G, size=D, context=DEEP))
        assert (flops == 0) == (pages == most)
    assert quest.read_on_fast_path(1, parts).pages is None and Quest(tokens=1).read_on_fast_path(1, parts).pages is None


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="these parts lie on the CPU, where kernels run in the interpreter alone")
@pytest.mark.parametrize(
    ("spans", "ragged"), [pytest.param((37, 8), False, marks=pytest.mark.long), ((40, 8), True)], ids=["even", "ragged"]
)
def test_pages_are_read_in_place(spans: tuple[int, ...], ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel of GPUs, in its interpreter, and then nothing is copied."""
    parts, visible, query = held(spans, 5, seed=8, ragged=ragged)
    visible = replace(visible, real=torch.arange(visible.first_column + 1)[None] >= torch.tensor([0, 10, 27])[:, None])
    quest = Quest(tokens=5 * PAGE)
    copied = quest.attend(request_of(query, parts, visible, 0.04, context=DEEP))
    monkeypatch.setattr("kvtailor.attend.quest._copied", None)
    with using("triton"):
        found = quest.attend(request_of(query, parts, visible, 0.04, context=DEEP))
    out, count = slow(query, parts, visible, 5)
    assert torch.allclose(found.output, out, atol=1e-5)
    assert found.tokens_read is not None and torch.equal(found.tokens_read, count)
    assert copied.lse is not None and found.lse is not None and torch.allclose(found.lse, copied.lse, atol=1e-5)


def test_pages_of_padding_are_never_read() -> None:
    parts, visible, query = held((40,), 5, seed=2)
    left = torch.tensor([0, 10, 37])
    visible = Padded(new_tokens=1, first_column=44, real=torch.arange(45)[None] >= left[:, None])
    got = Quest(tokens=4 * PAGE).attend(request_of(query, parts, visible, 0.04, context=DEEP))
    out, count = slow(query, parts, visible, 4)
    assert (
        torch.allclose(got.output, out, atol=1e-5)
        and got.tokens_read is not None
        and torch.equal(got.tokens_read, count)
    )
    assert (got.tokens_read[2] == 3 + 5).all()


def test_what_is_not_chosen_is_not_read() -> None:
    """Keys and values of pages that were not chosen may hold anything."""
    parts, visible, query = held((400,), 5, seed=3)
    before = Quest(tokens=8 * PAGE).attend(request_of(query, parts, visible, 0.04, context=DEEP))
    segment = parts[0]
    changed = 0
    for page in range(100):
        keys, values = (x.clone() for x in segment.decode())
        keys[0, page * PAGE : (page + 1) * PAGE] = float("nan")
        values[0, page * PAGE : (page + 1) * PAGE] = float("nan")
        _, tensors = segment.state()
        poisoned = type(segment).from_state(segment.layout, {"page": PAGE}, {**tensors, "keys": keys, "values": values})
        after = Quest(tokens=8 * PAGE).attend(request_of(query, [poisoned, parts[1]], visible, 0.04, context=DEEP))
        changed += not torch.equal(before.output, after.output)
    assert changed == 8


def test_more_than_one_new_token_reads_everything() -> None:
    parts, _, _ = held((40,), 5, seed=4)
    query = states((B, H * G, 3, D), 5)
    visible = Padded(new_tokens=3, first_column=42)
    got = Quest(tokens=1).attend(request_of(query, parts, visible, 0.04, context=DEEP))
    keys = torch.cat([part.decode()[0] for part in parts], 1).unflatten(0, (B, H))
    values = torch.cat([part.decode()[1] for part in parts], 1).unflatten(0, (B, H))
    mask = (torch.arange(45) <= torch.arange(42, 45)[:, None])[None, None]
    assert torch.allclose(got.output, reference(query, keys, values, mask, 0.04)[0], atol=1e-5)
    assert got.tokens_read is None


@pytest.mark.parametrize(("dense", "sparse_from"), [(None, 2), (0, 0), (3, 3)])
def test_the_first_layers_read_everything(dense: int | None, sparse_from: int) -> None:
    """2 of them, as in the paper, unless something else is asked for; layers count from 0."""
    parts, visible, query = held((40,), 5, seed=7)
    quest = Quest(tokens=4 * PAGE) if dense is None else Quest(tokens=4 * PAGE, dense_layers=dense)
    everything = Quest(tokens=1000, dense_layers=0).attend(request_of(query, parts, visible, 0.04)).output
    for layer in range(5):
        context = AttentionContext(layer=layer, layers=5)
        got = quest.attend(request_of(query, parts, visible, 0.04, context=context))
        assert (got.tokens_read is None) == (layer < sparse_from)
        assert torch.allclose(got.output, everything, atol=1e-5) == (layer < sparse_from)
        assert (quest.flops(FlopsRequest(encoded=parts[:1], group=G, size=D, context=context)) == 0) == (
            layer < sparse_from
        )


def test_bad_budgets_and_mass_are_refused() -> None:
    with pytest.raises(ValueError, match="^quest: dense_layers must be 0 or more, found -1"):
        Quest(dense_layers=-1)
    with pytest.raises(ValueError, match=r"tokens=0.*tokens=1024"):
        Quest(tokens=0)
    parts, visible, query = held((40,), 5, seed=6)
    with pytest.raises(CacheMisuse, match="attend=segments"):
        Quest().attend(request_of(query, parts, visible, 0.04, want_mass=True))
