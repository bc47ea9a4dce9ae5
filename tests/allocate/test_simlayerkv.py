"""SimLayerKV: the share of attention at both ends by plain loops, and budgets of lazy layers and others."""

from __future__ import annotations

import pytest
import torch
from tests.support.budget_requests import asked, held_with, rows_of_attention
from tests.support.held_rows import held_of, make_row
from tests.support.seam.zoo import build, held_columns, prompts

import kvtailor
from kvtailor.allocate.simlayerkv import SimLayerKV
from kvtailor.hf.versions import hand_cache


@pytest.mark.parametrize("window", [1, 5])
def test_measures_the_share_at_both_ends_of_every_padded_row(window: int) -> None:
    generator = torch.Generator().manual_seed(window)
    rows = [make_row(n, heads=3, group=2, size=7, generator=generator) for n in (63, 40, 9, 1)]
    allocator = SimLayerKV(initial=3, recent=8, window=window)
    found = allocator.measure(held_of(rows, allocator.needs))
    for i, row in enumerate(rows):
        total, count = 0.0, 0
        for head in rows_of_attention(row, window):
            for given in head:
                # The future of an earlier query is left out of its list, and is newest all the same.
                n = row.tokens
                total += sum(share for j, share in enumerate(given) if j < 3 or j >= n - 8)
                count += 1
        assert float(found[i]) == pytest.approx(total / count, rel=1e-5)
    assert float(found[3]) == pytest.approx(1.0), "ends that overlap count once"


def test_a_share_by_hand() -> None:
    last = [[0.0] * 5] * 4 + [[0.5, 0.125, 0.125, 0.0, 0.25]]
    assert float(SimLayerKV(initial=1, recent=1).measure(held_with(last, heads=2, window=1))) == pytest.approx(0.75)
    assert float(SimLayerKV(initial=0, recent=0).measure(held_with(last, window=1))) == 0.0


def test_lazy_layers_keep_both_ends_and_the_others_share_the_rest() -> None:
    lazy = SimLayerKV(initial=4, recent=16, threshold=0.9)
    budgets = [
        lazy.allocate(asked(total, [100] * 3, measured=[0.95, 0.3, 0.9]))[0, :, 0].tolist()
        for total in (
            30,
            60,
            100,
            220,
            250,
        )
    ]
    # Too little for the ends; the ends; the others, which are cut as well; the others whole; what they cannot hold.
    assert budgets == [[10, 10, 10], [20, 20, 20], [20, 40, 40], [20, 100, 100], [50, 100, 100]]
    with pytest.raises(ValueError, match="layers 0 to 2 at once"):
        lazy.allocate(asked(9, [9, 9], layers=3, measured=[1.0, 2.0]))


@torch.no_grad()
def test_in_a_model_lazy_layers_free_what_they_do_not_keep() -> None:
    model, (ids, _) = build("llama"), prompts((60,))
    cache = kvtailor.cache_for(model, "position(sinks=2) + simlayerkv(initial=2, recent=6, threshold=0.0) @ tokens=8")
    model(ids, **hand_cache(cache))
    for columns in held_columns(cache).values():
        assert columns[0, 0].nonzero().flatten().tolist() == [0, 1, *range(54, 60)]
    full = kvtailor.cache_for(model, "full")
    model(ids, **hand_cache(full))
    assert cache.ledger().total < full.ledger().total / 3


def test_refuses_wrong_settings() -> None:
    for arguments in ({"threshold": 1.1}, {"initial": -1}, {"recent": -1}, {"window": 0}):
        with pytest.raises(ValueError, match="^simlayerkv: "):
            SimLayerKV(**arguments)
