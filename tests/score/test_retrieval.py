"""Retrieval: a chunk's mean key with the last query, against a loop and a hand-worked line."""

from __future__ import annotations

import pytest
import torch
from tests.support.held_rows import held_of, make_row, row_of

from kvtailor.plan import Plan
from kvtailor.score.retrieval import Retrieval


@pytest.mark.parametrize(("chunk", "window"), [(8, 1), (1, 1), (5, 3), (100, 2)])
def test_equals_a_plain_loop_for_every_padded_row(chunk: int, window: int) -> None:
    scorer = Retrieval(chunk=chunk, window=window)
    generator = torch.Generator().manual_seed(chunk)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 1)]
    got = scorer.score(held_of(rows, scorer.needs))
    for i, row in enumerate(rows):
        asking = row.queries[:, -window:].mean(1)
        for head in range(3):
            asked = (asking[2 * head] + asking[2 * head + 1]) / 2
            chunks = [row.keys[head, at : at + chunk].mean(0) for at in range(0, row.tokens, chunk)]
            logits = [float(asked @ key) for key in chunks]
            logits[0] = max(logits) + 1
            for token in range(row.tokens):
                place = 63 - row.tokens + token
                assert got[i, head, place].item() == pytest.approx(logits[token // chunk], rel=1e-4, abs=1e-5)


def test_what_a_budget_of_whole_chunks_keeps() -> None:
    """One head of size 1, query 1: chunks of two have the means 0, 5, -1, 3, and the newest token stays."""
    keys = torch.tensor([0.0, 0, 4, 6, -1, -1, 3, 3, 1]).view(1, 9, 1)
    scorer = Retrieval(chunk=2)
    scores = scorer.score(held_of([row_of(keys, queries=torch.ones(1, 9, 1))], scorer.needs))[0, 0]
    assert scores.tolist() == [6, 6, 5, 5, -1, -1, 3, 3, 1]
    kept = scores[:-1].topk(4).indices.sort().values.tolist()
    assert kept == [0, 1, 2, 3] and scorer.recent == 1


def test_refuses_what_is_no_size() -> None:
    with pytest.raises(ValueError, match="retrieval: chunk must be at least 1 token, found 0"):
        Retrieval(chunk=0)
    with pytest.raises(ValueError, match="retrieval: window must be at least 1 query, found 0"):
        Retrieval(window=0)


def test_a_plan_finds_it() -> None:
    assert str(Plan.parse("retrieval(chunk=4) @ tokens=64")) == "retrieval(chunk=4) @ tokens=64"
