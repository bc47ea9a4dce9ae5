"""H2O's reading of accumulated mass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.score.h2o import H2O
from kvtailor.types import Needs


def test_the_score_is_the_mass() -> None:
    generator = torch.Generator().manual_seed(0)
    held = held_of([make_row(n, heads=2, group=2, size=4, generator=generator) for n in (9, 4)], Needs(mass=True))
    assert held.mass is not None
    assert torch.equal(H2O().score(held), held.mass)


def test_normalised_by_the_queries_that_saw_the_token() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [make_row(n, heads=1, group=1, size=4, generator=generator) for n in (4, 2)]
    held = held_of(rows, Needs(mass=True))
    # Query i spreads itself evenly over the i + 1 tokens that it sees.
    even = torch.tensor([[[25 / 12, 13 / 12, 7 / 12, 1 / 4]], [[0.0, 0.0, 3 / 2, 1 / 2]]])
    got = H2O(normalise=True).score(dataclasses.replace(held, mass=even))
    torch.testing.assert_close(got[0, 0], torch.tensor([25 / 48, 13 / 36, 7 / 24, 1 / 4]))
    torch.testing.assert_close(got[1, 0, 2:], torch.tensor([3 / 4, 1 / 2]))


def test_after_eviction_the_columns_count_and_not_the_slots() -> None:
    row = make_row(2, heads=1, group=1, size=4, generator=torch.Generator().manual_seed(0))
    held = dataclasses.replace(
        held_of([row], Needs(mass=True)), positions=torch.tensor([[[3, 9]]]), seen=10, mass=torch.tensor([[[7.0, 1.0]]])
    )
    assert H2O(normalise=True).score(held).tolist() == [[[1.0, 1.0]]]


def test_says_what_it_needs() -> None:
    assert H2O(recent=5).recent == 5 and H2O().needs == Needs(mass=True) and H2O().slack == 32
    row = make_row(2, heads=1, group=1, size=4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="mass"):
        H2O().score(held_of([row], Needs()))
    with pytest.raises(ValueError, match="recent"):
        H2O(recent=-1)
