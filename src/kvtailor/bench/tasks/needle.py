"""Retrieval: a fact stands somewhere in a generated document, and the question comes at its end.

The document (question included, unless `question_outside`) is prefilled and compressed; then the answer is decoded
token by token on the compressed cache. An answer counts where greedy decoding gives all of its tokens exactly.
Documents of the evaluation split only; all plans get the same ones.

Metrics: `accuracy` (share of answers that are exactly right), `recall` (mean share of an answer's parts that the
greedy continuation contains, in any order, as RULER counts; it may be 4 tokens longer than the answer; null where
answers have one part, of which accuracy says it all), `answer_nll` (nats per answer token, with the right answer fed
so far: it tells plans apart where accuracy is 0 or 1). Values: `hit` (1 or 0), `recall`, `nll`, `state`, one for each
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.synthetic.documents import Document, make_document
from kvtailor.bench.measure.cache_fields import tokens_read, weigh
from kvtailor.bench.tasks.contract import Demand, PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.settings import (
    CONTEXT,
    DOCUMENT_KINDS,
    STATE,
    STATES_APART,
    Column,
    Count,
    Counts,
    Metric,
    Option,
    Shares,
    Shown,
    Whole,
    setting,
)
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.subject import Subject

__all__ = ["NeedleAnswer", "Needle", "answer_document", "code_document", "feed_answer"]

_LONG_ANSWERS = {"tool_call": 96}
_LONGER = 4


@dataclass(frozen=True)
class NeedleAnswer:
    """What came of one document.

    Attributes:
        hit: greedy decoding gives exactly the answer.
        recall: share of the answer's parts that the greedy continuation contains, 0.0 to 1.0.
        nll: nats per answer token.
        weight: what the compressed cache held, see `weigh`.
    """

    hit: bool
    recall: float
    nll: float
    weight: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Needle(PlanByPlan):
    """Documents over a grid of lengths and depths.

    Attributes:
        lengths: tokens of document and question together.
        depths: where the fact stands, 0.0 (start) to 1.0 (end).
        documents: how many for each length and depth.
        kind: which documents, see `bench.data.synthetic.documents.ALL_TASKS`.
        question_outside: the question is not in the compressed context but comes after it, as on a cache that is kept
            for questions that come later. Methods that look at the end of the prompt then lose what helps them.
        state: the first random state; each document takes the next.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[int] = 2
    order: ClassVar[int] = 2
    usual: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="accuracy", unit="share", higher_is_better=True, mean_of="hit"),
        Metric(name="recall", unit="share", higher_is_better=True, mean_of="recall"),
        Metric(name="answer_nll", unit="nats per token", higher_is_better=False, mean_of="nll"),
    )
    shown: ClassVar[Shown] = Shown(
        first=(
            Column("answers right, %", "accuracy", 0, 100, interval=True),
            Column("recall, %", "recall", 0, 100, interval=True),
            Column(
                "nats over full per answer token",
                "answer_nll_over_full",
                3,
                sign=True,
                interval=True,
                is_difference=True,
            ),
        ),
        terminal=(
            Column("needle (95 %)", "accuracy", form="hits"),
            Column("recall (95 %)", "recall", 0, 100, unit=" %", interval=True),
        ),
    )
    values: ClassVar[tuple[str, ...]] = ("hit", "recall", "nll")
    by_sample: ClassVar[bool] = True
    generates: ClassVar[int] = 32
    lengths: Counts = setting(
        counts_tokens=True,
        option=Option(
            flag="--needles",
            like=CONTEXT,
            help="Lengths of the needle documents in tokens, with ',' between.  [--context]",
        ),
    )
    depths: Shares = setting(
        (0.1, 0.3, 0.5, 0.7, 0.9),
        option=Option(
            flag="--depths",
            default="0.1,0.3,0.5,0.7,0.9",
            help="Where the needles stand, 0 to 1.",
        ),
    )
    documents: Count = setting(
        4, option=Option(flag="--documents", default=4, help="Documents for each length and depth.")
    )
    kind: str = setting(
        "needle",
        each=True,
        choices=DOCUMENT_KINDS,
        what="kind of document",
        option=Option(
            flag="--kind",
            default="needle",
            help="Which documents, with ',' between: needle, passkey, key_value, multi_value, multi_query, variables, "
            "characters, first_names, copy_span, common_words, frequent_words, tool_call, arithmetic, "
            "reworded, rules.",
        ),
    )
    question_outside: bool = setting(
        False,
        option=Option(flag="--question-outside", help="Ask after the compressed context, not inside it."),
    )
    state: Whole = setting(0, option=STATE, times=STATES_APART)

    @classmethod
    def generated(cls, settings: Mapping[str, object]) -> int:
        return _LONG_ANSWERS.get(str(settings.get("kind")), cls.generates)

    def points(self) -> int:
        return len(self.lengths) * len(self.depths)

    def steps(self) -> int:
        return self.points() * self.documents

    def demand(self) -> Demand:
        each = len(self.depths) * self.documents
        prompts = {length: each * self.lengths.count(length) for length in self.lengths}
        return Demand(prompts=prompts, decoded=self.steps() * self.generated({"kind": self.kind}))

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        import torch

        grid = self._grid(subject)

        def prompts() -> list[str]:
            return [document.prompt for documents in grid.values() for document in documents]

        for (length, depth), documents in grid.items():
            coded = [code_document(subject, document) for document in documents]
            yield Sample(
                point={
                    "length": length,
                    "depth": depth,
                    "kind": self.kind,
                    "question_outside": self.question_outside,
                },
                text=f"generated {self.kind} documents",
                text_hash=hash_of(*(torch.cat(parts) for parts in coded)),
                state=documents[0].state,
                steps=len(documents),
                scored=prompts,
                data=(documents, coded),
            )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        documents, coded = sample.data
        found = []
        for (context, question, answer), document in zip(coded, documents, strict=True):
            found.append(
                answer_document(
                    subject,
                    contestant,
                    context,
                    question,
                    answer,
                    parts=document.parts,
                    question_outside=self.question_outside,
                )
            )
            advance()
        several = any(len(document.parts) > 1 for document in documents)
        return Scored(
            samples=len(found),
            tokens_scored=sum(int(answer.numel()) for _, _, answer in coded),
            metrics={
                "accuracy": fmean(each.hit for each in found),
                "recall": fmean(each.recall for each in found) if several else None,
                "answer_nll": fmean(each.nll for each in found),
            },
            values={
                "hit": tuple(float(each.hit) for each in found),
                **({"recall": tuple(each.recall for each in found)} if several else {}),
                "nll": tuple(each.nll for each in found),
                "state": tuple(float(document.state) for document in documents),
            },
            held=max((each.weight for each in found), key=lambda w: w.get("bytes_held", 0)),
        )

    def _grid(self, subject: Subject) -> dict[tuple[int, float], list[Document]]:
        from kvtailor.bench import checks

        longest, answer = max(self.lengths), self.generated({"kind": self.kind})
        if subject.positions is not None and longest + answer > subject.positions:
            raise KvtailorError(
                f"asked for documents of {longest} tokens, but {subject.name} has {subject.positions} positions "
                "and an answer takes "
                f"up to {answer}: ask for --needles {subject.positions - answer} or shorter"
            )
        start = subject.start().numel()
        states = iter(range(self.state, self.state + len(self.lengths) * len(self.depths) * self.documents))
        try:
            grid = {
                (length, depth): [
                    make_document(
                        self.kind, state=next(states), length=length - start, depth=depth, count_tokens=subject.count
                    )
                    for _ in range(self.documents)
                ]
                for length in self.lengths
                for depth in self.depths
            }
        except ValueError as error:
            raise KvtailorError(str(error)) from error
        texts = [document.prompt for documents in grid.values() for document in documents]
        checks.check_distinct((text for text in texts), f"the {self.kind} documents")
        return grid


def feed_answer(subject: Subject, logits: Tensor, cache: Any, answer: Tensor) -> tuple[bool, float, Any]:
    """Return whether greedy decoding gives an answer (a,), the nats of all its tokens, and the cache that read it.

    Args:
        subject: the model.
        logits: (1, 1, V) after the question.
        cache: with what was read; the right answer is fed token by token, its last one left out.
        answer: its tokens.
    """
    hit, nats = True, 0.0
    for index, target in enumerate(answer.tolist()):
        scores = logits[0, -1].float().log_softmax(-1)
        hit &= int(scores.argmax()) == target
        nats -= float(scores[target])
        if index + 1 < answer.numel():
            logits, cache = subject.forward(answer[None, index : index + 1], cache, last_only=True)
    return hit, nats, cache


def answer_document(
    subject: Subject,
    contestant: Contestant,
    context: Tensor,
    question: Tensor,
    answer: Tensor,
    *,
    parts: Sequence[str] = (),
    question_outside: bool = False,
) -> NeedleAnswer:
    """Decodes an answer (a,) after a context (n,) and its question (t,).

    Args:
        parts: what the answer consists of; several are looked for in a continuation of their own, where the exact
            answer did not come.
    """

    logits, cache, weight = _read(subject, contestant, context, question, outside=question_outside)
    hit, nats, cache = feed_answer(subject, logits, cache, answer)
    reading = {"tokens_read": tokens_read(cache)} if weight else {}
    recall = float(hit)
    if not hit and len(parts) > 1:
        text = _continuation(subject, contestant, context, question, int(answer.numel()) + _LONGER, question_outside)
        recall = sum(part in text for part in parts) / len(parts)
    return NeedleAnswer(hit, recall, nats / int(answer.numel()), weight | reading)


def _read(
    subject: Subject, contestant: Contestant, context: Tensor, question: Tensor, *, outside: bool
) -> tuple[Tensor, Any, dict[str, Any]]:
    """Logits after the question, the cache, and what it weighed when it was compressed."""
    import torch

    cache = subject.new_cache(contestant)
    prompt = context if outside else torch.cat([context, question])
    logits, cache = subject.prefill(prompt[None], cache, last_only=True)
    weight = weigh(cache)
    if outside:
        logits, cache = subject.forward(question[None], cache, last_only=True)
    return logits, cache, weight


def _continuation(
    subject: Subject, contestant: Contestant, context: Tensor, question: Tensor, tokens: int, outside: bool
) -> str:
    """The text of so many greedy tokens."""
    import torch

    logits, cache, _ = _read(subject, contestant, context, question, outside=outside)
    made = [int(logits[0, -1].argmax())]
    while len(made) < tokens:
        logits, cache = subject.forward(torch.tensor([made[-1:]]), cache, last_only=True)
        made.append(int(logits[0, -1].argmax()))
    return subject.text(made)


def code_document(subject: Subject, document: Document) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of context, question and answer, as a tokenizer cuts them where they stand together if it can."""
    import torch

    prompt, whole = subject.prompt(document.prompt), subject.prompt(document.prompt + document.answer)
    context = subject.prompt(document.context)
    answer = whole[prompt.numel() :]
    if not torch.equal(whole[: prompt.numel()], prompt):
        answer = subject.prompt(document.answer)[subject.start().numel() :]
    if torch.equal(prompt[: context.numel()], context):
        return context, prompt[context.numel() :], answer
    return context, subject.prompt(document.question)[subject.start().numel() :], answer
