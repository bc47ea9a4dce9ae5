"""Several questions on one context: on the dummy, whose right answers are known, and on the embedded model."""

from __future__ import annotations

import pytest
import torch
from tests.support.bench.dummy import FULL, DummyCache, RecallModel, contestant, subject

from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.ask import Ask
from kvtailor.errors import ArgumentError, KvtailorError


def test_facts_that_were_dropped_are_wrong_and_the_worst_answer_says_so() -> None:
    task = Ask(length=900, questions=3, documents=4)
    records = run(subject(RecallModel(), cut=DummyCache(keep=420)), [FULL, contestant("cut")], [task], bandwidth=False)
    full, cut = (record.metrics for record in records)
    assert full["accuracy"] == full["worst"] == full["accuracy_0"] == full["accuracy_2"] == 1
    assert cut["accuracy_2"] == 1 and cut["accuracy_0"] == 0
    assert 0 < cut["accuracy"] < 1 and cut["worst"] == 0
    values = records[1].values
    assert cut["accuracy"] == pytest.approx(sum(values["right"]) / 4)
    assert all(worst >= mean for worst, mean in zip(values["worst_nll"], values["nll"], strict=True))
    assert cut["worst_nll"] > cut["answer_nll"] > full["answer_nll"]


def test_no_answer_depends_on_the_question_before() -> None:
    """Each question alone finds what it finds among the others: it is asked on a copy."""
    task = Ask(length=900, questions=3, documents=2)
    given = subject(RecallModel(), cut=DummyCache(keep=420))
    (sample,) = task.samples(given, [])
    together = task.score(given, contestant("cut"), sample, lambda: None)
    alone = [
        task.score(
            given,
            contestant("cut"),
            type(sample)(data=[asked[place : place + 1] for asked in sample.data]),
            lambda: None,
        )
        for place in range(3)
    ]
    for place in range(3):
        assert alone[place].metrics["accuracy"] == together.metrics[f"accuracy_{place}"]
    nll = [[each.values["nll"][number] for each in alone] for number in range(2)]
    assert together.values["nll"] == pytest.approx([sum(each) / 3 for each in nll])
    assert together.values["worst_nll"] == pytest.approx([max(each) for each in nll])


def test_the_embedded_model_answers_from_codes_and_not_from_a_window() -> None:
    given = Subject.load("demo", dtype="float32")
    task = Ask(length=256, questions=2, documents=2)
    records = run(given, contestants_of(["kivi(bits=8)", "streaming @ tokens=40"]), [task], bandwidth=False)
    full, codes, window = (record.metrics for record in records)
    assert codes["answer_nll"] == pytest.approx(full["answer_nll"], abs=0.05)
    assert window["worst_nll"] > full["worst_nll"] + 1 and window["worst"] == 0
    assert records[2].tokens_held is not None and records[2].tokens_held <= 72
    assert torch.isfinite(torch.tensor(records[2].values["worst_nll"])).all()


def test_refuses_what_cannot_be_asked() -> None:
    with pytest.raises(ArgumentError, match="questions is 0: "):
        Ask(questions=0)
    given = Subject.load("demo", dtype="float32")
    with pytest.raises(KvtailorError, match="positions"):
        list(Ask(length=5000).samples(given, []))
