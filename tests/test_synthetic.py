"""Generated documents: determinism, disjoint splits, where the fact stands, lengths, and refusals in one sentence."""

import pytest

from kvtailor.bench.synthetic import SPLITS, TASKS, make_document


@pytest.mark.parametrize("task", TASKS)
def test_a_document_is_a_function_of_its_arguments(task):
    first, again, other = (make_document(task, state=state, length=1500, depth=0.3) for state in (5, 5, 6))
    assert first == again
    assert first.prompt != other.prompt and first.answer != other.answer


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_asked_fact_stands_where_depth_says(task, depth):
    document = make_document(task, state=11, length=6000, depth=depth)
    fact, at = document.meta["fact"], document.meta["fact_at"]
    assert document.context[at : at + len(fact)] == fact
    assert document.context.count(fact) == 1
    value = document.answer.split(" = ")[-1] if task == "variables" else document.answer
    assert value in fact
    tolerance = 0.3 if task == "variables" else 0.05 if task not in ("characters",) else 0.12
    assert document.meta["depth_found"] == pytest.approx(depth, abs=tolerance)


@pytest.mark.parametrize("task", TASKS)
def test_question_ends_before_the_answer_and_answer_carries_the_space(task):
    document = make_document(task, state=2, length=1500)
    assert document.prompt == document.context + document.question
    assert not document.question.endswith(" ") and document.answer.startswith(" ")
    assert document.answer not in document.question


@pytest.mark.parametrize("task", TASKS)
def test_length_is_reached_and_not_exceeded(task):
    in_characters = make_document(task, state=3, length=3000)
    assert 2850 <= len(in_characters.prompt) <= 3000

    def count_words(text):
        return len(text.split())

    in_words = make_document(task, state=3, length=400, count_tokens=count_words)
    assert 370 <= count_words(in_words.prompt) <= 400


def test_supplied_filler_is_used_in_its_own_order():
    sentences = [f"Sentence {letter * 12} has no number." for letter in "abcdefgh"]
    document = make_document("needle", state=1, length=700, filler=sentences)
    used = [part for part in document.context.split(". ") if part.startswith("Sentence")]
    letters = "".join(part[9] for part in used)
    assert len(letters) > 5 and letters in "abcdefgh" * 3


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_checked(task):
    ranges = list(SPLITS.values())
    for i, one in enumerate(ranges):
        for another in ranges[i + 1 :]:
            assert one.stop <= another.start or another.stop <= one.start
    for split, states in SPLITS.items():
        make_document(task, state=states.start, split=split, length=1500)
        with pytest.raises(ValueError, match=f"split {split!r}, whose states are {states.start} to"):
            make_document(task, state=states.stop, split=split, length=1500)


def test_instances_of_different_states_do_not_repeat():
    answers = {make_document("needle", state=state, length=600).meta["fact"] for state in range(200)}
    assert len(answers) == 200


def test_options_reach_the_tasks():
    many = make_document("key_value", state=0, length=4000, records=16, prose=True)
    assert many.meta["records"] == 16 and many.context.count(":") == 16
    assert len(make_document("passkey", state=0, length=600, digits=9).answer) == 10
    walk = make_document("variables", state=0, length=1500, hops=3).answer
    assert walk.count("=") == 3 and walk.rsplit(" ", 1)[1].isdigit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "needel", "state": 0, "length": 500}, "did you mean 'needle'"),
        ({"task": "needle", "state": 0, "length": 500, "split": "test"}, "asked for split 'test'"),
        ({"task": "needle", "state": 0, "length": 500, "depth": 1.5}, "depth 1.5"),
        ({"task": "needle", "state": 0, "length": 40}, "ask for at least that"),
        ({"task": "key_value", "state": 0, "length": 20}, "ask for at least that"),
        ({"task": "needle", "state": 0, "length": 500, "records": 3}, "unexpected keyword argument 'records'"),
        ({"task": "needle", "state": 0, "length": 500, "filler": []}, "filler without any sentence"),
        ({"task": "copy_span", "state": 0, "length": 500, "cue": 12}, "cue of 12 words"),
    ],
)
def test_bad_arguments_say_what_was_found_and_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_document(arguments.pop("task"), **arguments)
