"""What sanity checks do not do: accuse without need, or keep quiet about what was allowed."""

import random
from dataclasses import replace

import pytest
from tests.support.bench.dummy import DummyCache, UniformModel
from tests.support.bench.frauds import answers, bench, letters, record, task, timed
from tests.support.bench.suite_case import VERSIONS

from kvtailor.bench import runner
from kvtailor.bench.checks import CHECKS, MAY_BE_ALLOWED, Fraud, check_records, findings, warnings_of
from kvtailor.bench.measure import machine
from kvtailor.bench.schema import latest, read_records
from kvtailor.errors import KvtailorError, UnknownName


@pytest.mark.parametrize("commit", ["abc", "abc-dirty"])
def test_what_was_allowed_passes_and_is_said(tmp_path, monkeypatch, commit):
    """Also where the records of the refused run are there, and are not measured again."""
    monkeypatch.setattr(
        machine,
        "versions",
        lambda: {**VERSIONS, "commit": commit},
    )
    names = iter(["aaaa", "bbbb", "cccc"])
    monkeypatch.setattr(runner.secrets, "token_hex", lambda size: next(names))
    windows = [letters(200, "abcdefgh", i) + letters(40, "uvwxyz", 100 + i) for i in range(8)]
    asked = {"caches": {"one": DummyCache(keep=5)}, "tasks": [task(text="".join(windows))], "out": tmp_path}
    with pytest.raises(Fraud, match="better than full"):
        bench(**asked)
    records = bench(**asked, allow=["better than full"])
    assert all(r.notes == ("Allowed by the user: better than full.",) for r in records)
    [said] = warnings_of(records)
    assert said.startswith("Allowed, and found: better than full: plan 'one' holds less")
    assert {r.run[-4:] for r in records} == ({"bbbb"} if "dirty" in commit else {"aaaa"})
    check_records(latest(read_records(tmp_path)))
    with pytest.raises(Fraud, match="better than full"):
        bench(**asked)


def test_only_known_and_harmless_names_are_allowed():
    with pytest.raises(UnknownName, match="did you mean 'better than full'"):
        bench(allow=["better then full"])
    with pytest.raises(KvtailorError, match="asked to allow the sanity check 'identity'"):
        bench(allow=["identity"])
    assert CHECKS[8:] == MAY_BE_ALLOWED and MAY_BE_ALLOWED[0] == "same results on other data"


@pytest.mark.always
def test_two_plans_that_did_the_same_are_named_and_not_accused():
    records = bench({"one": DummyCache(keep=20), "other": DummyCache(keep=20), "third": DummyCache(keep=9)})
    [said] = warnings_of(records)
    assert said.startswith("one and other did exactly the same in perplexity")


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        # As two scores whose window is all that the budget holds: only what is not read differs.
        ({"tail": 110, "observe": 50, "attend": 5}, []),
        ({"tail": 60, "encode": 50}, ["equal results"]),
    ],
)
def test_equal_results_are_of_what_is_read(stages, names):
    plans = {"one": {"tail": 100}, "other": stages}
    records = [
        record(
            label,
            "perplexity",
            values={"nll": (1.0, 2.0)},
            text_hash="h",
            tokens_held=15.0,
            tokens_seen=512,
            bytes_held=sum(by_stage.values()),
            bytes_full=4000,
            bytes_by_stage=by_stage,
        )
        for label, by_stage in plans.items()
    ]
    assert [each.name for each in findings(records)] == names


@pytest.mark.parametrize(
    ("tokens", "bytes_held", "observed", "names"),
    [(50, 100, 0, ["nothing freed"]), (50, 110, 10, ["nothing freed"]), (50, 109, 10, []), (51, 100, 0, [])],
)
def test_half_of_the_tokens_in_as_many_bytes_as_all_are_not_dropped(tokens, bytes_held, observed, names):
    one = record("a", "memory", tokens_held=float(tokens), tokens_seen=100, bytes_held=bytes_held, bytes_full=100)
    one = replace(one, bytes_by_stage={"observe": observed, "encode": bytes_held - observed})
    assert [each.name for each in findings([one])] == names


@pytest.mark.parametrize(("form", "names"), [(20, []), (19, ["nominal bytes"]), (21, ["nominal bytes"])])
def test_bytes_are_those_of_arithmetic_and_neither_more_nor_less(form, names):
    one = record("a", "memory", bytes_held=20, bytes_full=50, bytes_closed_form=form)
    assert [each.name for each in findings([one])] == names


def test_equal_peaks_of_unequal_plans_are_said():
    def held(label, size, peak=100):
        return record(label, "memory", bytes_held=size, bytes_full=50, bytes_peak=peak)

    assert warnings_of([held("a", 50), held("b", 20)]) == []
    [said] = warnings_of([held("a", 50), held("b", 20), held("c", 30)])
    assert said.startswith("a, b, c peak at the same 100 bytes")
    assert warnings_of([held("a", 50), held("b", 20), held("c", 30, 101)]) == []


def test_what_slows_every_side_is_said_and_not_called_a_fraud():
    slower = [1.0] * 7 + [1.6] * 7
    records = timed(sides=3, a=slower, b=slower, c=slower)
    check_records(records)
    said = warnings_of(records)
    assert len(said) == 2 and all("of all sides rose by a factor of 1." in each for each in said)
    [said] = warnings_of(timed(a=[1.0] * 9))
    assert said.startswith("Times of 9 undisturbed rounds")


def test_disturbed_rounds_and_one_slow_round_accuse_nobody():
    late = timed(one=[1.0] * 6 + [2.0] * 6)
    disturbed = (0.0,) * 6 + (1.0,) * 6
    check_records([replace(r, values={**r.values, "disturbed": disturbed}) if r.label == "one" else r for r in late])
    check_records(timed(one=[1.0] * 11 + [5.0]))
    check_records(timed(one=[2.0] + [1.0] * 11))
    with pytest.raises(Fraud, match="throttled side.*'one'"):
        check_records(late)


@pytest.mark.parametrize("sides", [2, 3, 5])
def test_only_the_side_that_changed_is_accused(sides):
    for factors in ([1.0] * 7 + [1.5] * 6, [1.5] * 6 + [1.0] * 7):
        found = list(findings(timed(one=factors, sides=sides)))
        assert len(found) == 2 and {each.records[0].label for each in found} == {"one"}


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_noise_is_hardly_ever_called_a_cold_or_throttled_side(noise):
    accused = sum(any(True for _ in findings(timed(sides=6, state=i, noise=noise, side=[1.0] * 10))) for i in range(60))
    assert accused == 0


@pytest.mark.always
def test_chance_is_hardly_ever_called_better_than_full():
    """300 runs of 12 plans that do not differ from full: 0.3 alarms are expected at the stated level."""
    draw, alarms = random.Random(3), 0
    for _ in range(300):
        base = [draw.gauss(3, 0.4) for _ in range(12)]
        records = answers(base, base, "nll", "perplexity")[:1]
        for plan in range(12):
            one = answers(base, [x + draw.gauss(0, 0.05) for x in base], "nll", "perplexity")[1]
            records.append(replace(one, label=f"{plan}", plan=f"{plan}", plan_hash=f"{plan}"))
        alarms += any(True for _ in findings(records))
    assert alarms <= 2


def test_a_gain_too_small_to_matter_is_no_fraud():
    base = [3.0 + 0.1 * i for i in range(12)]
    check_records(answers(base, [x - 0.004 - 1e-5 * i for i, x in enumerate(base)], "nll", "perplexity"))
    with pytest.raises(Fraud, match="better than full.*by 0.010 nats"):
        check_records(answers(base, [x - 0.010 - 1e-5 * i for i, x in enumerate(base)], "nll", "perplexity"))
    check_records(answers(base, [x - 9 for x in base], "nll", "needle"))
    check_records(answers([0.0] * 9 + [1.0] * 9, [1.0] * 9 + [1.0] * 9))
    check_records(answers(base[:4], [x - 1 - 0.01 * i for i, x in enumerate(base[:4])], "nll", "perplexity"))


def test_uniform_logits_hide_nothing_from_the_checks():
    with pytest.raises(Fraud, match="untouched cache"):
        bench({"one": DummyCache(keep=20)}, model=UniformModel())


def test_a_sweep_over_batch_and_context_is_no_constant():
    """Two rows of 512 tokens take what one row of 1,024 takes."""
    sizes = {"bytes_held": 540_672, "bytes_full": 524_288}
    one = record("full", "memory", tokens_held=1024.0, tokens_seen=1024, point={"context": 1024, "batch": 1}, **sizes)
    two = record("full", "memory", tokens_held=512.0, tokens_seen=512, point={"context": 512, "batch": 2}, **sizes)
    check_records([one, two])


def test_an_observation_window_is_not_what_a_mask_hides():
    stages = {"tail": 26_928, "observe": 57_856}
    given = {"tokens_held": 51.0, "tokens_seen": 128, "bytes_full": 65_536, "bytes_by_stage": stages}
    check_records([record("snapkv", "needle", bytes_held=84_784, **given)])
    with pytest.raises(Fraud, match="nothing freed"):
        check_records([record("masked", "needle", bytes_held=84_784, **{**given, "bytes_by_stage": {"tail": 84_784}})])


def test_where_lower_is_better_a_plan_that_is_lower_beats_full():
    note = ("Of likelihood_diff,none lower is better.",)
    common = {"text_hash": "t", "tokens_seen": 100, "bytes_full": 800, "notes": note, "point": {"task": "pairs"}}
    full = record("full", "harness", values={"score": (3.0,) * 30}, tokens_held=100.0, bytes_held=800, **common)
    for scores, better in ((2.9, True), (3.1, False)):
        plan = record("snapkv", "harness", values={"score": (scores,) * 30}, tokens_held=25.0, bytes_held=200, **common)
        assert any(found.name == "better than full" for found in findings([full, plan])) is better
