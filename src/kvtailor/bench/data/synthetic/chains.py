"""Chains: answers each of which needs what came before, of a prompt or of the working itself.

Pure standard library, offline, and a function of its arguments alone, as `documents` is. Two kinds:

- `walk`: all links (``b = a.``) and the number of the first variable stand in the prompt; the one answer walks back
  from the last variable to the number, link by link.
- `working`: the prompt has the numbers of some variables; links come one at a time while the answers are written, each
  followed by a question for its value, so that what an answer needs stands in the prompt, in the links and in the
  answers before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvtailor.bench.data.synthetic import words
from kvtailor.bench.data.synthetic.documents import make_document, random_source
from kvtailor.bench.data.synthetic.hidden_facts import number
from kvtailor.errors import ArgumentError

__all__ = ["KINDS", "Chain", "ChainStep", "make_chain"]

KINDS = ("walk", "working")
# Variables that have a number and are not asked for, in a walk; and variables that have numbers, in a working.
_OTHERS, _ROOTS = 2, 4


@dataclass(frozen=True)
class ChainStep:
    """One answer of a chain.

    Attributes:
        text: what is written before the model answers: it ends right before the answer (no trailing space).
        answer: leading space included.
        value: the number at its end.
    """

    text: str
    answer: str
    value: str


@dataclass(frozen=True)
class Chain:
    """A prompt, and the answers that follow it.

    Attributes:
        prompt: what is read before the first step.
        steps: in their order.
        kind: one of `KINDS`.
        state: the random state that it was generated from.
        links: of all answers together.
    """

    prompt: str
    steps: tuple[ChainStep, ...]
    kind: str
    state: int

    @property
    def links(self) -> int:
        """How many variables and numbers all answers name."""
        return sum(len(parts(step.answer)) for step in self.steps)

    @property
    def text(self) -> str:
        """Prompt and steps with their right answers."""
        return self.prompt + "".join(step.text + step.answer for step in self.steps)


def parts(answer: str) -> list[str]:
    """What an answer names, in its order: ``" b = a = 48213"`` names b, a and 48213."""
    return [part.strip() for part in answer.split("=")]


def make_chain(
    kind: str, *, state: int, length: int, count: int, split: str = "evaluation", count_tokens: Callable[[str], int]
) -> Chain:
    """Generate one chain.

    Args:
        kind: one of `KINDS`.
        state: random state, from the range of the split in `documents.SPLITS`.
        length: tokens of the prompt at most; prose fills it.
        count: links from the asked variable to the one with the number (`walk`), or steps (`working`).
        split: "evaluation", "calibration" or "train".
        count_tokens: text to its number of tokens, without special tokens.

    Raises:
        ArgumentError: there is no such kind or split, fewer than one link or step, or a length that the facts exceed.
    """
    if kind not in KINDS:
        raise ArgumentError(f"asked for chains of kind {kind!r}, and there are {' and '.join(KINDS)}: use one of them")
    if count < 1:
        raise ArgumentError(f"asked for a chain of {count} steps: ask for 1 or more")
    if kind == "working":
        return _working(random_source("working", state, split), state, length, count, count_tokens)
    document = make_document(
        "variables",
        state=state,
        split=split,
        length=length,
        depth=0.5,
        count_tokens=count_tokens,
        hops=count,
        distractors=_OTHERS,
    )
    step = ChainStep("", document.answer, parts(document.answer)[-1])
    return Chain(document.prompt, (step,), kind, state)


def _working(rng: random.Random, state: int, length: int, count: int, size: Callable[[str], int]) -> Chain:
    roots = min(_ROOTS, count)
    names = words.distinct(rng, roots + count)
    # Of each chain its answer so far, as the next variable's answer goes on: " a = 48213".
    ends = [f" {name} ={number(rng, 5)}" for name in names[:roots]]
    facts = [f"{end.strip()}." for end in ends]
    prose: list[str] = []
    if size(" ".join(facts)) > length:
        raise ArgumentError(
            f"asked for a working whose prompt has {length} tokens, but its facts alone take {size(' '.join(facts))}: "
            "ask for at least that"
        )
    while size(" ".join([*facts, *prose, said := words.sentence(rng)])) <= length:
        prose.append(said)
    for fact in facts:
        prose.insert(rng.randint(0, len(prose)), fact)
    steps = []
    for index in range(count):
        chain, name = index % roots, names[roots + index]
        old = parts(ends[chain])[0]
        before = "\n" if not index else ".\n"
        text = f"{before}{words.sentence(rng)} {name} = {old}.\nQuestion: What is the value of {name}? Answer: {name} ="
        steps.append(ChainStep(text, ends[chain], parts(ends[chain])[-1]))
        ends[chain] = f" {name} ={ends[chain]}"
    return Chain(" ".join(prose), tuple(steps), "working", state)
