"""CUR against loops over tokens, and shares worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row, row_of, with_holes
from torch import Tensor

from kvtailor.ops.lanes.leverage import gaussian_sketch
from kvtailor.plan import Plan
from kvtailor.score.leverage.cur import CUR


def shares(states: list[list[float]], window: int) -> list[float]:
    """Squared lengths over those of their window."""
    lengths = [math.fsum(x * x for x in state) for state in states]
    window = window or len(lengths)
    return [lengths[i] / math.fsum(lengths[i // window * window :][:window]) for i in range(len(lengths))]


def naive(keys: Tensor, values: Tensor, of: str, window: int, sinks: int) -> list[float]:
    """One head by loops."""
    each = zip(shares(keys.tolist(), window), shares(values.tolist(), window), strict=True)
    two = [{"product": k * v, "mean": (k + v) / 2, "keys": k, "values": v}[of] for k, v in each]
    return [1.0 if i < sinks else x / math.fsum(two) for i, x in enumerate(two)]


@pytest.mark.parametrize(
    ("of", "window", "sinks", "sketch"),
    [("product", 16, 4, 0), ("mean", 7, 0, 0), ("keys", 0, 2, 0), ("values", 5, 1, 0), ("product", 16, 4, 20)],
)
def test_equals_loops_in_every_padded_row(of: str, window: int, sinks: int, sketch: int) -> None:
    generator = torch.Generator().manual_seed(13)
    rows = [make_row(n, heads=3, group=1, size=7, generator=generator) for n in (63, 40, 17, 1)]
    scorer = CUR(of=of, window=window, sinks=sinks, sketch=sketch, state=3)  # type: ignore[arg-type]
    scores = scorer.score(held_of(rows, scorer.needs))
    for i, row in enumerate(rows):
        for head in range(3):
            keys, values = row.keys[head].double(), row.values[head].double()
            if sketch:
                keys, values = keys @ gaussian_sketch(7, 20, 3), values @ gaussian_sketch(8, 20, 3)
            expected = torch.tensor(naive(keys, values, of, window, sinks))
            torch.testing.assert_close(scores[i, head, 63 - row.tokens :], expected, rtol=1e-4, atol=1e-7)


def test_windows_are_cut_from_what_is_held() -> None:
    generator = torch.Generator().manual_seed(14)
    row = make_row(40, heads=2, group=1, size=6, generator=generator)
    held = held_of([row], CUR().needs)
    left = torch.rand(40, generator=generator).argsort()[:25].sort().values
    there = torch.zeros(40, dtype=torch.bool).index_fill(0, left, True)
    holed, where = with_holes(replace(held, valid=held.valid & there), 7, generator)
    scores = CUR(window=4, sinks=0).score(holed).gather(2, where)[0][:, left]
    for head in range(2):
        expected = naive(row.keys[head, left], row.values[head, left], "product", 4, 0)
        torch.testing.assert_close(scores[head], torch.tensor(expected), rtol=1e-4, atol=1e-7)


def test_a_window_of_zeros_is_no_error() -> None:
    keys = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 4.0]]])
    scores = CUR(window=2, sinks=0, of="keys").score(held_of([row_of(keys)], CUR().needs))
    torch.testing.assert_close(scores[0, 0], torch.tensor([0.0, 0.0, 0.36, 0.64]))


def test_settings() -> None:
    assert Plan.parse("cur(of=values, sketch=20) + adakv @ keep=0.5").score == CUR(of="values", sketch=20)
    with pytest.raises(ValueError, match=r"^cur: of must be one of"):
        CUR(of="all")  # type: ignore[arg-type]
    for name in ("window", "sinks", "sketch"):
        with pytest.raises(ValueError, match=rf"^cur: {name} must be 0 or more, found -1"):
            CUR(**{name: -1})
