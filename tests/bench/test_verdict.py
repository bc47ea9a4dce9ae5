"""The sentence above the table: an equivalence test, never a dominated plan, and no verdict from too few windows."""

from __future__ import annotations

import random
import re

import pytest
from tests.bench.test_report import needles, scored

from kvtailor.bench.report import summarise

WINDOWS = 50
HARD = [2.0 + 0.01 * (i % 7) for i in range(WINDOWS)]


def plan(label, losses, size=250):
    """A plan that loses so much on each window, in nats."""
    return scored(label, [a + b for a, b in zip(HARD, losses, strict=False)], size=size)


def around(middle, spread, count=WINDOWS):
    """Losses with exactly this mean, evenly spread."""
    return [middle + spread * (2 * i / (count - 1) - 1) for i in range(count)]


FULL = scored("full", HARD, held=100, size=1000)


def test_a_plan_that_another_beats_in_bytes_and_in_loss_is_never_recommended():
    streaming = plan("streaming", around(0.004, 0.004), size=250)
    snapkv = plan("snapkv", around(0.009, 0.05), size=320)
    said = summarise([FULL, snapkv, streaming]).headline
    assert said.startswith("streaming loses less than 0.02 nats per token here at 25 % of the bytes")


def test_a_plan_that_is_shown_is_not_recommended_where_a_better_one_is_not_shown():
    noisy = plan("noisy", around(0.001, 0.25), size=250)
    dear = plan("dear", around(0.005, 0.002), size=320)
    said = summarise([FULL, dear, noisy]).headline
    assert said.startswith("No plan is recommended: dear loses less than 0.02 nats per token at 32 % of the bytes")
    assert "noisy" in said and re.search(r"\d+ windows", said)


def test_noisier_data_makes_no_better_headline():
    quiet, noisy = plan("quiet", around(0.05, 0.01)), plan("noisy", around(0.05, 0.6))
    assert summarise([FULL, quiet]).headline.startswith("Every plan here that saves bytes loses more than 0.02 nats")
    said = summarise([FULL, noisy]).headline
    assert said.startswith("No verdict") and "this run has 50" in said
    needed = int(re.search(r"about ([\d,]+) windows", said)[1].replace(",", ""))
    assert 700 < needed < 1100  # (1.68 * 0.352 / 0.02)^2 = 874


@pytest.mark.parametrize("count", [5, 12, 28])
def test_too_few_windows_give_no_verdict_however_quiet_they_are(count):
    full, same = (scored(label, [1.0 + 1e-6 * i * (label == "same") for i in range(count)], size=size)
                  for label, size in (("full", 1000), ("same", 250)))  # fmt: skip
    said = summarise([full, same]).headline
    assert said.startswith("No verdict") and "29 windows" in said and f"this run has {count}" in said


def test_answers_without_a_lost_one_do_not_show_that_none_would_be_lost():
    few = [FULL, plan("same", around(0.0, 0.01)), needles("full", [1] * 12), needles("same", [1] * 12)]
    said = summarise(few).headline
    assert said.startswith("No verdict") and "25 answers" in said and "this run has 12" in said
    assert "On the text alone, same loses less than 0.02 nats per token at 25 % of the bytes" in said
    many = [FULL, plan("same", around(0.0, 0.01)), needles("full", [1] * 30), needles("same", [1] * 30)]
    said = summarise(many).headline
    assert said.startswith("same loses less than 0.02 nats per token and 10 points of right answers here at 25 %")


def errs(draw, runs, windows, plans, seed, margin=0.02):
    """Share of runs whose headline names one of several plans that all lose twice the margin."""
    chance = random.Random(seed)
    wrong = 0
    for _ in range(runs):
        found = [FULL_OF[windows]] + [
            scored(f"p{k}", [2.0 + x for x in draw(chance, 2 * margin, windows)], size=250 + k) for k in range(plans)
        ]
        said = summarise(found).headline
        wrong += not said.startswith(("No verdict", "Every plan", "No plan"))
    return wrong / runs


FULL_OF = {n: scored("full", [2.0] * n, held=100, size=1000) for n in (5, 12, 20, 50)}


def normal(chance, mean, count):
    return [chance.gauss(mean, 0.06) for _ in range(count)]


@pytest.mark.parametrize("windows", [12, 50])
def test_a_headline_rarely_errs(windows):
    assert errs(normal, 10, windows, 4, seed=windows) == 0
