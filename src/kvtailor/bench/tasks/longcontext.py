"""Long-context benchmarks: LongBench and ZeroSCROLLS with their official prompts, truncation and metrics.

Each prompt is prefilled and compressed; then the answer is decoded greedily on the compressed cache, up to the set's
official length or an end token, and scored by the set's official metric. All plans get the same prompts.

Metrics: `score` (0 to 100, as the official scripts report it but for rounding; with ZeroSCROLLS' geometric mean of
ROUGE also `rouge1`, `rouge2`, `rougeL`, whose means it is made of). Values: the same of each example; the mean of the
examples' geometric means is not the score. A compressed cache that ends its answers early or runs in circles can keep a
score that asks for a few words, so beside it stand `answer_tokens` (the length of an answer, its end token included)
and `repetition` (the share of its runs of four tokens that stood in it before).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.longsets import Example, LongSet, long_set, overall, read_examples, score_example
from kvtailor.bench.measure.cache_fields import tokens_read, weigh
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.fidelity import repetition
from kvtailor.bench.tasks.settings import EXAMPLES, STATE, Count, Metric, Shown, Whole, setting
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.subject import Subject

__all__ = ["LongContext", "generate"]

_LEAST_TOKENS = 2


@dataclass(frozen=True)
class _Prompts:
    ids: list[Tensor]
    limit: int | None
    cut: int
    chat: bool


@dataclass(frozen=True, kw_only=True)
class LongContext(PlanByPlan):
    """One set of a benchmark.

    Attributes:
        benchmark: "longbench" or "zeroscrolls".
        subset: a set of it, such as "qasper".
        data: a folder that has it in its original layout; None: from the hub.
        examples: how many, from the first on; None: all.
        max_tokens: longest prompt, before a chat template comes around it; what is longer is cut by the benchmark's
            rule. None: the model's positions less the answer's length and the chat template.
        state: 0: the first examples. Any other chooses as many at random, and is in every record.
    """

    name: ClassVar[str] = "longcontext"
    version: ClassVar[int] = 1
    order: ClassVar[int] = 8
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="score", unit="score", higher_is_better=True),
        Metric(name="rouge1", unit="score", higher_is_better=True, mean_of="rouge1"),
        Metric(name="rouge2", unit="score", higher_is_better=True, mean_of="rouge2"),
        Metric(name="rougeL", unit="score", higher_is_better=True, mean_of="rougeL"),
        Metric(name="answer_tokens", unit="tokens", mean_of="answer_tokens", meaning="length of an answer"),
        Metric(name="repetition", unit="share", higher_is_better=False, mean_of="repetition"),
    )
    shown: ClassVar[Shown] = Shown()
    values: ClassVar[tuple[str, ...]] = ("score", "answer_tokens", "repetition")
    by_sample: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True
    sets: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "longbench": {"benchmark": "longbench"},
        "zeroscrolls": {"benchmark": "zeroscrolls"},
    }
    set_name: ClassVar[str] = "subset"
    benchmark: str = setting()
    subset: str = setting()
    data: Path | None = None
    examples: Count | None = setting(None, option=EXAMPLES)
    max_tokens: Annotated[int, Ge(_LEAST_TOKENS)] | None = setting(None, counts_tokens=True)
    state: Whole = setting(0, option=STATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        long_set(self.benchmark, self.subset)

    def _chosen(self, examples: list[Example]) -> list[Example]:
        """The first ones, or with a state as many others at random, in the data set's order."""
        if not self.state or self.examples is None or self.examples >= len(examples):
            return examples[: self.examples]
        draw = random.Random(f"{self.benchmark}:{self.subset}:{self.state}")
        return [examples[i] for i in sorted(draw.sample(range(len(examples)), self.examples))]

    @classmethod
    def generated(cls, settings: Mapping[str, object]) -> int:
        if not {"benchmark", "subset"} <= set(settings):
            return 0
        return long_set(str(settings["benchmark"]), str(settings["subset"])).generation

    def steps(self) -> int:
        return len(self._found[0])

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        from kvtailor.bench import checks

        chosen, (examples, origin, whole) = long_set(self.benchmark, self.subset), self._found
        prompts = self._prompts(subject, chosen, examples)
        source = f"{self.benchmark}/{self.subset}"
        checks.check_distinct((hash_of(ids) for ids in prompts.ids), source)
        notes = [f"Examples from {origin}."]
        if self.examples is not None and len(examples) < self.examples:
            notes.append(f"There are {len(examples)} examples, not {self.examples}.")
        if self.state and len(examples) == whole:
            notes.append(f"All examples were taken, so that state {self.state} chose nothing.")
        if prompts.cut:
            notes.append(f"{prompts.cut} of {len(examples)} prompts were longer than {prompts.limit} tokens and cut.")
        yield Sample(
            point={
                "benchmark": self.benchmark,
                "subset": self.subset,
                "max_tokens": prompts.limit,
                "metric": chosen.metric,
                "generation": chosen.generation,
                "chat_template": prompts.chat,
            },
            text=source,
            text_hash=hash_of(*prompts.ids),
            state=self.state if self.state and len(examples) < whole else None,
            steps=len(examples),
            notes=tuple(notes),
            label=source,
            scored=lambda: [subject.text(ids.tolist()) for ids in prompts.ids],
            data=(chosen, examples, prompts.ids),
        )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        chosen, examples, prompts = sample.data
        found: list[dict[str, float]] = []
        answers: list[Sequence[int]] = []
        weights: list[dict[str, Any]] = []
        ends = _ends(subject, chosen)
        for example, ids in zip(examples, prompts, strict=True):
            made, weight = generate(
                subject, contestant, ids, most=chosen.generation, ends=ends, least=int(chosen.stop_at_line_end)
            )
            answers.append(made)
            text = chosen.clip(subject.text(made))
            found.append(score_example(chosen.metric, text, example.references, example.classes))
            weights.append(weight)
            advance()
        by_answer = {
            "answer_tokens": tuple(float(len(each)) for each in answers),
            "repetition": tuple(repetition(each) for each in answers),
        }
        return Scored(
            samples=len(found),
            metrics={**overall(chosen.metric, found), **{name: fmean(column) for name, column in by_answer.items()}},
            values={**{name: tuple(each[name] for each in found) for name in found[0]}, **by_answer},
            held=max(weights, key=lambda weight: weight.get("bytes_held", 0)),
        )

    @cached_property
    def _found(self) -> tuple[list[Example], str, int]:
        examples, origin = read_examples(self.benchmark, self.subset, self.data)
        return self._chosen(examples), origin, len(examples)

    def _prompts(self, subject: Subject, chosen: LongSet, examples: Sequence[Example]) -> _Prompts:
        import torch

        from kvtailor.bench.data.longsets.prompts import chat_overhead, longbench_ids, uses_chat, zeroscrolls_ids

        ids_of = {"longbench": longbench_ids, "zeroscrolls": zeroscrolls_ids}
        chat = uses_chat(subject, chosen)
        longest, limit = None, self.max_tokens
        if subject.positions is not None:
            longest = subject.positions - chosen.generation
            most = longest - (chat_overhead(subject) if chat else 0)
            limit = most if limit is None else limit
            if most < _LEAST_TOKENS:
                raise KvtailorError(
                    f"asked for {self.subset} of {self.benchmark}, whose answers have up to {chosen.generation} "
                    f"tokens, but {subject.name} has {subject.positions} positions: take a model with more"
                )
            if limit > most:
                raise KvtailorError(
                    f"asked for prompts of up to {limit} tokens and answers of up to {chosen.generation}, but "
                    f"{subject.name} has {subject.positions} positions, of which a chat template takes "
                    f"{longest - most}: allow {most} tokens or fewer (max_tokens)"
                )
        ids, cut = [], 0
        for example in examples:
            build = partial(ids_of[self.benchmark], subject, chosen, example)
            whole = build(None)
            fitting = whole if limit is None else _fit(build, limit, longest, self.subset, example)
            cut += not torch.equal(whole, fitting)
            ids.append(fitting)
        return _Prompts(ids, limit, cut, chat)


def _fit(
    build: Callable[[int | None], Tensor], limit: int, longest: int | None, subset: str, example: Example
) -> Tensor:
    """The prompt with the official cut, shorter where its text gives more tokens than `longest` the second time."""
    ids = build(limit)
    while longest is not None and ids.numel() > longest:
        limit -= int(ids.numel()) - longest
        if limit < _LEAST_TOKENS:
            raise KvtailorError(
                f"asked for prompts of at most {longest} tokens, but example {example.name} of {subset} cannot be "
                "cut to that: take a model with more positions"
            )
        ids = build(limit)
    return ids


def _ends(subject: Subject, chosen: LongSet) -> frozenset[int]:
    """Ids that end an answer: the model's own end tokens; where it ends with a line, the tokenizer's and a line end."""
    own = getattr(subject.tokenizer, "eos_token_id", None)
    if chosen.stop_at_line_end:
        found = [own, int(subject.tokens("\n").ids[-1])]
    else:
        told = getattr(getattr(subject.model, "generation_config", None), "eos_token_id", None)
        found = list(told) if isinstance(told, list | tuple) else [own if told is None else told]
    return frozenset(int(each) for each in found if each is not None)


def generate(
    subject: Subject,
    contestant: Contestant,
    prompt: Tensor,
    *,
    most: int,
    ends: AbstractSet[int] = frozenset(),
    least: int = 0,
) -> tuple[list[int], dict[str, Any]]:
    """Decodes greedily after a compressed prompt (n,).

    Args:
        most: how many tokens at most.
        ends: ids after which it ends.
        least: tokens before which none of them is taken.

    Returns:
        The ids, an end token included, and what the cache weighed after the prompt (see `weigh`), with what the last
        token read of it.

    Raises:
        KvtailorError: the model's logits are not numbers.
    """
    import torch

    logits, cache = subject.prefill(prompt[None], subject.new_cache(contestant), last_only=True)
    weight = weigh(cache)
    made: list[int] = []
    while True:
        scores = logits[0, -1].float()
        if bool(scores.isnan().any()):
            raise KvtailorError(f"The model gave logits that are no numbers after {len(made)} tokens of an answer.")
        if len(made) < least and ends:
            scores = scores.index_fill(0, torch.tensor(sorted(ends), device=scores.device), -torch.inf)
        made.append(int(scores.argmax()))
        if made[-1] in ends or len(made) >= most:
            return made, weight | ({"tokens_read": tokens_read(cache)} if weight else {})
        logits, cache = subject.forward(torch.tensor([made[-1:]]), cache, last_only=True)
