"""The rule that names a plan, on numbers whose answer is known."""

import random
from types import SimpleNamespace

import pytest
from tests.support.bench.frauds import record

from kvtailor.bench.stages import Silent
from kvtailor.errors import KvtailorError
from kvtailor.fitting import stages
from kvtailor.fitting.effort import EFFORTS
from kvtailor.fitting.verdict import Family, Judged, verdict

WINDOWS = 200


def plan(label, loss, *, size=100, noise=0.02, right=20, origin="layers", methods=1, state=0, windows=WINDOWS, **more):
    """A plan that loses so much on average; its windows scatter around the full cache's with `noise`."""
    draw = random.Random(f"{label}{state}")
    base = random.Random("windows")
    full = tuple(base.gauss(3, 0.5) for _ in range(windows))
    drawn = [draw.gauss(0, noise) for _ in range(windows)]
    middle = sum(drawn) / windows
    nll = tuple(value + loss + each - middle for value, each in zip(full, drawn, strict=True))
    family = Family(name="needle", seen=False, hits=(1.0,) * right + (0.0,) * (20 - right), full=(1.0,) * 20)
    return Judged(
        label=label,
        plan=label,
        origin=origin,
        bytes=size,
        nll=nll,
        full=full,
        families=(family,),
        methods=methods,
        **more,
    )


def test_the_least_loss_is_named_where_it_is_told():
    found = verdict([plan("a", 0.01), plan("b", 0.05, origin="preset"), plan("c", 0.08)])
    assert found.chosen.label == "a"
    assert found.told == {"b": "better", "c": "better"}
    assert "less than the best preset, b" in found.sentence and found.needed is None


def test_of_plans_that_cannot_be_told_apart_fewer_bytes_win():
    found = verdict([plan("a", 0.010, size=100), plan("b", 0.0105, size=80), plan("c", 0.05, size=10)])
    assert found.chosen.label == "b" and found.told["a"] == "not told apart"


def test_of_equal_bytes_the_simpler_plan_wins():
    found = verdict([plan("a", 0.010, methods=4), plan("b", 0.0105, methods=1, size=100)])
    assert found.chosen.label == "b"


def test_an_interval_that_reaches_far_is_no_tie():
    """Noise must not let a worse plan with fewer bytes win: its interval may hold 0 and still reach past the tie."""
    found = verdict(
        [plan("a", 0.0), plan("b", 0.02, size=50, noise=0.3, windows=40)][:1] + [plan("b", 0.012, size=50, noise=0.15)]
    )
    apart = found.against["b"]
    assert found.told["b"] == "not told apart" and apart.low < 0 < apart.high
    assert found.chosen.label == "a"


def test_a_plan_that_loses_answers_beyond_chance_is_out():
    found = verdict([plan("a", 0.01, right=13), plan("b", 0.03, right=20)])
    assert found.chosen.label == "b" and found.told["a"] == "worse"


def test_one_answer_is_no_reason_for_a_far_larger_loss():
    assert verdict([plan("a", 0.01, right=19), plan("b", 0.12, right=20)]).chosen.label == "a"


def test_answers_that_become_unlikely_count_before_one_is_lost():
    from dataclasses import replace

    def unsure(made, nats):
        family = replace(made.families[0], nll=tuple(nats + 0.01 * n for n in range(20)))
        return replace(made, families=(family,))

    sure, shaky = unsure(plan("a", 0.02), 0.01), unsure(plan("b", 0.01, size=50), 0.3)
    assert verdict([sure, shaky]).chosen.label == "a"
    assert verdict([unsure(plan("a", 0.02), 0.3), unsure(plan("b", 0.01), 0.3)]).chosen.label == "b"


def test_a_family_that_the_full_cache_cannot_do_says_nothing():
    hard = Family(name="hard", seen=False, hits=(0.0,) * 20, full=(1.0,) + (0.0,) * 19)
    easy = Family(name="hard", seen=False, hits=(1.0,) + (0.0,) * 19, full=(1.0,) + (0.0,) * 19)
    from dataclasses import replace

    one, other = plan("a", 0.01), plan("b", 0.03)
    one = replace(one, families=(*one.families, hard))
    other = replace(other, families=(*other.families, easy))
    assert verdict([one, other]).chosen.label == "a"


def test_a_dominated_plan_is_never_named():
    draw = random.Random(0)
    for state in range(10):
        plans = [
            plan(
                f"p{n}",
                draw.uniform(0, 0.06),
                size=draw.randrange(50, 100),
                right=draw.choice([20, 20, 19]),
                noise=draw.choice([0.01, 0.1]),
                state=state,
            )
            for n in range(5)
        ]
        chosen = verdict(plans).chosen
        for other in plans:
            apart = chosen.against(other)
            dominated = other.bytes < chosen.bytes and apart.low > 0 and other.right >= chosen.right
            assert not dominated, (chosen.label, other.label)


def test_the_windows_that_would_tell_are_named():
    found = verdict(
        [plan("a", 0.0010, noise=0.05, methods=1), plan("b", 0.0020, noise=0.05, origin="preset", methods=9)]
    )
    assert found.told["b"] == "not told apart"
    assert found.needed > WINDOWS and f"about {found.needed} windows would be needed" in found.sentence


def test_a_limit_on_the_loss_is_held_against_the_upper_end():
    plans = [plan("a", 0.009, size=50, noise=0.1), plan("b", 0.005, size=80, noise=0.01)]
    assert verdict(plans, aim="bytes", loss=0.01).chosen.label == "b"
    with pytest.raises(KvtailorError, match="no plan is shown to lose at most 0.001"):
        verdict(plans, aim="bytes", loss=0.001)


def test_a_limit_on_answers_is_held():
    plans = [plan("a", 0.009, size=50, right=15), plan("b", 0.02, size=80, right=19)]
    assert verdict(plans, aim="bytes", points=10).chosen.label == "b"
    assert verdict(plans, aim="bytes", points=30).chosen.label == "a"
    with pytest.raises(KvtailorError, match="no plan loses at most 1 points"):
        verdict(plans, aim="bytes", points=1)


def test_the_fastest_is_named_where_time_is_made_small():
    def timed(label, loss, seconds):
        return plan(label, loss, seconds={"median": seconds, "q1": seconds, "q3": seconds, "count": 5})

    found = verdict([timed("a", 0.004, 0.02), timed("b", 0.008, 0.01), timed("c", 0.02, 0.001)], aim="time", loss=0.015)
    assert found.chosen.label == "b"


def test_plans_without_numbers_are_no_answer():
    from dataclasses import replace

    broken = replace(plan("a", 0.0), nll=(), error="it did not fit")
    assert verdict([broken, plan("b", 0.5)]).chosen.label == "b"
    with pytest.raises(KvtailorError, match="no plan could be proved: it did not fit"):
        verdict([broken])


def test_times_that_other_work_disturbed_in_every_round_are_said_to_be_none(monkeypatch):
    """Seen on SmolLM2: four minutes of rounds, and a dash for each plan without a word."""
    found = [record("kivi4", "speed", samples=0), record("nvfp4", "speed", samples=5)]
    monkeypatch.setattr(stages, "speed_task", lambda *given, **words: None)
    monkeypatch.setattr(stages, "plan_run", lambda *given: ([], 1))
    monkeypatch.setattr(stages, "run_bench", lambda *given, **words: found)
    names = ("subject", "material", "executor", "resources")
    fit = SimpleNamespace(**dict.fromkeys(names), question=SimpleNamespace(context=1, batch=1), progress=Silent())
    fit.effort = EFFORTS["quick"]
    fit.folder, fit.notes = stages.Path("there"), []
    assert stages.Fitting._times(fit, []) == found
    assert len(fit.notes) == 1 and "kivi4:" in fit.notes[0] and "nvfp4" not in fit.notes[0]
