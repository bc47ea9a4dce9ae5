"""KeyDiff against loops over keys, and directions whose cosines are known."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.held_rows import held_of, make_row, row_of
from torch.utils.flop_counter import FlopCounterMode

from kvtailor.score.by_keys.keydiff import KeyDiff
from kvtailor.types import Needs


def naive(keys: list[list[float]]) -> list[float]:
    """One head by loops: the mean of the directions, and minus the cosine of each key with it."""

    def length(vector: list[float]) -> float:
        return math.sqrt(sum(x * x for x in vector))

    directions = [[x / length(key) for x in key] for key in keys]
    anchor = [sum(column) / len(keys) for column in zip(*directions, strict=True)]
    return [-sum(x * a for x, a in zip(key, anchor, strict=True)) / length(key) / length(anchor) for key in keys]


def test_equals_loops_in_every_padded_row() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = [make_row(n, heads=3, group=1, size=7, generator=generator) for n in (63, 40, 2, 1)]
    scores = KeyDiff().score(held_of(rows, Needs()))
    for i, row in enumerate(rows):
        for head in range(3):
            expected = torch.tensor(naive(row.keys[head].tolist()))
            torch.testing.assert_close(scores[i, head, 63 - row.tokens :], expected, rtol=1e-5, atol=1e-6)


def test_worked_by_hand() -> None:
    # Directions (1, 0), (1, 0), (0, 1): their mean points along (2, 1), whatever the lengths.
    scores = KeyDiff().score(held_of([row_of(torch.tensor([[[3.0, 0.0], [0.5, 0.0], [0.0, 7.0]]]))], Needs()))
    torch.testing.assert_close(scores[0, 0], torch.tensor([-2.0, -2.0, -1.0]) / math.sqrt(5))


def test_a_key_of_zeros_and_directions_that_cancel_out_are_no_error() -> None:
    scores = KeyDiff().score(held_of([row_of(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]))], Needs()))
    assert scores[0, 0].tolist() == [-1.0, 0.0]
    assert KeyDiff().score(held_of([row_of(torch.tensor([[[1.0, 0.0], [-2.0, 0.0]]]))], Needs()))[0, 0].tolist() == [
        0.0,
        0.0,
    ]


def test_torch_counts_the_same_products() -> None:
    heads, n, size = 3, 63, 7
    row = make_row(n, heads=heads, group=1, size=size, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        KeyDiff().score(held_of([row], Needs()))
    norms_and_divisions = heads * n * (2 * size + 2)
    assert counter.get_total_flops() + norms_and_divisions == heads * KeyDiff().flops(tokens=n, group=1, size=size)


def test_settings() -> None:
    assert KeyDiff().recent == 0 and KeyDiff(recent=7).recent == 7 and KeyDiff().slack == 32
    with pytest.raises(ValueError, match=r"^keydiff: recent must be 0 or more tokens, found -1"):
        KeyDiff(recent=-1)
