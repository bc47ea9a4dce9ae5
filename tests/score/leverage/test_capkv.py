"""CapKV against loops over tokens and a matrix inverse, and volumes worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row
from torch import Tensor

from kvtailor.ops.lanes.rotate import turn
from kvtailor.plan import Plan
from kvtailor.score.leverage.capkv import CapKV
from kvtailor.types import Held


def naive(anchors: Tensor, keys: Tensor, values: Tensor, tau: float) -> list[float]:
    """One kv head by loops: mean queries (g, d) as they look ahead, keys and values of what is weighed."""
    keys, values, n = keys.double(), values.double(), keys.shape[0]
    found = [0.0] * n
    for anchor in anchors.double():
        fits = [float(anchor @ key / anchor.norm() / key.norm()) for key in keys]
        weights = [math.exp(tau * (fit - max(fits))) for fit in fits]
        matrix = torch.eye(values.shape[1], dtype=torch.float64)
        for weight, value in zip(weights, values, strict=True):
            matrix += (weight + 1e-6) * torch.outer(value, value)
        inverse = torch.linalg.inv(matrix)
        for i in range(n):
            found[i] += weights[i] * float(values[i] @ inverse @ values[i]) / len(anchors)
    return found


def ahead(held: Held, row: int, future: int) -> Tensor:
    """(q, d) mean of the row's queries turned to each position to come, one after the other."""
    assert held.moments is not None and held.rotation is not None
    mean = held.moments.mean[row]
    turned = [turn(mean[:, None], torch.tensor([held.seen + i]), held.rotation)[:, 0] for i in range(future)]
    return torch.stack(turned).mean(0)


def test_equals_loops_in_every_padded_row() -> None:
    generator = torch.Generator().manual_seed(17)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 6)]
    scorer = CapKV(tau=3.0, future=9, sinks=2)
    held = held_of(rows, scorer.needs)
    scores = scorer.score(held)
    for i, row in enumerate(rows):
        anchors = ahead(held, i, 9)
        for head in range(3):
            expected = naive(anchors[2 * head : 2 * head + 2], row.keys[head, 2:], row.values[head, 2:], 3.0)
            found = scores[i, head, 63 - row.tokens :]
            torch.testing.assert_close(found[2:], torch.tensor(expected), rtol=1e-4, atol=1e-6)
            assert found[:2].tolist() == [2.0, 2.0]


def test_the_first_order_of_a_volume() -> None:
    """With equal weights a score is the rise of log det A per share of the token added, to first order."""
    generator = torch.Generator().manual_seed(18)
    row = make_row(12, heads=1, group=1, size=4, generator=generator)
    held = held_of([row], CapKV(sinks=0).needs)
    scores = CapKV(tau=0.0, sinks=0).score(held)[0, 0]
    values = row.values[0].double()
    step = 1e-6
    for i in range(12):
        weights = torch.ones(12, dtype=torch.float64)
        volumes = []
        for each in (1.0, 1.0 + step):
            weights[i] = each
            volumes.append(torch.logdet(torch.eye(5, dtype=torch.float64) + (values.T * weights) @ values))
        assert float(scores[i]) == pytest.approx(float(volumes[1] - volumes[0]) / step, rel=1e-3)


def test_nothing_but_sinks_is_no_error() -> None:
    row = make_row(3, heads=2, group=2, size=6, generator=torch.Generator().manual_seed(0))
    scores = CapKV().score(held_of([row], CapKV().needs))
    assert torch.equal(scores, torch.full((1, 2, 3), 2.0))


def test_settings() -> None:
    assert Plan.parse("capkv(tau=2, sinks=0) @ keep=0.5").score == CapKV(tau=2.0, sinks=0)
    for name, message in (("tau", "0 or more, found -1"), ("future", "at least 1 position"), ("sinks", "0 or more")):
        with pytest.raises(ValueError, match=rf"^capkv: {name} must be {message}"):
            CapKV(**{name: -1})
    with pytest.raises(ValueError, match="none was gathered"):
        row = make_row(9, heads=2, group=2, size=6, generator=torch.Generator().manual_seed(0))
        CapKV().score(replace(held_of([row], CapKV().needs), moments=None))
