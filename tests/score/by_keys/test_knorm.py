"""KNorm against a plain loop, and keys whose norms are known."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.held_rows import held_of, make_row, row_of

from kvtailor.plan import Plan
from kvtailor.score.by_keys.knorm import KNorm
from kvtailor.select.topk import TopK
from kvtailor.types import Needs


def test_equals_a_plain_loop_in_every_padded_row() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [make_row(n, heads=3, group=2, size=5, generator=generator) for n in (63, 40, 1)]
    scores = KNorm().score(held_of(rows, Needs()))
    for i, row in enumerate(rows):
        for head in range(3):
            for token in range(row.tokens):
                plain = -math.sqrt(sum(float(x) ** 2 for x in row.keys[head, token]))
                assert scores[i, head, 63 - row.tokens + token].item() == pytest.approx(plain, rel=1e-6)


def test_the_shortest_keys_stay() -> None:
    held = held_of([row_of(torch.tensor([[[3.0, 4.0], [0.0, -2.0], [1.0, 1.0], [-6.0, 8.0]]]))], Needs())
    scores = KNorm().score(held)
    torch.testing.assert_close(scores[0, 0], torch.tensor([-5.0, -2.0, -math.sqrt(2), -10.0]))
    assert TopK().select(scores, torch.tensor([[2]])).tolist() == [[[False, True, True, False]]]


def test_norms_of_half_precision_keys_are_told_apart() -> None:
    # 16 and 16.03: both are 16 in bfloat16.
    held = held_of([row_of(torch.tensor([[[16.0, 1.0], [16.0, 0.0]]]))], Needs(), dtype=torch.bfloat16)
    scores = KNorm().score(held)[0, 0]
    torch.testing.assert_close(scores, torch.tensor([-math.sqrt(257), -16.0]))


def test_settings() -> None:
    assert KNorm().recent == 0 and KNorm(recent=7).recent == 7 and KNorm().slack == 32
    assert str(Plan.parse("knorm(recent=4) + adakv @ keep=0.5")) == "knorm(recent=4) + adakv @ keep=0.5"
    with pytest.raises(ValueError, match=r"^knorm: recent must be 0 or more tokens, found -1"):
        KNorm(recent=-1)
