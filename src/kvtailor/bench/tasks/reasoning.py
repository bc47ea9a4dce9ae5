"""Reasoning: chains of answers that are decoded greedily while the plan evicts, and how many bytes they took.

Each chain begins with a prompt that is prefilled. What follows is fed one token at a time, so that a plan that cuts
while decoding cuts here; a plan without slack never does. Two kinds of chains, see `bench.data.synthetic.chains`:

- `walk`: the model writes one answer, which names every link from the asked variable to a number. All that it needs
  stands in the prompt.
- `working`: notes and questions are given, token by token, and the model writes the answer to each question. What it
  needs stands in the prompt, in the notes and in its own answers. The notes are not the model's: the kind measures what
  a cache keeps of a decoded text, and not whether the model would have written that text.

An answer ends before the first full stop or line break, or after 8 tokens more than the right one has, and is fed as
the model wrote it, right or wrong. It is right where the first number in it is the chain's.

Metrics: `accuracy` (share of chains whose last answer is right), `steps_right` (mean share of a chain's answers that
are right), `reached` (mean share of a chain's links that come before its first wrong one), `chain_tokens` (tokens that
were decoded, mean), `cache_peak` (the most bytes that the cache held after any token, the prompt's end among them, over
all chains), `cache_mean` (bytes held, mean over tokens and chains), `cache` (bytes held at the end, mean
over chains), and `cache_0`, `cache_1`, ...: bytes held after the prompt, after `every` decoded tokens, after twice as
many ..., mean over the chains that came so far.
Values: `hit`, `score`, `reached`, `peak`, `state`, one for each chain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.synthetic.chains import Chain, make_chain, parts
from kvtailor.bench.measure.cache_fields import bytes_of, weigh
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.settings import STATE, STATES_APART, Count, Counts, Metric, Option, Whole, setting
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.subject import Subject

__all__ = ["Reasoning", "write_chain"]

_LONGER = 8
_NUMBER = re.compile(r"\d+")


@dataclass
class Written:
    """What came of one chain.

    Attributes:
        right: of each step, whether its answer is right.
        reached: links before the first wrong one.
        held: bytes after the prompt and after each decoded token.
        weight: what the cache held at the end, see `weigh`.
    """

    right: list[bool] = field(default_factory=list)
    reached: int = 0
    held: list[int] = field(default_factory=list)
    weight: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reasoning(PlanByPlan):
    """Chains over some lengths.

    Attributes:
        kind: which chains.
        counts: links of a walk, or steps of a working.
        prompt: tokens of each prompt at most.
        chains: how many of each length.
        every: decoded tokens between two of the points in time at which bytes are reported.
        state: the first random state; each chain takes the next.
    """

    name: ClassVar[str] = "reasoning"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="accuracy", unit="share", higher_is_better=True, mean_of="hit"),
        Metric(name="steps_right", unit="share", higher_is_better=True, mean_of="score"),
        Metric(name="reached", unit="share", higher_is_better=True, mean_of="reached"),
        Metric(name="chain_tokens", unit="tokens", meaning="decoded"),
        Metric(name="cache_peak", unit="bytes", higher_is_better=False),
        Metric(name="cache_mean", unit="bytes", higher_is_better=False),
        Metric(
            name="cache",
            unit="bytes",
            higher_is_better=False,
            meaning="held at the end, and after 0, 1, ... times --every tokens",
        ),
    )
    values: ClassVar[tuple[str, ...]] = ("hit", "score", "reached", "peak", "state")
    by_sample: ClassVar[bool] = True
    kind: str = setting(
        "walk",
        each=True,
        choices=("walk", "working"),
        what="kind of chain",
        option=Option(
            flag="--chain",
            default="walk",
            help="Which chains, with ',' between: walk (its links stand in the prompt), working (in what is decoded).",
        ),
    )
    counts: Counts = setting(
        (4,),
        option=Option(flag="--chain-lengths", default="4", help="Links of a walk or steps of a working, with ','."),
    )
    prompt: Count = setting(
        256, counts_tokens=True, option=Option(flag="--chain-prompt", default=256, help="Tokens of a prompt.")
    )
    chains: Count = setting(24, option=Option(flag="--chains", default=24, help="Chains of each length."))
    every: Count = setting(
        64, option=Option(flag="--every", default=64, help="Decoded tokens between two looks at the bytes.")
    )
    state: Whole = setting(0, option=STATE, times=STATES_APART)

    @classmethod
    def generated(cls, settings: Mapping[str, object]) -> int:
        counts = settings.get("counts", (4,))
        most = max(counts) if isinstance(counts, list | tuple) and counts else 4
        return int(most) * (100 if settings.get("kind") == "working" else 16) + 32

    def points(self) -> int:
        return len(self.counts)

    def steps(self) -> int:
        return self.points() * self.chains

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        import torch

        from kvtailor.bench import checks

        made = {}
        for index, count in enumerate(self.counts):
            states = range(self.state + index * self.chains, self.state + (index + 1) * self.chains)
            try:
                made[count] = [
                    make_chain(
                        self.kind,
                        state=state,
                        length=self.prompt - subject.start().numel(),
                        count=count,
                        count_tokens=subject.count,
                    )
                    for state in states
                ]
            except ValueError as error:
                raise KvtailorError(str(error)) from error
        every = [chain for chains in made.values() for chain in chains]
        checks.check_distinct((chain.prompt for chain in every), f"the {self.kind} chains")
        longest = max(subject.count(chain.text) + _LONGER * len(chain.steps) for chain in every)
        if subject.positions is not None and longest > subject.positions:
            raise KvtailorError(
                f"asked for chains of up to {longest} tokens, but {subject.name} has {subject.positions} positions: "
                "ask for shorter ones (--chain-lengths, --chain-prompt)"
            )
        for count, chains in made.items():
            coded = [[subject.prompt(chain.prompt), *_pieces(subject, chain)] for chain in chains]
            yield Sample(
                point={"kind": self.kind, "count": count, "prompt": self.prompt},
                text=f"generated {self.kind} chains",
                text_hash=hash_of(*(torch.cat(each) for each in coded)),
                state=chains[0].state,
                steps=len(chains),
                scored=lambda: [chain.text for chain in every],
                data=(chains, coded),
            )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        chains, coded = sample.data
        found = []
        for chain, (prompt, *pieces) in zip(chains, coded, strict=True):
            found.append(write_chain(subject, contestant, chain, prompt, pieces))
            advance()
        tokens = [len(each.held) - 1 for each in found]
        held: dict[str, float | None] = {}
        if all(each.weight for each in found):
            held = {
                "cache_peak": float(max(max(each.held) for each in found)),
                "cache_mean": fmean(fmean(each.held) for each in found),
                "cache": fmean(each.held[-1] for each in found),
            }
            for point in range(max(tokens) // self.every + 1):
                reached = [each.held[point * self.every] for each in found if len(each.held) > point * self.every]
                held[f"cache_{point}"] = fmean(reached)
        return Scored(
            samples=len(found),
            metrics={
                "accuracy": fmean(each.right[-1] for each in found),
                "steps_right": fmean(fmean(each.right) for each in found),
                "reached": fmean(each.reached / chain.links for each, chain in zip(found, chains, strict=True)),
                "chain_tokens": fmean(tokens),
                **held,
            },
            values={
                "hit": tuple(float(each.right[-1]) for each in found),
                "score": tuple(fmean(each.right) for each in found),
                "reached": tuple(each.reached / chain.links for each, chain in zip(found, chains, strict=True)),
                "peak": tuple(float(max(each.held)) for each in found),
                "state": tuple(float(chain.state) for chain in chains),
            },
            held=max((each.weight for each in found), key=lambda weight: weight.get("tokens_seen", 0)),
        )


def write_chain(
    subject: Subject, contestant: Contestant, chain: Chain, prompt: Tensor, pieces: Sequence[Tensor]
) -> Written:
    """Reads a prompt (n,), then feeds the given pieces (t,) and decodes the answer to each.

    Args:
        chain: whose steps have the right answers.
        prompt: with the tokens that begin one.
        pieces: what stands before each answer; the first may be empty.
    """

    found, whole = Written(), True
    logits, cache = subject.prefill(prompt[None], subject.new_cache(contestant), last_only=True)

    def look() -> None:
        size = bytes_of(cache)
        found.held.append(0 if size is None else size)

    look()
    for step, piece in zip(chain.steps, pieces, strict=True):
        for token in piece:
            logits, cache = subject.forward(token[None, None], cache, last_only=True)
            look()
        made: list[int] = []
        most = subject.count(step.answer) + _LONGER
        text = ""
        while len(made) < most:
            token = logits[0, -1].argmax()
            text = subject.text([*made, int(token)])
            if ended := re.search(r"[.\n]", text):
                text = text[: ended.start()]
                break
            made.append(int(token))
            logits, cache = subject.forward(token[None, None], cache, last_only=True)
            look()
        number = _NUMBER.search(text)
        found.right.append(number is not None and number.group() == step.value)
        due, said = parts(step.answer), parts(text)
        links = next((i for i, (a, b) in enumerate(zip(due, said, strict=False)) if a != b), min(len(due), len(said)))
        found.reached += links if whole else 0
        whole = whole and links == len(due)
    found.weight = weigh(cache)
    return found


def _pieces(subject: Subject, chain: Chain) -> list[Tensor]:
    """The tokens (t,) of what stands before each answer, coded by itself."""
    start = subject.start().numel()
    return [subject.prompt(step.text)[start:] for step in chain.steps]
