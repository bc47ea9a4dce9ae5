"""Leverage against a matrix inverse, one row and head at a time, and against what leverage is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row, row_of
from torch import Tensor

from kvtailor.ops.lanes.leverage import gaussian_sketch
from kvtailor.plan import Plan
from kvtailor.score.leverage.leverage import Leverage
from kvtailor.types import Rotation


def naive(keys: Tensor, ages: list[int], frequencies: list[float], sketch: Tensor | None, ridge: float) -> list[float]:
    """One head: keys (n, d) turned back plane by plane, less their mean, through the inverse of their Gram matrix."""
    rows = keys.double().clone()
    half = len(frequencies)
    for i, age in enumerate(ages):
        for plane, frequency in enumerate(frequencies):
            angle = torch.tensor(-age * frequency, dtype=torch.float64)
            one, two = keys[i, plane].double(), keys[i, plane + half].double()
            rows[i, plane] = one * angle.cos() - two * angle.sin()
            rows[i, plane + half] = two * angle.cos() + one * angle.sin()
    rows = rows - rows.mean(0)
    if sketch is not None:
        rows = rows @ sketch
    inverse = torch.linalg.inv(rows.T @ rows + ridge * torch.eye(rows.shape[1], dtype=torch.float64))
    return [float(row @ inverse @ row) for row in rows]


@pytest.mark.parametrize("sketch", [0, 3, 48])
def test_equals_loops_in_every_padded_row(sketch: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 41, 5, 1)]
    scorer = Leverage(sketch=sketch, ridge=0.5, state=4)
    held = held_of(rows, scorer.needs)
    assert held.rotation is not None
    drawn = gaussian_sketch(7, 3, 4) if sketch == 3 else None
    scores = scorer.score(held)
    for i, row in enumerate(rows):
        for head in range(3):
            ages = list(range(row.tokens))
            expected = naive(row.keys[head], ages, held.rotation.frequencies.tolist(), drawn, 0.5)
            found = scores[i, head, 63 - row.tokens :]
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_a_key_that_stands_alone_has_all_of_its_direction() -> None:
    """Two directions of many keys, and a third one of a single key; leverages add up to the rank."""
    keys = torch.zeros(1, 40, 4)
    keys[0, :20, 0], keys[0, 20:39, 1], keys[0, 39, 2] = 1.0, 1.0, 1.0
    scorer = Leverage(ridge=1e-9)
    held = replace(held_of([row_of(keys)], scorer.needs), rotation=Rotation(frequencies=torch.zeros(2)))
    scores = scorer.score(held)[0, 0]
    assert scores.argmax() == 39 and float(scores[39]) == pytest.approx(1.0, abs=0.03)
    assert float(scores.sum()) == pytest.approx(2.0, abs=1e-4)


def test_long_texts_are_read_in_blocks_and_large_keys_have_a_factor() -> None:
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, 5000, 8, generator=generator) * 1e4
    keys[..., 7] = keys[..., 6]
    scorer = Leverage(sketch=0)
    held = replace(held_of([row_of(keys)], scorer.needs), rotation=Rotation(frequencies=torch.zeros(2)))
    scores = scorer.score(held)[0, 0]
    # An orthonormal base of the seven directions that there are; the Gram matrix of the eight channels is singular.
    base = torch.linalg.svd(keys[0].double() - keys[0].double().mean(0), full_matrices=False).U[:, :7]
    torch.testing.assert_close(scores, base.square().sum(-1).float(), rtol=1e-5, atol=1e-8)


def test_a_sketch_is_of_a_keys_own_variance() -> None:
    drawn = gaussian_sketch(128, 48, 0)
    assert float((drawn**2).sum() / 128) == pytest.approx(1.0, rel=0.03)
    assert not torch.equal(drawn, gaussian_sketch(128, 48, 1))


def test_settings() -> None:
    assert Plan.parse("leverage(sketch=16, state=2) + adakv @ keep=0.5").score == Leverage(sketch=16, state=2)
    with pytest.raises(ValueError, match=r"^leverage: sketch must be 0 or more channels, found -1"):
        Leverage(sketch=-1)
    with pytest.raises(ValueError, match=r"^leverage: ridge must be above 0, found 0"):
        Leverage(ridge=0)
