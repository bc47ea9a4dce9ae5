"""Chains: what they ask, what counts as right, and the bytes at each token, on models whose answers are known."""

from __future__ import annotations

import re

import pytest
import torch
from tests.support.bench.dummy import FULL, DummyCache, RecallModel, UniformModel, contestant, subject

from kvtailor.bench.data.synthetic.chains import Chain, ChainStep, make_chain, parts
from kvtailor.bench.runner import run
from kvtailor.bench.tasks.reasoning import Reasoning, _pieces, write_chain
from kvtailor.errors import KvtailorError


class KnowingModel(UniformModel):
    """Follows the links that it remembers, to the number; a link that is forgotten ends its answer."""

    def logits(self, cache: DummyCache, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(ids.numel(), 256)
        for i, token in enumerate(ids):
            cache.feed(token[None])
            rows[i, self.next(bytes(cache.memory.tolist()).decode())] = 20.0
        return rows

    @staticmethod
    def next(text: str) -> int:
        links = dict(re.findall(r"(\w+) = (\w+)\.", text.split("Answer:")[0] if "Question" not in text else text))
        said = re.search(r"Answer: ([\w= ]*)$", text)
        if said is None:
            return ord(".")
        due, at = "", said.group(1).split(" =")[0].strip()
        due = f"{at} ="
        while at in links:
            at = links[at]
            due += f" {at}" + ("" if at.isdigit() else " =")
        rest = due[len(said.group(1)) :]
        return ord(rest[0]) if rest else ord(".")


def bench(model: UniformModel, *labels: str, caches: dict | None = None, **settings: object) -> list:
    task = Reasoning(**{"counts": (3,), "prompt": 400, "chains": 4, "every": 100} | settings)
    return run(subject(model, **(caches or {})), [FULL, *map(contestant, labels)], [task], bandwidth=False)


@pytest.mark.parametrize("kind", ["walk", "working"])
def test_a_model_that_follows_links_is_right_and_one_that_guesses_is_not(kind: str) -> None:
    counts = (1, 6) if kind == "working" else (1, 3)
    for record in bench(KnowingModel(), kind=kind, counts=counts):
        assert [record.metrics[name] for name in ("accuracy", "steps_right", "reached")] == [1.0, 1.0, 1.0]
        assert record.values["hit"] == record.values["score"] == record.values["reached"] == (1.0,) * 4
        # A cache of 8 bytes a token that drops nothing: bytes are the tokens.
        chain = record.metrics["chain_tokens"]
        assert record.metrics["cache_peak"] == max(record.values["peak"]) == 8 * record.tokens_seen
        assert record.metrics["cache_0"] <= 8 * 400
        assert record.metrics["cache"] == record.metrics["cache_0"] + 8 * chain
        if chain > 120:
            assert record.metrics["cache_1"] == record.metrics["cache_0"] + 800
    for record in bench(UniformModel(), kind=kind, counts=counts):
        assert record.metrics["accuracy"] == record.metrics["steps_right"] == record.metrics["reached"] == 0.0


def test_a_cache_that_forgets_its_beginning_loses_what_stood_there() -> None:
    full, short = bench(KnowingModel(), "short", caches={"short": DummyCache(keep=300)}, kind="working", counts=(6,))
    assert full.metrics["steps_right"] == 1.0 and short.metrics["steps_right"] < 1.0
    # What a record says of its cache is the end of the longest chain.
    # A wrong answer may be shorter.
    assert full.tokens_seen >= short.tokens_seen > 300 == short.tokens_held and short.bytes_held < short.bytes_full
    assert short.metrics["reached"] < 1.0 and short.metrics["cache_peak"] < full.metrics["cache_peak"]
    assert short.values["state"] == full.values["state"] and short.text_hash == full.text_hash


def test_what_counts_by_hand() -> None:
    """The first number of an answer decides; links count up to the first wrong one of the chain."""

    class Says(UniformModel):
        def logits(self, cache: DummyCache, ids: torch.Tensor) -> torch.Tensor:
            rows = torch.zeros(ids.numel(), 256)
            for i, token in enumerate(ids):
                cache.feed(token[None])
                text = bytes(cache.memory.tolist()).decode()
                for asked, said in {
                    "A=": " b = 12.",
                    "B=": " 34 = 12\n",
                    "C=": " 56 more and more and mor",
                    "D=": " 78.",
                }.items():
                    for cut in range(len(said)):
                        if text.endswith(asked + said[:cut]):
                            rows[i, ord(said[cut])] = 20.0
            return rows

    given = subject(Says())
    chain = Chain(
        "Start. ",
        (
            ChainStep("A=", " b = 12", "12"),
            ChainStep(" B=", " b = 12", "12"),
            ChainStep(" C=", " 56", "56"),
            ChainStep(" D=", " 78", "78"),
        ),
        "working",
        0,
    )
    found = write_chain(given, FULL, chain, given.prompt(chain.prompt), _pieces(given, chain))
    assert found.right == [True, False, True, True]
    # Of six links the first answer's two; what comes after a wrong answer does not count.
    assert chain.links == 6 and found.reached == 2
    # The prompt, the pieces, and answers without their ends: 8 more tokens than the right one at most.
    assert len(found.held) == 1 + 2 + 7 + 3 + 8 + 3 + (3 + 8) + 3 + 3
    assert found.held == [8 * (7 + i) for i in range(len(found.held))]
    assert parts(" b = a = 48213") == ["b", "a", "48213"]


def test_chains_are_a_function_of_their_state_and_fit_their_length() -> None:
    for kind in ("walk", "working"):
        one, two = (make_chain(kind, state=7, length=500, count=5, count_tokens=len) for _ in range(2))
        assert one == two != make_chain(kind, state=8, length=500, count=5, count_tokens=len)
        assert len(one.prompt) <= 500 and len(one.steps) == (1 if kind == "walk" else 5)
        for step in one.steps:
            assert step.answer.endswith(step.value) and step.answer.startswith(" ") and not step.text.endswith(" ")
    working = make_chain("working", state=7, length=500, count=9, count_tokens=len)
    links = dict(re.findall(r"(\w+) = (\w+)\.", working.prompt))
    assert len(links) == 4
    for step in working.steps:
        name, old = re.search(r"(\w+) = (\w+)\.\nQuestion", step.text).groups()
        links[name] = old
        walk = [old]
        while walk[-1] in links:
            walk.append(links[walk[-1]])
        assert parts(step.answer) == walk
    with pytest.raises(ValueError, match="facts alone take"):
        make_chain("working", state=0, length=10, count=3, count_tokens=len)
    with pytest.raises(ValueError, match="there are walk and working"):
        make_chain("maze", state=0, length=10, count=3, count_tokens=len)


def test_too_long_for_the_model_is_refused_before_anything_runs() -> None:
    model = RecallModel()
    model.config = type("Config", (), {"max_position_embeddings": 500, "vocab_size": 256})()
    with pytest.raises(KvtailorError, match="has 500 positions: ask for shorter ones"):
        bench(model, kind="working", counts=(20,), prompt=300)
    with pytest.raises(ValueError, match="at least 1 item"):
        Reasoning(counts=())
