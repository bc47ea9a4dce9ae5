"""Windows and documents that two runs have both chosen count once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.bench.report.test_report import BASE, FULL, SAME, needles, scored

from kvtailor.bench.choices import one_choice
from kvtailor.bench.recorded_losses import recorded_loss
from kvtailor.bench.report import summarise
from kvtailor.plan import Plan


def again(record, run="later", day=3, **fields):
    """The record of a run that chose anew."""
    return replace(record, run=run, started=f"2026-01-0{day}T00:00:00.000+00:00", text_hash=run, **fields)


def of_labels(records):
    return [(each.label, each.text_hash, each.run) for each in records]


def test_answers_of_two_runs_that_share_documents_count_once():
    """Five right answers, of which one was asked before, made a verdict that wants 25 answers."""
    first = [needles(label, [1] * 20) for label in ("full", "kivi4")]
    second = [again(needles(each.label, [1] * 5)) for each in first]
    rows = {row.label: row for row in summarise([*first, *second]).rows}
    assert rows["kivi4"].accuracy.count == 20
    kept, said = one_choice([*second, *first])
    assert of_labels(kept) == of_labels(first)
    [sentence] = said
    assert "2 records of run later are left out. Measure" in sentence and "--leave-out run=NAME" in sentence


def test_windows_of_two_runs_count_once_and_are_one_document():
    more = [again(each, samples=each.samples) for each in (FULL, SAME)]
    row = next(row for row in summarise([FULL, SAME, *more]).rows if row.label == "same")
    assert row.loss.count == len(BASE)


@pytest.mark.parametrize("turned", [False, True])
def test_the_choice_of_most_plans_stays_then_of_most_samples_then_the_newest(turned):
    def chosen(*records):
        kept, said = one_choice(records[::-1] if turned else records)
        return {each.text_hash for each in kept}, said

    two = [again(each, run="two") for each in (FULL, SAME)]
    alone = again(replace(SAME, label="alone", plan="alone", plan_hash="#alone"), day=4, samples=900)
    hashes, said = chosen(*two, alone)
    assert hashes == {"two"} and "and with them alone." in said[0]
    assert chosen(*two, *(again(each, day=4, samples=900) for each in (FULL, SAME)))[0] == {"later"}
    assert chosen(*two, *(again(each, day=1, samples=each.samples) for each in (FULL, SAME)))[0] == {"two"}
    assert chosen(*two, *(again(each, day=4, samples=each.samples) for each in (FULL, SAME)))[0] == {"later"}


def test_what_is_no_choice_anew_stays():
    """Samples of one run, a plan that was added on the same tokens, other texts and points, models, and failures."""
    own = [replace(FULL, text_hash=each) for each in "ab"]
    added = again(replace(SAME, label="added", plan_hash="#added"))
    added = replace(added, text_hash=FULL.text_hash)
    failed = again(replace(FULL, error="no memory", values={}, metrics={}))
    other = [
        again(FULL, run="other", **fields)
        for fields in ({"text": "b"}, {"point": {"context": 7}}, {"model": "another"})
    ]
    every = [*own, FULL, added, failed, *other, replace(again(FULL), asked="another")]
    assert one_choice(every) == (every, [])


def test_a_second_choice_of_other_windows_leaves_the_loss_as_it_was():
    """It made the interval narrower than that of all windows of the text."""
    more = [again(scored(label, BASE[:4])) for label in ("full", "same")]
    alone, both = (summarise(each) for each in ([FULL, SAME], [FULL, SAME, *more]))
    assert [row.loss for row in both.rows] == [row.loss for row in alone.rows]


def test_a_plan_that_another_choice_alone_has_keeps_its_recorded_loss():
    """Which choice stands for a card or an export is for the plan that was asked for, not for all that are there."""
    plan = Plan.parse("vector(bits=4)")
    asked = replace(SAME, label=str(plan), plan=str(plan), plan_hash=plan.hash)
    more = [again(each) for each in (FULL, asked)]
    loss = recorded_loss(plan, [FULL, SAME, *(replace(SAME, plan_hash=each) for each in "ab"), *more])
    assert loss is not None and loss.count == len(BASE)
