"""The controller and what it predicts with."""

from __future__ import annotations

import pytest

from kvtailor.speculate.contract import RunCosts
from kvtailor.speculate.lookahead import Adaptive, Controller, Fixed


def test_gain_by_hand() -> None:
    """a = 1/2, k = 2: 1 + 1/2 + 1/4 tokens for two drafts at 1 and a verification at 5, against 4 for a plain one."""
    measured = RunCosts(plain=4.0, draft=1.0, verify=5.0, verified=2.0, acceptance=0.5)
    assert measured.gain(2) == pytest.approx(1.75 * 4 / 7)
    # One draft is verified at 4.5: half of what two add.
    assert measured.gain(1) == pytest.approx(1.5 * 4 / 5.5)
    assert RunCosts(plain=4.0, draft=1.0, acceptance=0.5).gain(2) is None


def test_adaptive_takes_the_best_of_all_lengths() -> None:
    good = RunCosts(plain=10.0, draft=0.1, verify=10.0, verified=4.0, acceptance=0.99)
    poor = RunCosts(plain=10.0, draft=5.0, verify=10.0, verified=4.0, acceptance=0.3)
    assert Adaptive().length(good) == 16 and Adaptive().length(poor) == 1
    assert Adaptive(first=3).length(RunCosts()) == 3
    middle = RunCosts(plain=10.0, draft=2.0, verify=11.0, verified=4.0, acceptance=0.8)
    gains = {k: middle.gain(k) for k in range(1, 17)}
    assert Adaptive().length(middle) == max(gains, key=gains.get) not in (1, 16)


def steps(controller: Controller, count: int, *, draft: float, accepted: float) -> list[int]:
    """What it asks for in so many steps, where a plain token takes 10, and a verification 11."""
    asked = []
    for _ in range(count):
        asked.append(controller.length())
        if asked[-1]:
            controller.round_took(asked[-1], draft * asked[-1], 11.0, accepted, min(accepted + 1, asked[-1]))
        else:
            controller.plain_took(10.0)
    return asked


def test_it_speculates_where_that_pays_and_goes_on_timing_plain_tokens() -> None:
    asked = steps(Controller(Fixed(tokens=4), 1.05), 100, draft=1.0, accepted=3)
    assert asked[:3] == [0, 0, 0] and asked[3:35] == [4] * 32 and asked[35] == 0
    assert asked.count(0) == 3 + 2


def test_it_falls_back_where_that_does_not_pay_and_tries_again_less_and_less_often() -> None:
    asked = steps(Controller(Fixed(tokens=4), 1.05), 600, draft=8.0, accepted=1)
    assert asked[:8] == [0, 0, 0, 4, 4, 4, 0, 0]
    assert asked.count(4) < 20
    runs = [len(run) for run in "".join(str(each) for each in asked).split("4") if run]
    assert runs[1:5] == [16, 32, 64, 128]


def test_it_resumes_when_drafts_become_good() -> None:
    controller = Controller(Fixed(tokens=4), 1.05)
    assert steps(controller, 60, draft=8.0, accepted=1).count(4) < 12
    late = steps(controller, 200, draft=0.5, accepted=4)
    assert late[-40:].count(4) > 35


def test_without_a_least_gain_it_always_speculates() -> None:
    asked = steps(Controller(Fixed(tokens=2), None), 20, draft=50.0, accepted=0)
    assert asked == [2] * 20


def test_refuses_lengths_that_draft_nothing() -> None:
    with pytest.raises(ValueError, match="gamma must be at least 1 drafted token, found 0"):
        Fixed(tokens=0)
    with pytest.raises(ValueError, match="first=5, most=4"):
        Adaptive(first=5, most=4)
