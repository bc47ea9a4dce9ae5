"""Q-Filters: the projection of each key on the filter of its head."""

from __future__ import annotations

import pytest
import torch
from tests.support.held_rows import example_tensors, held_by, held_of, make_row

from kvtailor.plan import Plan
from kvtailor.score.by_keys.qfilters import QFilters


def test_equals_a_plain_loop() -> None:
    scorer = QFilters()
    rows = [make_row(63, heads=3, group=2, size=5, generator=torch.Generator().manual_seed(1))]
    held = held_by(scorer, rows, layer=2)
    filters = example_tensors(scorer, layers=3, heads=3, group=2, size=5)["filters"][2]
    scores = scorer.score(held)
    for head in range(3):
        for token in range(63):
            plain = sum(float(held.keys[0, head, token, i]) * float(filters[head, i]) for i in range(5))
            assert scores[0, head, token].item() == pytest.approx(plain, rel=1e-4, abs=1e-5)


def test_a_longer_projection_stays_longer() -> None:
    """Keys (2, 0), (0, 9), (-5, 0) and (1, 1) on the filter (1, 0): 2, 0, -5 and 1."""
    row = make_row(4, heads=1, group=1, size=2, generator=torch.Generator())
    held = held_of([row], QFilters().needs, calibration={"filters": torch.tensor([[1.0, 0.0]])})
    held.keys[0, 0] = torch.tensor([[2.0, 0], [0, 9], [-5, 0], [1, 1]])
    assert QFilters().score(held)[0, 0].tolist() == [2, 0, -5, 1]


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="qfilters: recent must be 0 or more"):
        QFilters(recent=-1)
    row = make_row(4, heads=1, group=1, size=2, generator=torch.Generator())
    with pytest.raises(ValueError, match="qfilters scores by calibrated filters, but none were given"):
        QFilters().score(held_of([row], QFilters().needs))


def test_a_plan_finds_it() -> None:
    plan = Plan.parse("qfilters(recent=8) + adakv @ tokens=64")
    assert plan.score == QFilters(recent=8) and plan.slack_tokens == 32
    assert str(plan) == "qfilters(recent=8) + adakv @ tokens=64"
