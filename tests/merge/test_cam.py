"""CaM: a dropped value goes to the kept ones that follow, by its attention beside theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.budget_requests import held_with

from kvtailor.merge.cam import CaM

ROWS = [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.4, 0.4, 0], [0.1, 0.2, 0.3, 0.4]]
VALUES = torch.tensor([6.0, 1.0, 4.0, 1.0]).view(1, 1, 4, 1)


def folded(merger: CaM, kept: list[int], window: int = 1) -> list[float]:
    held = replace(held_with(ROWS, window=window), values=VALUES)
    keep = torch.zeros(1, 1, 4, dtype=torch.bool)
    keep[..., kept] = True
    merged = merger.merge(held, keep, keep)
    assert torch.equal(merged.keys, held.keys[:, :, kept]), "keys stay as they are"
    return merged.values.flatten().tolist()


def test_by_hand() -> None:
    """The last query gives 0.1, 0.2, 0.3, 0.4, and tokens 1 and 3 are kept.

    Token 0 goes to both: p = 0.1 / 0.3, so each gets 6 / 3 / 2 = 1. Token 2 goes to token 3 alone: p = 0.3 / 0.4, 3.
    """
    assert folded(CaM(share=2, window=1), [1, 3]) == pytest.approx([2.0, 5.0])


def test_shares_with_so_many_only() -> None:
    """Token 0 goes to token 1 alone: p = 0.1 / 0.2, so 3; token 2 to token 3 as before."""
    assert folded(CaM(share=1, window=1), [1, 3]) == pytest.approx([4.0, 4.0])


def test_more_attention_than_they_have_counts_as_one() -> None:
    """The last two queries give token 1 0.3 on average, token 2 0.35 and token 3 0.2.

    So 0.3 / 0.2 and 0.35 / 0.2 are cut to 1, and token 3 gets 1 and 4.
    """
    assert folded(CaM(share=4, window=2), [0, 3], window=2) == pytest.approx([6.0, 1.0 + 1.0 + 4.0])


def test_nothing_follows() -> None:
    assert folded(CaM(share=2, window=1), [0]) == [6.0]


@pytest.mark.parametrize("given", [{"share": 0}, {"window": 0}], ids=str)
def test_refuses_what_makes_no_sense(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="^cam: "):
        CaM(**given)
