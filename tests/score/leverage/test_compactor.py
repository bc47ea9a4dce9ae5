"""Compactor against its two parts, put together by loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.plan import Plan
from kvtailor.score.leverage.compactor import Compactor
from kvtailor.score.leverage.leverage import Leverage
from kvtailor.score.leverage.noncausal import NonCausal


@pytest.mark.parametrize("blending", [None, 0.0, 1.5])
def test_equals_its_parts_in_units_of_their_deviation(blending: float | None) -> None:
    """Parts of the inner tokens alone, z-scored by plain means over all heads of a row; orders are the same."""
    generator = torch.Generator().manual_seed(11)
    lengths = (63, 41, 14)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in lengths]
    scorer = Compactor(chunk=8, sketch=3, blending=blending, sinks=3, recent=2)
    held = held_of(rows, scorer.needs)
    scores = scorer.score(held)
    assert held.budget is not None
    inner = replace(held, valid=(held.positions >= held.first[:, None, None] + 3) & (held.positions < 61))
    parts = [part.score(inner) for part in (Leverage(sketch=3), NonCausal(chunk=8))]
    for i, n in enumerate(lengths):
        here = slice(63 - n + 3, 61)
        leverage, attention = ((p - p.mean()) / p.std() for p in (part[i, :, here].double() for part in parts))
        weight = 1 - int(held.budget[i]) / n if blending is None else blending
        expected = weight * leverage + attention
        found = scores[i, :, here].double()
        # The means stay in: one constant for all tokens of the row's layer.
        torch.testing.assert_close(found - found.mean(), expected, rtol=1e-4, atol=1e-5)
        assert bool((scores[i, :, 63 - n : 63 - n + 3] > found.amax(-1, keepdim=True)).all())


def test_keeps_sinks_and_newest_whatever_they_score() -> None:
    assert Compactor().recent == 4 and Compactor(recent=0).recent == 0
    row = make_row(30, heads=2, group=1, size=6, generator=torch.Generator().manual_seed(0))
    held = held_of([row], Compactor().needs)
    best = Compactor().score(held)[0].topk(8, dim=-1).indices.sort(-1).values
    assert best.tolist() == [list(range(8))] * 2


def test_what_hardly_varies_is_not_blown_up_and_short_texts_have_scores() -> None:
    for n in (1, 8, 12, 13):
        row = make_row(n, heads=2, group=1, size=6, generator=torch.Generator().manual_seed(n))
        row = replace(row, keys=torch.ones_like(row.keys), values=torch.ones_like(row.values))
        scores = Compactor().score(held_of([row], Compactor().needs))
        assert bool(scores.isfinite().all())


def test_settings() -> None:
    assert Plan.parse("compactor(blending=0.5, sinks=4) @ keep=0.5").score == Compactor(blending=0.5, sinks=4)
    for words, message in (
        ({"blending": -1.0}, r"^compactor: blending must be 0 or more, found -1.0"),
        ({"sinks": -1}, r"^compactor: sinks must be 0 or more tokens, found -1"),
        ({"recent": -2}, r"^compactor: recent must be 0 or more tokens, found -2"),
    ):
        with pytest.raises(ValueError, match=message):
            Compactor(**words)
    with pytest.raises(ValueError, match="blends by the budget"):
        row = make_row(30, heads=2, group=1, size=6, generator=torch.Generator().manual_seed(0))
        Compactor().score(replace(held_of([row], Compactor().needs), budget=None))
