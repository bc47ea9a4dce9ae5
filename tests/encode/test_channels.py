"""Key channels are dropped by the newest queries, head by head, and only once the queries are known."""

from __future__ import annotations

import pytest
import torch
from tests.support.seam.zoo import build, error, prompts
from tests.support.segments_of import states, uneven
from torch import Tensor

import kvtailor
from kvtailor.encode.channels import Channels
from kvtailor.errors import PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from kvtailor.types import Layout


def chosen(keys: Tensor, queries: Tensor | None, count: int) -> list[int]:
    """The paper's ranking of one head's channels, from keys (n, d) and queries (w, d), channel by channel."""
    scores = []
    for channel in range(keys.shape[1]):
        key = sum(float(x) ** 2 for x in keys[:, channel]) ** 0.5
        query = 1.0 if queries is None else sum(float(x) ** 2 for x in queries[:, channel]) ** 0.5
        scores.append((key * query, channel))
    return sorted(channel for _, channel in sorted(scores, reverse=True)[:count])


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_drops_what_the_definition_drops(asked: bool, ragged: bool) -> None:
    keys, values = states((6, 63, 10), 1), states((6, 63, 7), 2)
    layout = Layout(rows=2, heads=3, size=63, start=0)
    owners = torch.arange(6)
    if ragged:
        layout, owner, column = uneven(2, 3, 16, most=50, columns=63, seed=3)
        keys, values, owners = keys[owner, column], values[owner, column], owner[:, 0]
    queries = states((2, 6, 40, 10), 4) * torch.linspace(0.1, 2, 10)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, :25] = False
    queries[1, :, :25] = queries[1, :, :25].flip(-1) * 50
    codec = Channels(keep=0.6, window=32)
    codec = codec.seeing(queries, 3, valid) if asked else codec
    decoded = codec.encode(layout, keys, values).decode()
    assert torch.equal(decoded[1], values)
    filled = layout.filled(torch.device("cpu"))
    filled = torch.ones(keys.shape[:2], dtype=torch.bool) if filled is None else filled
    for owner in range(6):
        row, head = divmod(owner, 3)
        mine = owners == owner
        window = queries[row, 2 * head : 2 * head + 2, -32:][:, valid[row, -32:]].flatten(0, 1)
        expected = chosen(keys[mine][filled[mine]], window if asked else None, 6)
        for lane in mine.nonzero()[:, 0].tolist():
            kept = [c for c in range(10) if bool((decoded[0][lane, :, c] != 0).any())]
            assert kept == expected
            assert torch.equal(decoded[0][lane][:, kept], keys[lane][:, kept])


@pytest.mark.parametrize(("size", "index"), [(64, 1), (300, 2)])
def test_bytes(size: int, index: int) -> None:
    codec = Channels(keep=0.5)
    assert codec.bytes_per_token(size, 10, 2) == size // 2 * (2 + index / 128) + 20
    segment = codec.encode(
        Layout(rows=1, heads=2, size=200, start=0), states((2, 200, size), 1), states((2, 200, 10), 2)
    )
    assert segment.closed_form_bytes() == 2 * (200 * (size // 2 + 10) * 4 + 2 * size // 2 * index)


@torch.no_grad()
@pytest.mark.parametrize("scorer", ["", "snapkv(window=4) + "])
def test_a_padded_batch_is_as_each_row_alone(scorer: str) -> None:
    """The queries of a row's own end rank its channels, in a prompt and in the blocks that follow it."""
    model, lengths = build("llama"), (60, 37)
    plan = f"{scorer}channels(keep=0.5, window=8, recent=8, block_size=8)" + (" @ tokens=30" if scorer else "")
    ids, mask = prompts(lengths)
    more = prompts((20, 20), state=5)[0]
    batch = kvtailor.cache_for(model, plan)
    alone = [kvtailor.cache_for(model, plan) for _ in lengths]
    model(ids, attention_mask=mask, **hand_cache(batch), position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    for row, (length, cache) in enumerate(zip(lengths, alone, strict=True)):
        model(ids[row : row + 1, -length:], **hand_cache(cache))
    changed = 0.0
    for step in range(20):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        token = more[:, step : step + 1]
        found = model(token, attention_mask=mask, **hand_cache(batch), position_ids=mask.sum(-1, keepdim=True) - 1)
        for row, cache in enumerate(alone):
            expected = model(token[row : row + 1], **hand_cache(cache)).logits
            assert error(found.logits[row : row + 1], expected) < 1e-4
            changed += float(expected.abs().sum())
    assert changed > 0 and batch.ledger().total == batch.ledger().closed_form
    assert all(state.observed.evidence.queries.shape[2] == 8 for state in batch.engine.states), (
        "it still sees the newest"
    )
    assert all(segment.codec == "channels" for state in batch.engine.states for segment in state.stored.segments)


@torch.no_grad()
def test_the_queries_change_which_channels_stay() -> None:
    model, ids = build("llama"), prompts((60,))[0]
    kept = []
    for plan in ("channels(keep=0.5, window=8)", "channels(keep=0.5, window=1)"):
        cache = kvtailor.cache_for(model, plan)
        model(ids, **hand_cache(cache))
        kept.append(torch.stack([state.stored.segments[0].keys.kept for state in cache.engine.states]))
        assert cache.ledger().by_stage["observe"] > 0
    assert not torch.equal(*kept)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("channels(keep=0.0)", "channels: keep must be a share above 0"),
        ("channels(window=0)", "channels: window must be at least 1 query"),
        ("channels(block_size=0)", "block_size 1 or more, found 32 and 0"),
        ("unrotated(of=channels)", "inside unrotated it would not get them: name channels as the codec itself"),
    ],
)
def test_refuses(text: str, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        Plan.parse(text)
