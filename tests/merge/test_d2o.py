"""D2O: the nearest key, weights of exp(similarity), and a threshold at the mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, row_of

from kvtailor.merge.d2o import D2O
from kvtailor.types import Needs

# Tokens 0 and 3 are kept. Token 1 points where token 0 does (cosine 1), token 2 half away from it (0.7071).
KEYS = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [1.0, -1.0], [0.0, 3.0]]])
VALUES = torch.tensor([[[10.0], [20.0], [50.0], [7.0]]])
KEEP = torch.tensor([[[True, False, False, True]]])


def folded(merger: D2O):
    merged = merger.merge(held_of([row_of(KEYS, VALUES)], Needs()), KEEP, KEEP)
    return merged.keys[0, 0].tolist(), merged.values[0, 0, :, 0].tolist()


def test_takes_in_what_is_at_least_as_similar_as_the_mean() -> None:
    """The mean of 1 and 0.7071 is 0.854, so token 1 joins token 0, e to e, and token 2 is dropped."""
    keys, values = folded(D2O())
    assert keys[0] == pytest.approx([1.5, 0.0]) and keys[1] == [0.0, 3.0]
    assert values == pytest.approx([15.0, 7.0])


def test_without_a_threshold_all_of_them_join_by_similarity() -> None:
    """e, e and exp(0.7071) = 2.02811 over their sum 7.46467."""
    keys, values = folded(D2O(all_of_them=True))
    assert keys[0] == pytest.approx([(2.71828 * 3 + 2.02811) / 7.46467, -2.02811 / 7.46467], rel=1e-5)
    assert values[0] == pytest.approx((2.71828 * 30 + 2.02811 * 50) / 7.46467, rel=1e-5)


def test_equal_keys_all_join() -> None:
    """A mean of equal similarities is rounded, and must leave none of them out."""
    keys = torch.randn(1, 1, 7, generator=torch.Generator().manual_seed(1)).expand(1, 50, 7)
    values = torch.arange(50.0).view(1, 50, 1)
    held = held_of([row_of(keys, values)], Needs())
    keep = torch.arange(50).expand(1, 1, 50) == 49
    merged = D2O().merge(held, keep, keep)
    assert merged.values.item() == pytest.approx(24.5, rel=1e-5)
    assert merged.keys[0, 0, 0].tolist() == pytest.approx(keys[0, 0].tolist(), rel=1e-5)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    held = held_of([row_of(torch.randn(2, 90, 6, generator=generator))], Needs())
    held = replace(held, values=torch.randn(held.values.shape, generator=generator))
    keep = torch.rand(held.valid.shape, generator=generator) < 0.3
    whole = D2O().merge(held, keep, keep)
    monkeypatch.setattr("kvtailor.merge.d2o._BLOCK", 100)
    pieces = D2O().merge(held, keep, keep)
    assert torch.allclose(pieces.keys, whole.keys, atol=1e-6) and torch.allclose(pieces.values, whole.values, atol=1e-6)
