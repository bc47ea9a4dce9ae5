"""What `keep=` owes: the floor of the decimal fraction that was written, not of its binary neighbour."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from kvtailor.engine.budget import total_tokens
from kvtailor.plan import Plan


@pytest.mark.parametrize("keep", ["0.1", "0.3", "0.7", "0.35", "0.999", "1.0"])
def test_a_share_is_the_decimal_one(keep: str) -> None:
    tokens = torch.arange(1, 3000)
    for layers, heads in ((6, 2), (3, 7), (1, 1)):
        total = total_tokens(
            Plan.parse(f"knorm @ keep={keep}"), tokens, layers=layers, template=SimpleNamespace(heads=heads)
        )
        owed = [max(int(Fraction(keep) * n * layers * heads), layers * heads) for n in tokens.tolist()]
        assert total.tolist() == owed
