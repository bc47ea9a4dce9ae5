"""CriticalKV by hand, and what it leaves of the score that it weighs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.support.held_rows import held_of, make_row

from kvtailor.score.atskv import ATSKV
from kvtailor.score.contract import Scorer
from kvtailor.score.critical import Critical
from kvtailor.score.h2o import H2O
from kvtailor.score.position import Position
from kvtailor.score.snapkv import SnapKV
from kvtailor.types import Held, Needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortest(Scorer):
    """Minus the length of each key."""

    def score(self, held: Held) -> torch.Tensor:
        return -held.keys.float().norm(dim=-1)


def line(mass: list[float], values: list[float], output: list[list[float]], budget: int) -> Held:
    """One row, one kv head of two query heads, values of one channel, a model of width 2."""
    n = len(mass)
    return Held(
        keys=torch.zeros(1, 1, n, 2),
        values=torch.tensor(values).view(1, 1, n, 1),
        positions=torch.arange(n)[None, None],
        valid=torch.ones(1, 1, n, dtype=torch.bool),
        first=torch.zeros(1, dtype=torch.int64),
        seen=n,
        layer=0,
        layers=1,
        scaling=1.0,
        budget=torch.tensor([budget]),
        mass=torch.tensor(mass)[None, None],
        output=torch.tensor(output)[:, None],
    )


def test_scores_are_weighed_by_the_mean_norm_of_the_group() -> None:
    """Query heads map a value v to (3v, -4v) and (1v, 0): L1 norms 7 |v| and |v|, 4 |v| on average."""
    held = line([0.5, 0.2, 0.3], [1.0, -10.0, 2.0], [[3.0, -4.0], [1.0, 0.0]], budget=1)
    got = Critical(of=H2O(recent=0), first=0.0, epsilon=0.1).score(held)[0, 0]
    # The mass sums two query heads and three queries, so 0.1 of a mean probability is 0.6 of it.
    torch.testing.assert_close(got, torch.tensor([1.1 * 4, 0.8 * 40, 0.9 * 8]))


def test_half_of_the_budget_goes_by_the_score_alone() -> None:
    """Of four tokens two stay: token 0 by its score, then token 3 for its value, not token 1 for its score."""
    held = line([0.5, 0.3, 0.1, 0.1], [0.0, 1.0, 1.0, 9.0], [[1.0, 1.0], [1.0, 1.0]], budget=2)
    got = Critical(of=H2O(recent=0)).score(held)[0, 0]
    assert got.argsort(descending=True).tolist() == [0, 3, 1, 2]
    assert Critical(of=H2O(recent=0), first=1.0).score(held)[0, 0].argsort(descending=True).tolist()[:2] == [0, 1]


def test_recents_count_for_the_first_part() -> None:
    """A budget of two, half of it by the score: the one recent token fills that, so token 2 stays for its value."""
    held = line([0.9, 0.05, 0.04, 0.01], [0.1, 0.1, 99.0, 0.1], [[1.0, 0.0], [1.0, 0.0]], budget=2)
    got = Critical(of=H2O(recent=1)).score(held)[0, 0]
    assert got.argsort(descending=True).tolist()[:2] == [3, 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Scorer):
    """A score that is no probability: the mass, times a number, raised or lowered by another."""

    times: float = 1.0
    plus: float = 0.0

    @property
    def needs(self) -> Needs:
        return Needs(mass=True)

    def score(self, held: Held) -> torch.Tensor:
        assert held.mass is not None
        return held.mass * self.times + self.plus


def test_a_score_that_is_no_probability_is_weighed_alike_on_any_scale() -> None:
    """Epsilon is a fraction of what the head's scores sum to: 0.1 of 1.0, and of 1000 times as much."""
    held = line([0.5, 0.2, 0.3, 0.0], [1.0, -10.0, 2.0, 9.0], [[3.0, -4.0], [1.0, 0.0]], budget=1)
    once = Critical(of=Given(), first=0.0, epsilon=0.1).score(held)[0, 0]
    torch.testing.assert_close(once, torch.tensor([0.6 * 4, 0.3 * 40, 0.4 * 8, 0.1 * 36]))
    for given in (Given(times=1000.0), Given(times=1000.0, plus=-700.0)):
        got = Critical(of=given, first=0.0, epsilon=0.1).score(held)[0, 0]
        torch.testing.assert_close(got, 1000 * once)


def test_a_token_that_the_score_lifts_without_measure_is_no_part_of_the_scale() -> None:
    held = line([1e30, 0.2, 0.3, 0.5], [1.0, -10.0, 2.0, 9.0], [[3.0, -4.0], [1.0, 0.0]], budget=2)
    got = Critical(of=Given(), epsilon=0.1).score(held)[0, 0]
    torch.testing.assert_close(got[1:], torch.tensor([0.3 * 40, 0.4 * 8, 0.6 * 36]))


def test_scores_that_are_all_the_same_leave_it_to_the_values() -> None:
    held = line([0.0] * 4, [1.0, -10.0, 2.0, 9.0], [[3.0, -4.0], [1.0, 0.0]], budget=2)
    got = Critical(of=Given(), first=0.0).score(held)[0, 0]
    assert got.argsort(descending=True).tolist() == [1, 3, 2, 0]


def test_negative_scores_are_raised_before_they_are_weighed() -> None:
    """Key norms are scores below zero: without raising them a long value would count against its token."""
    generator = torch.Generator().manual_seed(0)
    held = held_of([make_row(20, heads=2, group=2, size=8, generator=generator)], Needs(output=True))
    values = held.values.clone()
    values[:, :, 7] *= 1e9
    louder = dataclasses.replace(held, values=values)
    assert (Critical(of=Shortest(), first=0.0).score(louder).argmax(-1) == 7).all()


def test_it_hands_on_what_the_inner_score_declares() -> None:
    outer = Critical(of=SnapKV(window=5))
    assert outer.needs == Needs(window=5, output=True) and outer.recent == 5 and outer.slack is None
    assert Critical(of=Position()).slack == Position().slack


def test_it_refuses_what_makes_no_sense() -> None:
    for wrong in ({"first": 1.5}, {"epsilon": -1.0}):
        with pytest.raises(ValueError, match="critical: "):
            Critical(of=H2O(), **wrong)
    row = make_row(9, heads=2, group=1, size=8, generator=torch.Generator())
    with pytest.raises(ValueError, match="output"):
        Critical(of=Position()).score(held_of([row], Needs()))


def test_an_inner_score_that_looks_back_is_not_shown_the_outer_one() -> None:
    assert ATSKV().needs.previous and not Critical(of=ATSKV()).needs.previous
