"""Dummies whose numbers follow by hand, in float64 and without the bench's own code, to 1e-6."""

import math
import random
from fractions import Fraction
from statistics import fmean

import pytest
import torch
from tests.support.bench.dummy import (
    FULL,
    VOCABULARY,
    CountingModel,
    DummyCache,
    RecallModel,
    UniformModel,
    contestant,
    subject,
)

from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.runner import run
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.needle import Needle
from kvtailor.bench.tasks.perplexity import Perplexity

CONTEXT, CONTINUATION, WINDOWS, KEEP = 91, 23, 7, 17
SIZE = CONTEXT + CONTINUATION
EXACT = {"rel": 1e-6, "abs": 1e-6}

# What each of the letters has, and all other bytes together the rest.
FULL_P = {"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(1, 8)}
CUT_P = {"a": Fraction(1, 4), "b": Fraction(1, 2), "c": Fraction(1, 8)}


class FixedModel(UniformModel):
    """Two distributions: one while everything is remembered, another one afterwards."""

    def logits(self, cache, ids):
        rows = []
        for token in ids:
            cache.feed(token[None])
            of = FULL_P if cache.memory.numel() == cache.seen else CUT_P
            row = torch.full((VOCABULARY,), float(Fraction(1, 8) / (VOCABULARY - 3)), dtype=torch.float64)
            for letter, p in of.items():
                row[ord(letter)] = float(p)
            rows.append(row.log())
        return torch.stack(rows)


def letters():
    return "".join(random.Random(11).choices("abc", [5, 3, 2], k=SIZE * WINDOWS))


def measure(model, task, text, **settings):
    asked = task(
        text=text,
        source="t",
        context=CONTEXT,
        continuation=CONTINUATION,
        windows=WINDOWS,
        least_distinct=0.0,
        **settings,
    )
    return run(subject(model, cut=DummyCache(keep=KEEP)), [FULL, contestant("cut")], [asked], bandwidth=False)


def windows(text):
    raw = text.encode()
    for at in range(WINDOWS):
        piece = raw[at * SIZE : (at + 1) * SIZE]
        yield piece[:CONTEXT], piece[CONTEXT:]


@pytest.mark.parametrize("chunk", [None, 1])
def test_perplexity_and_bits_of_two_fixed_distributions(chunk):
    text = letters()
    full, cut = measure(FixedModel(), Perplexity, text, chunk=chunk)
    nats = []
    for of in (FULL_P, CUT_P):
        # The prefill, which scores the first target, remembers everything under both plans.
        nats.append(
            [
                -math.log((FULL_P if place == 0 else of)[chr(target)])
                for _, targets in windows(text)
                for place, target in enumerate(targets)
            ]
        )
    for record, ours in zip((full, cut), nats, strict=True):
        assert record.metrics["nll"] == pytest.approx(fmean(ours), **EXACT)
        assert record.metrics["perplexity"] == pytest.approx(math.exp(fmean(ours)), **EXACT)
        assert record.metrics["bits_per_byte"] == pytest.approx(fmean(ours) / math.log(2), **EXACT)
    assert full.metrics["nll"] != pytest.approx(cut.metrics["nll"], abs=1e-3)


def test_kl_top_1_and_calibration_of_two_fixed_distributions():
    text = letters()
    full, cut = measure(FixedModel(), Fidelity, text)
    count = WINDOWS * CONTINUATION
    # a: 1/2 ln 2, b: -1/4 ln 2, all others alike. The first of each window is the prefill's.
    kl = 0.25 * math.log(2)
    assert cut.metrics["kl"] == pytest.approx(kl * (CONTINUATION - 1) / CONTINUATION, **EXACT)
    assert cut.metrics["kl_p99"] == pytest.approx(kl, **EXACT)
    assert cut.metrics["top1"] == pytest.approx(1 / CONTINUATION, **EXACT)
    assert (full.metrics["kl"], full.metrics["kl_p99"], full.metrics["top1"]) == (0.0, 0.0, 1.0)
    # The most likely has 1/2 under both, so that all predictions fall into one bin.
    share = {c: sum(chr(t) == c for _, targets in windows(text) for t in targets) / count for c in "ab"}
    first = [chr(targets[0]) for _, targets in windows(text)]
    right = (share["b"] * count - first.count("b") + first.count("a")) / count
    assert full.metrics["ece"] == pytest.approx(abs(share["a"] - 0.5), **EXACT)
    assert cut.metrics["ece"] == pytest.approx(abs(right - 0.5), **EXACT)
    assert abs(share["a"] - 0.5) != pytest.approx(abs(right - 0.5), abs=1e-3)


def counted(memory):
    return [Fraction(memory.count(v) + 1, len(memory) + VOCABULARY) for v in range(VOCABULARY)]


def predictions(context, targets, keep, streamed):
    """By hand: the counting model's distribution before each target."""
    memory = list(context)
    for place, target in enumerate(targets):
        yield counted(memory), target
        # The dummy forgets after each forward: after the context, and where it is streamed after each token.
        if keep and (place == 0 or streamed):
            memory = memory[-keep:]
        memory.append(target)


@pytest.mark.parametrize("streamed", [False, True])
def test_perplexity_and_bits_of_counts(streamed):
    text = generated_text(3000)
    records = measure(CountingModel(), Perplexity, text, chunk=1 if streamed else None)
    raw, fit = text.encode(), len(text.encode()) // SIZE
    pieces = [raw[i * fit // WINDOWS * SIZE :][:SIZE] for i in range(WINDOWS)]
    assert fit > WINDOWS
    for record, keep in zip(records, (None, KEEP), strict=True):
        nats = [
            -math.log(p[target])
            for piece in pieces
            for p, target in predictions(piece[:CONTEXT], piece[CONTEXT:], keep, streamed)
        ]
        assert record.metrics["nll"] == pytest.approx(fmean(nats), **EXACT)
        assert record.metrics["perplexity"] == pytest.approx(math.exp(fmean(nats)), **EXACT)
        assert record.metrics["bits_per_byte"] == pytest.approx(fmean(nats) / math.log(2), **EXACT)


def test_kl_its_tail_top_1_and_calibration_of_counts():
    draw = random.Random(5)
    text = "".join("".join(draw.choices("abcdefgh", [1 + 5 * i] + [1] * 7, k=SIZE)) for i in range(WINDOWS))
    _, cut = measure(CountingModel(), Fidelity, text)
    kl, same, bins = [], [], [[0.0, 0] for _ in range(15)]
    for context, targets in windows(text):
        pairs = zip(predictions(context, targets, None, False), predictions(context, targets, KEEP, False), strict=True)
        for (p, target), (q, _) in pairs:
            kl.append(sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True)))
            best = q.index(max(q))
            same.append(best == p.index(max(p)))
            into = bins[min(14, math.ceil(max(q) * 15) - 1)]
            into[0] += float(best == target) - float(max(q))
            into[1] += 1
    kl_sorted, place = sorted(kl), 0.99 * (len(kl) - 1)
    low = math.floor(place)
    p99 = kl_sorted[low] + (place - low) * (kl_sorted[low + 1] - kl_sorted[low])
    assert cut.metrics["kl"] == pytest.approx(fmean(kl), **EXACT)
    assert cut.metrics["kl_p99"] == pytest.approx(p99, **EXACT)
    assert cut.metrics["top1"] == pytest.approx(fmean(same), **EXACT)
    assert cut.metrics["ece"] == pytest.approx(sum(abs(gap) for gap, _ in bins) / len(kl), **EXACT)
    assert sum(count > 0 for _, count in bins) > 1 and 0 < fmean(same) < 1


@pytest.mark.parametrize("chunk", [None, 1])
def test_bytes_are_eight_for_each_token(chunk):
    full, cut = measure(CountingModel(), Perplexity, generated_text(3000), chunk=chunk)
    seen = CONTEXT if chunk is None else CONTEXT + CONTINUATION - 1
    assert (full.tokens_seen, full.tokens_held, full.bytes_held, full.bytes_full) == (seen, seen, 8 * seen, 8 * seen)
    assert (cut.tokens_seen, cut.tokens_held, cut.bytes_held, cut.bytes_full) == (seen, KEEP, 8 * KEEP, 8 * seen)
    assert cut.bytes_closed_form == 8 * KEEP and cut.tokens_by_head == ((KEEP,),)


def test_uniform_logits_have_256_choices_and_8_bits_also_where_characters_have_several_bytes():
    text = "".join(random.Random(2).choices("aé€😀 ", k=2000))
    asked = Perplexity(text=text, source="t", context=50, continuation=30, windows=9, least_distinct=0.0)
    [record] = run(subject(UniformModel()), [FULL], [asked], bandwidth=False)
    assert record.metrics["perplexity"] == pytest.approx(256, **EXACT)
    # A token is a byte, but a character's bytes are counted with its first: a window may end inside one.
    assert record.metrics["bits_per_byte"] == pytest.approx(8, rel=0.02)


def test_accuracy_of_one_who_knows_and_one_who_does_not():
    asked = [Needle(lengths=(400,), depths=(0.2, 0.8), documents=3)]
    known = run(subject(RecallModel()), [FULL], asked, bandwidth=False)
    guessed = run(subject(UniformModel()), [FULL], asked, bandwidth=False)
    assert [record.metrics["accuracy"] for record in known] == [1.0, 1.0]
    assert [record.metrics["accuracy"] for record in guessed] == [0.0, 0.0]
    assert all(record.metrics["answer_nll"] == pytest.approx(math.log(256), **EXACT) for record in guessed)
