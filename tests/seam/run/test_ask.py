"""A context, questions, answers: what the five lines with `deepcopy` and `torch.cat` give, in one or two."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import kvtailor
from kvtailor.errors import ArgumentError, CacheMisuse, PlanError, UnknownName
from kvtailor.hf.model.loading import load
from kvtailor.hf.versions import hand_cache

CONTEXT = (
    "The ferry left the island twice a day. " * 4
    + "The code of the harbour is 48213. "
    + "It rained all night, and nobody was there. " * 3
)
QUESTIONS = [" The code of the harbour is", " The ferry left the", " It rained"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLANS = (
    "full",
    "snapkv @ tokens=48",
    "snapkv + adakv + kivi(bits=4) @ keep=0.4",
    "kvzip @ tokens=48",
    "streamingllm @ tokens=40",
)
LONG = pytest.mark.long
GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module")
def plain():
    return load("demo", dtype=torch.float32)


@pytest.fixture
def chat(plain):
    model, tokenizer = plain
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def by_hand(model, tokenizer, context: str, rest: str, plan: str, **how):
    """The way of the README before: a prefill, a copy, all ids."""
    special = not tokenizer.chat_template
    ids = tokenizer(context, return_tensors="pt", add_special_tokens=special).input_ids
    cache = kvtailor.prefill(model, ids, plan=plan, tokenizer=tokenizer, **how)
    new = tokenizer(rest, return_tensors="pt", add_special_tokens=False).input_ids
    mine = copy.deepcopy(cache)
    whole = torch.cat([ids, new], 1)
    return cache, model.generate(whole, **hand_cache(mine), **GREEDY)[0, whole.shape[1] :]


@pytest.mark.parametrize("plan", PLANS)
def test_plain_text_is_the_five_lines(plain, plan: str) -> None:
    model, tokenizer = plain
    reading = kvtailor.read(model, tokenizer, CONTEXT, plan=plan)
    answers = reading.ask(QUESTIONS, **GREEDY)
    for question, ids, text in zip(QUESTIONS, answers.ids, answers.texts, strict=True):
        cache, expected = by_hand(model, tokenizer, CONTEXT, question, plan)
        assert torch.equal(ids, expected) and text == tokenizer.decode(expected, skip_special_tokens=True)
    assert answers.ledger == cache.ledger() == reading.cache.ledger()
    assert answers.plan == str(cache.plan) and answers.questions == tuple(QUESTIONS)
    assert all(each.seen == n + 3 for each, n in zip(answers.ledgers, answers.prompt_tokens, strict=True))
    assert len({tuple(ids.tolist()) for ids in answers.ids}) > 1, "all questions alike: nothing was tested"


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[3], *(pytest.param(PLANS[i], marks=LONG) for i in (0, 2, 4))])
def test_a_chat_template_is_cut_where_the_context_ends(chat, plan: str) -> None:
    model, tokenizer = chat
    answers = kvtailor.ask(model, tokenizer, CONTEXT, QUESTIONS[:2], plan=plan, chunk=64, answer_prefix="It", **GREEDY)
    for question, ids in zip(QUESTIONS[:2], answers.ids, strict=True):
        rest = f"\n\n{question.rstrip()}</s>\n<|assistant|>\nIt"
        _, expected = by_hand(model, tokenizer, f"<|user|>\n{CONTEXT}", rest, plan, chunk=64)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize(
    ("place", "plan", "templated"),
    [
        ("inside", PLANS[1], True),
        ("before", PLANS[3], True),
        ("before", PLANS[1], False),
        pytest.param("inside", PLANS[3], False, marks=LONG),
        pytest.param("inside", PLANS[3], True, marks=LONG),
        pytest.param("before", PLANS[2], False, marks=LONG),
    ],
)
def test_a_question_that_is_compressed_too(plain, chat, plan: str, place: str, templated: bool) -> None:
    """The ids of the whole prompt through a session, which reads all of it before the first new token."""
    model, tokenizer = chat if templated else plain
    answers = kvtailor.ask(
        model, tokenizer, CONTEXT, QUESTIONS[:2], plan=plan, question=place, separator=" So:", **GREEDY
    )
    assert answers.ledger is None
    for index, question in enumerate(QUESTIONS[:2]):
        first, last = (question, CONTEXT) if place == "before" else (CONTEXT, question)
        message = f"{first} So:{last}"
        if templated:
            message = f"<|user|>\n{message.strip()}</s>\n<|assistant|>\n"
        ids = tokenizer(message, return_tensors="pt", add_special_tokens=not templated).input_ids
        assert answers.prompt_tokens[index] == ids.shape[1]
        with kvtailor.session(model, plan, tokenizer=tokenizer) as s:
            expected = s.generate(ids, **GREEDY)[0, ids.shape[1] :]
        assert torch.equal(answers.ids[index], expected)
        assert answers.ledgers[index] == s.last.ledger()


def test_no_question_sees_another_ones_answer(plain) -> None:
    model, tokenizer = plain
    reading = kvtailor.read(model, tokenizer, CONTEXT, plan="snapkv @ tokens=48")
    before = reading.cache.held()
    forwards = reading.ask(QUESTIONS, **GREEDY).texts
    backwards = reading.ask(QUESTIONS[::-1], **GREEDY).texts
    assert forwards == backwards[::-1] == tuple(reading.ask(each, **GREEDY).texts[0] for each in QUESTIONS)
    assert torch.equal(reading.cache.held(), before) and reading.cache.seen == reading.ids.shape[1]


def test_generation_arguments_pass_through(plain) -> None:
    model, tokenizer = plain
    reading = kvtailor.read(model, tokenizer, CONTEXT, plan="snapkv @ tokens=48")
    ids, new = reading.ids, tokenizer(QUESTIONS[0], return_tensors="pt", add_special_tokens=False).input_ids
    whole = torch.cat([ids, new], 1)
    beams = copy.deepcopy(reading.cache)
    beams.batch_repeat_interleave(3)
    expected = model.generate(whole, **hand_cache(beams), num_beams=3, **GREEDY)[0, whole.shape[1] :]
    assert torch.equal(reading.ask(QUESTIONS[0], num_beams=3, **GREEDY).ids[0], expected)
    for how in ({"temperature": 1.4, "top_k": 20}, {"generation_config": model.generation_config, "top_p": 0.9}):
        torch.manual_seed(3)
        expected = model.generate(
            whole, **hand_cache(copy.deepcopy(reading.cache)), do_sample=True, max_new_tokens=5, **how
        )
        torch.manual_seed(3)
        found = reading.ask(QUESTIONS[0], do_sample=True, max_new_tokens=5, **how)
        assert torch.equal(found.ids[0], expected[0, whole.shape[1] :])
    told = reading.ask(QUESTIONS[0], return_dict_in_generate=True, **GREEDY)
    assert torch.equal(told.ids[0], reading.ask(QUESTIONS[0], **GREEDY).ids[0])


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"questions": []}, CacheMisuse, "no question"),
        ({"questions": ["a", " "]}, CacheMisuse, "question 1 must be a text"),
        ({"questions": [3]}, CacheMisuse, "question 0 must be a text"),
        ({"context": " \n"}, CacheMisuse, "context must be a text"),
        ({"tokenizer": None}, ArgumentError, "tokenizer must be the model's tokenizer, and is None"),
        ({"plan": "snapk @ tokens=48"}, PlanError, "snapkv"),
        ({"question": "behind"}, UnknownName, "place of the question.*behind"),
        ({"max_new_tokens": 0}, CacheMisuse, "max_new_tokens=0"),
        ({"temprature": 0.5}, UnknownName, "temperature"),
        ({"input_ids": torch.ones(1, 4)}, CacheMisuse, "input_ids is made from"),
        ({"past_key_values": None}, CacheMisuse, "past_key_values is made from"),
        ({"cache": None}, CacheMisuse, "cache is made from"),
        ({"num_return_sequences": 2}, CacheMisuse, "num_return_sequences=2"),
        ({"prompt_lookup_num_tokens": 3}, CacheMisuse, "kvtailor.generate"),
        ({"use_cache": False}, CacheMisuse, "use_cache=False"),
        ({"streamer": 1}, CacheMisuse, "streamer must be a streamer with put and end"),
        ({"cache_implementation": "static"}, CacheMisuse, "'static'"),
    ],
)
@pytest.mark.parametrize("place", ["after", "inside"])
def test_what_cannot_be_is_refused_before_anything_is_read(
    plain, monkeypatch: pytest.MonkeyPatch, arguments: dict, error: type, said: str, place: str
) -> None:
    model, tokenizer = plain
    monkeypatch.setattr(model, "forward", None)
    given = {
        "tokenizer": tokenizer,
        "context": CONTEXT,
        "questions": QUESTIONS,
        "plan": PLANS[1],
        "question": place,
    } | arguments
    with pytest.raises(error, match=said):
        kvtailor.ask(model, **given)


def test_a_template_that_does_not_write_the_message_once_is_refused(chat) -> None:
    model, tokenizer = chat
    for template, times in (("no message", 0), ("{{ messages[0]['content'] }}" * 2, 2)):
        tokenizer.chat_template = template
        with pytest.raises(CacheMisuse, match=f"message {times} times"):
            kvtailor.read(model, tokenizer, CONTEXT, plan="full")


def test_a_context_may_speak_of_the_mark(chat) -> None:
    model, tokenizer = chat
    context = CONTEXT + "kvtailor-question-goes-here"
    reading = kvtailor.read(model, tokenizer, context, plan="full")
    assert tokenizer.decode(reading.ids[0]).count("kvtailor-question-goes-here") == 1
    assert reading.after == "</s>\n<|assistant|>\n"


def test_a_result_is_frozen(plain) -> None:
    model, tokenizer = plain
    answers = kvtailor.ask(model, tokenizer, CONTEXT, QUESTIONS[0], plan="snapkv @ tokens=48", **GREEDY)
    assert answers.ledger.held == 48 and answers.ledger.total < answers.ledger.full and len(answers.texts) == 1
    for broken in (answers, kvtailor.read(model, tokenizer, CONTEXT, plan="full")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            broken.plan = broken.cache = None
