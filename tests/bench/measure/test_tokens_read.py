"""A record tells what is held from what is read, and a report says which plans read less than they hold."""

import pytest
import torch
from tests.bench.report.test_report import scored
from tests.support.bench.frauds import Numbers
from tests.support.seam.zoo import build, prompts

from kvtailor import cache_for
from kvtailor.bench.measure.cache_fields import tokens_read, weigh
from kvtailor.bench.report import summarise
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.needle import answer_document
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.tasks.speed import Speed

PLANS = (
    "full",
    "snapkv(window=4) @ tokens=20",
    "rocket(tokens=12, expect=8)",
    "quest(tokens=8, least=1)",
    "snapkv(window=4) + rocket(tokens=12, expect=8) @ tokens=20",
)


def tiny():
    model = build("llama")
    ids = [3 + (7919 * i * i + 13 * i) % (model.config.vocab_size - 3) for i in range(5 * 70)]
    return Subject(name="tiny", model=model, tokenizer=Numbers(ids))


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.long), 1])
def test_held_and_read_are_told_apart(chunk):
    """Of 89 tokens, 20 and what came after them: rocket reads 6; quest everything in 2 layers of 3, and no bounds yet
    have the tokens after the 50 of the prompt, of which it reads 2 pages of 16 (the last has 2 tokens)."""
    task = Perplexity(
        text="n", source="numbers", context=50, continuation=40, windows=2, least_distinct=0.0, chunk=chunk
    )
    full, snap, rocket, quest, both = run(tiny(), contestants_of(list(PLANS)), [task], bandwidth=False)
    assert full.tokens_read is None and snap.tokens_read is None
    if chunk is None:
        # All 39 tokens of the continuation at once read everything.
        assert (rocket.tokens_read, quest.tokens_read, both.tokens_read) == (None, None, None)
        return
    assert (rocket.tokens_held, rocket.tokens_read) == (89, 6)
    assert (both.tokens_held, both.tokens_read) == (20 + 39, 6)
    sparse = 3 * quest.tokens_read - 2 * 89
    assert quest.tokens_held == 89 and 39 + 16 + 2 <= sparse <= 39 + 32 or quest.tokens_read == (2 * 89 + 39 + 16) / 3
    # Bounds are bytes that are held.
    assert rocket.bytes_held > full.bytes_held and rocket.bytes_by_stage["attend"] > 0
    assert rocket.bytes_held == rocket.bytes_closed_form


@torch.inference_mode()
def test_several_tokens_at_once_read_everything():
    subject = tiny()
    cache = cache_for(subject.model, PLANS[2])
    ids, _ = prompts((60,))
    subject.forward(ids[:, :59], cache)
    assert tokens_read(cache) is None and weigh(cache)["tokens_read"] is None
    subject.forward(ids[:, 59:], cache)
    assert tokens_read(cache) == weigh(cache)["tokens_read"] == 6
    assert tokens_read(None) is None


def test_an_answer_says_what_its_last_token_read():
    subject = tiny()
    context, question, answer = torch.arange(3, 60), torch.arange(60, 70), torch.arange(70, 75)
    for plan, read in zip(contestants_of(list(PLANS[:3])), (None, None, 6.0), strict=True):
        assert answer_document(subject, plan, context, question, answer).weight["tokens_read"] == read
        alone = answer_document(subject, plan, context, question, answer[:1])
        assert alone.weight["tokens_read"] is None


def test_the_floor_of_a_token_does_not_count_what_nobody_reads(monkeypatch):
    monkeypatch.setattr("kvtailor.bench.measure.machine.Neighbours.disturbed", lambda self: False)
    monkeypatch.setattr("kvtailor.bench.tasks.speed._floor_of_token", lambda subject, blank, size: size * 1e-12)
    task = Speed(text="n", source="numbers", context=60, tokens=4, rounds=2, warmup=0)
    contestants = contestants_of(["full", "rocket(tokens=12, expect=8)"])
    _, full, rocket = run(tiny(), contestants, [task], bandwidth=False)
    assert full.floor_seconds == full.bytes_held * 1e-12
    assert rocket.tokens_held == 63 and rocket.floor_seconds == int(rocket.bytes_held * 6 / 63) * 1e-12


def test_a_report_says_which_plans_read_less():
    plain, sparse = scored("full", [1.0] * 9), scored("lean", [1.1] * 9, held=80, tokens_read=20.0)
    assert not any("read less" in note for note in summarise([plain]).footnotes)
    [note] = [note for note in summarise([plain, sparse]).footnotes if "read less" in note]
    assert "lean 20 of 80 tokens" in note and "full" not in note and "takes memory all the same" in note
