"""What `keep=` owes: the floor of the decimal fraction that was written, not of its binary neighbour."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from kvtailor.engine.budget import CacheShape, count_total, make_budget, recent_tokens
from kvtailor.plan import Plan


@pytest.mark.parametrize("keep", ["0.1", "0.3", "0.7", "0.35", "0.999", "1.0"])
def test_a_share_is_the_decimal_one(keep: str) -> None:
    tokens = torch.arange(1, 3000)
    for layers, heads in ((6, 2), (3, 7), (1, 1)):
        total = count_total(
            Plan.parse(f"knorm @ keep={keep}"), tokens, layers=layers, template=SimpleNamespace(heads=heads)
        )
        owed = [max(int(Fraction(keep) * n * layers * heads), layers * heads) for n in tokens.tolist()]
        assert total.tolist() == owed


@pytest.mark.parametrize("plan", ["knorm @ bytes=1000000", "knorm + vector(bits=8) @ bytes=1000000"])
def test_a_token_is_priced_by_its_layer(plan: str) -> None:
    """Layers of other heads and sizes: the bytes come out, and every head of each layer gets the same number."""
    parsed = Plan.parse(plan)
    shapes = [
        CacheShape(heads=2, key_size=64, value_size=64, element_size=2),
        CacheShape(heads=4, key_size=32, value_size=16, element_size=2),
        CacheShape(heads=1, key_size=128, value_size=256, element_size=2),
    ]
    tokens = torch.tensor([100_000])
    heads = sum(shape.heads for shape in shapes)
    budgets = [make_budget(parsed, tokens, layers=3, newest=shape, other_bytes=5000, shapes=shapes) for shape in shapes]
    each = {int(budget.each) for budget in budgets}
    assert len(each) == 1
    (held,) = each
    # What uniform gives each head of a layer that is cut alone.
    assert {int(b.total) // (3 * s.heads) for b, s in zip(budgets, shapes, strict=True)} == {held}
    taken = 5000 + sum(shape.heads * held * (_token_bytes(parsed, shape) + 4) for shape in shapes)
    assert 1_000_000 - 2 * heads * 1000 < taken <= 1_000_000
    narrow = make_budget(parsed, tokens, layers=3, newest=shapes[0], other_bytes=5000)
    assert int(narrow.each) != held, "priced by one of them, it would come out otherwise"


def _token_bytes(plan: Plan, shape: CacheShape) -> float:
    key_size, value_size, element = shape.sizes()
    return plan.encode.mean_bytes_per_token(3, key_size, value_size, element, heads=shape.heads)


def test_the_newest_tokens_stay_as_far_as_the_budget_pays_for_them() -> None:
    plan = Plan.parse("snapkv(window=8) @ tokens=20")
    assert recent_tokens(plan, torch.tensor([3, 8, 20])).tolist() == [3, 8, 8]
