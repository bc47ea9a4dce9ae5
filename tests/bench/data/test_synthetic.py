"""Generated documents: determinism, disjoint splits, where the fact stands, lengths, and refusals in one sentence."""

import hashlib
import json
import random
import re

import pytest

from kvtailor.bench.data.synthetic.documents import ALL_TASKS, SPLITS, TASKS, make_document
from kvtailor.bench.data.synthetic.plots import FURTHER
from kvtailor.bench.data.synthetic.word_lists import LISTS
from kvtailor.bench.data.texts import generated_text


@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_document_is_a_function_of_its_arguments(task):
    first, again, other = (make_document(task, state=state, length=1800, depth=0.3) for state in (5, 5, 6))
    assert first == again
    assert first.prompt != other.prompt and first.answer != other.answer


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_asked_fact_stands_where_depth_says(task, depth):
    document = make_document(task, state=11, length=6000, depth=depth)
    fact, at = document.meta["fact"], document.meta["fact_at"]
    assert document.context[at : at + len(fact)] == fact
    assert document.context.count(fact) == 1
    if task == "multi_value":
        assert any(part in fact for part in document.parts)
    elif task == "multi_query":
        assert document.parts[0] in fact
    else:
        value = document.answer.split(" = ")[-1] if task == "variables" else document.answer
        assert value.strip() in fact
    coarse = {"variables": 0.3, "characters": 0.12, "multi_value": 0.2, "multi_query": 0.2, "first_names": 0.1}
    tolerance = coarse.get(task, 0.05)
    assert document.meta["depth_found"] == pytest.approx(depth, abs=tolerance)


@pytest.mark.parametrize("task", ALL_TASKS)
def test_question_ends_before_the_answer_and_answer_carries_the_space(task):
    document = make_document(task, state=2, length=1500)
    assert document.prompt == document.context + document.question
    assert not document.question.endswith(" ") and document.answer.startswith(" ")
    assert document.answer not in document.question


@pytest.mark.parametrize("task", ALL_TASKS)
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


@pytest.mark.parametrize("task", ALL_TASKS)
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


@pytest.mark.parametrize("task", ALL_TASKS)
def test_parts_make_up_the_answer(task):
    document = make_document(task, state=4, length=2400)
    places = [document.answer.find(part) for part in document.parts]
    assert places and min(places) >= 0 and places == sorted(places)
    assert len(document.parts) == {"multi_value": 4, "multi_query": 4, "frequent_words": 3, "rules": 3}.get(task, 1)
    if task not in LISTS and task not in ("variables", "arithmetic"):
        assert all(part in document.context for part in document.parts)


def test_a_reworded_question_shares_no_word_with_its_fact():
    for state in range(120):
        document = make_document("reworded", state=state, length=900, depth=0.4)
        question = document.question.removeprefix("\nQuestion: ").removesuffix(" Answer:")
        of_fact, of_question = (set(re.findall(r"[a-z]+", text.lower())) for text in (document.meta["fact"], question))
        assert not of_fact & of_question and document.answer.strip().lower() in of_fact


@pytest.mark.parametrize("depth", [0.0, 0.6, 1.0])
def test_rules_stand_first_and_the_answer_keeps_them(depth):
    document = make_document("rules", state=8, length=2000, depth=depth)
    first, number, last = document.parts
    rules = f"You begin every answer with the word {first}. You end every answer with the word {last}."
    assert document.context.startswith(rules) and document.answer == f" {first} {number} {last}"
    at = document.meta["fact_at"]
    assert f" {number}." in document.context[at : at + len(document.meta["fact"])] and at > len(rules)
    assert document.meta["depth_found"] == pytest.approx(depth, abs=0.1)


def test_all_values_of_a_key_stand_in_the_order_of_the_answer():
    document = make_document("multi_value", state=9, length=3000, values=5)
    places = [document.context.index(part) for part in document.parts]
    assert len(places) == 5 and places == sorted(places)
    assert len({sentence.rsplit(" is ", 1)[0] for sentence in document.context.split(". ") if " is " in sentence}) == 1


def test_every_queried_key_has_its_number():
    document = make_document("multi_query", state=9, length=3000, queries=3, distractors=5)
    assert document.context.count("The special number for") == 8
    key = document.question.rsplit("The special number for ", 1)[1].removesuffix(" is")
    for pair in f"for {key} is{document.answer}".split(", "):
        asked, number = pair.removeprefix("for ").split(" is ")
        assert f"The special number for {asked} is {number}." in document.context
        assert asked in document.question


@pytest.mark.parametrize(
    ("task", "options"), [("common_words", {"common": 3, "others": 2}), ("frequent_words", {"asked": 4})]
)
@pytest.mark.parametrize("length", [1200, 5000])
def test_asked_words_stand_more_often_than_any_other(task, options, length):
    for state in range(5):
        document = make_document(task, state=state, length=length, **options)
        listed = document.context.removeprefix("Words: ").removesuffix(".").split(", ")
        least = min(listed.count(word) for word in document.parts)
        assert least > max(listed.count(word) for word in set(listed) - set(document.parts))
        assert document.parts == tuple(sorted(document.parts, key=listed.index))


def test_common_words_come_as_often_as_asked_where_there_is_space():
    document = make_document("common_words", state=1, length=6000, common=2, times=12, others=3)
    listed = document.context.removeprefix("Words: ").removesuffix(".").split(", ")
    assert [listed.count(word) for word in document.parts] == [12, 12]
    assert {listed.count(word) for word in set(listed) - set(document.parts)} <= {1, 2, 3}


def test_a_short_list_still_has_its_common_words_more_often():
    listed = LISTS["common_words"](random.Random(0), 36, common=3, times=10, others=6)
    counts = {word: listed.words.count(word) for word in listed.words}
    assert min(counts[word] for word in listed.asked) == 7
    assert max(count for word, count in counts.items() if word not in listed.asked) <= 6


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
        ({"task": "multi_value", "state": 0, "length": 900, "values": 0}, "asked for 0 values"),
        ({"task": "multi_query", "state": 0, "length": 900, "queries": 0}, "asked for 0 queries"),
        ({"task": "common_words", "state": 0, "length": 900, "times": 1}, "more often than the others"),
        ({"task": "frequent_words", "state": 0, "length": 900, "asked": 40}, "ask for 1 to 39"),
        ({"task": "frequent_words", "state": 0, "length": 900, "asked": 9}, "ask for at least that"),
        ({"task": "common_words", "state": 0, "length": 90}, "ask for at least that"),
        ({"task": "common_words", "state": 0, "length": 900, "words": 3}, "unexpected keyword argument 'words'"),
    ],
)
def test_bad_arguments_say_what_was_found_and_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_document(arguments.pop("task"), **arguments)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("state", range(5))
def test_a_chain_of_sums_has_the_value_that_a_plain_reading_gives(state, depth):
    document = make_document("arithmetic", state=state, length=2500, depth=depth, links=3)
    values = {}
    for name, first, sign, second in re.findall(r"(\w+) = (\w+)(?: ([+-]) (\d+))?\.", document.context):
        start = values[first] if sign else int(first)
        values[name] = start + int(second) if sign == "+" else start - int(second) if sign else start
    asked = document.question.rsplit("Answer: ", 1)[1].removesuffix(" =")
    assert len(values) == 7 and document.answer == f" {values[asked]}"
    assert f"{values[asked]}." not in document.context.split(" = ")


@pytest.mark.parametrize("calls", [1, 4])
def test_a_tool_call_is_json_under_the_id_that_is_asked(calls):
    document = make_document("tool_call", state=3, length=3000, depth=0.6, calls=calls)
    asked = document.question.rsplit("Answer: ", 1)[1]
    assert document.context.count("Call ") == calls and f"{asked}{document.answer}" in document.context
    call = json.loads(document.answer)
    assert list(call) == ["tool", "arguments"] and {type(each) for each in call["arguments"].values()} == {
        str,
        int,
        bool,
    }
    assert json.dumps(call) == document.answer.strip()


def test_generated_text_has_none_of_the_further_kinds():
    """What was calibrated on it, and every number on it, would be of another text."""
    assert not set(FURTHER) & set(TASKS)
    text = generated_text(60_000)
    assert '"tool"' not in text and " + " not in text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "22cb5918e1986378"
