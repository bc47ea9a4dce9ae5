"""What a user asks: units, contradictions, and what is made small."""

import pytest

from kvtailor.fitting.question import Question, QuestionError, memory_of, seconds_of

ONE = {"full": 1_000_000, "context": 2048}


@pytest.mark.parametrize(
    "given, size",
    [
        ({"memory": "2KiB"}, 2048),
        ({"memory": 5000}, 5000),
        ({"memory": "25%"}, 250_000),
        ({"keep_bytes": 0.25}, 250_000),
        ({"keep_bytes": "12.5%"}, 125_000),
        ({"bytes_per_token": 100}, 204_800),
    ],
)
def test_every_unit_of_memory_is_bytes(given, size):
    assert Question.of(**ONE, **given).memory == size


def test_bytes_of_a_token_count_for_every_row():
    assert Question.of(full=10**6, context=100, batch=4, bytes_per_token=10).memory == 4000


@pytest.mark.parametrize(
    "given, aim",
    [
        ({"memory": 10**5}, "loss"),
        ({"memory": 10**5, "tpot": "3ms"}, "loss"),
        ({"loss": 0.01}, "bytes"),
        ({"points": 5}, "bytes"),
        ({"loss": 0.01, "tpot": 0.01}, "bytes"),
        ({"memory": 10**5, "loss": 0.01}, "time"),
        ({"memory": 10**5, "loss": 0.01, "tpot": 0.01}, "loss"),
    ],
)
def test_what_has_no_limit_is_made_small(given, aim):
    assert Question.of(**ONE, **given).aim == aim


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "there is no limit"),
        ({"tpot": "3ms"}, "limit on time alone"),
        ({"memory": "2GiB", "keep_bytes": 0.25}, "several units"),
        ({"memory": "much"}, "not a size"),
        ({"keep_bytes": 25}, "at most 1"),
        ({"keep_bytes": "250%"}, "at most 1"),
        ({"memory": -1}, "above 0"),
        ({"memory": float("nan")}, "above 0"),
        ({"memory": True}, "above 0"),
        ({"loss": 0}, "loss is 0"),
        ({"loss": float("inf")}, "loss is inf"),
        ({"points": -2}, "points is -2"),
        ({"tpot": "fast", "memory": 1}, "tpot is 'fast'"),
        ({"tpot": 0, "memory": 1}, "tpot is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(QuestionError, match=words):
        Question.of(**ONE, **given)


def test_all_faults_come_together():
    with pytest.raises(QuestionError) as error:
        Question.of(full=1, context=0, batch=0, memory="2GiB", keep_bytes=0.5, loss=-1, tpot="x")
    assert len(error.value.faults) == 5


def test_a_question_survives_json():
    question = Question.of(**ONE, memory="25%", loss=0.01)
    assert Question.from_dict(question.as_dict()) == question


def test_units_of_time():
    assert [seconds_of(each) for each in ("12ms", "0.5s", "80us", 2)] == pytest.approx([0.012, 0.5, 8e-5, 2.0])


def test_a_share_of_nothing_is_still_a_byte():
    assert memory_of("keep_bytes", 0.001, full=10, tokens=1) == 1
