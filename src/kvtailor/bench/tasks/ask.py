"""Several questions on one compressed context, which is read once, and the worst of them.

A generated document hides as many facts as there are questions, spread evenly. The document alone is prefilled and
compressed. Then each question is asked on a copy of that cache, so that no answer depends on another question, and no
method has seen one. A cache that serves one question and loses the others is as bad as its worst answer.

Metrics: `accuracy` (share of questions answered exactly right by greedy decoding), by the place of the fact also
`accuracy_0` (the first in the text), `accuracy_1`, ...; `worst` (share of documents whose worst answer is right, so all
are); `answer_nll` (nats per answer token with the right answer fed), `worst_nll` (that of each document's worst
question). Values, one for each document: `right` (share of its questions), `worst`, `nll`, `worst_nll`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.synthetic.documents import Document, make_document, random_source
from kvtailor.bench.data.synthetic.hidden_facts import needle_fact
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.tasks.contract import Demand, PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.needle import code_document, feed_answer
from kvtailor.bench.tasks.settings import CONTEXT, STATE, Count, Metric, Option, Whole, setting
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.subject import Subject

__all__ = ["Ask"]

_SPLIT = "evaluation"


@dataclass(frozen=True, kw_only=True)
class Ask(PlanByPlan):
    """Documents with a fact for each question.

    Attributes:
        length: tokens of a document with its longest question.
        questions: how many, and facts in each document.
        documents: how many.
        state: the first random state; each document takes the next.
    """

    name: ClassVar[str] = "ask"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="accuracy", unit="share", higher_is_better=True, mean_of="right", meaning="over all questions"),
        Metric(
            name="worst",
            unit="share",
            higher_is_better=True,
            mean_of="worst",
            meaning="documents whose worst answer is right",
        ),
        Metric(name="answer_nll", unit="nats per token", higher_is_better=False, mean_of="nll"),
        Metric(name="worst_nll", unit="nats per token", higher_is_better=False, mean_of="worst_nll"),
    )
    values: ClassVar[tuple[str, ...]] = ("right", "worst", "nll", "worst_nll")
    by_sample: ClassVar[bool] = True
    generates: ClassVar[int] = 16
    length: Count = setting(1024, option=CONTEXT, counts_tokens=True)
    questions: Count = setting(
        4, option=Option(flag="--questions", default=4, help="Questions on each context of the task ask.")
    )
    documents: Count = setting(8)
    state: Whole = setting(0, option=STATE)

    def steps(self) -> int:
        return self.documents

    def demand(self) -> Demand:
        return Demand(prompts={self.length: self.documents}, decoded=self.documents * self.questions * self.generates)

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        import torch

        from kvtailor.bench import checks

        if subject.positions is not None and self.length + self.generates > subject.positions:
            raise KvtailorError(
                f"asked for documents of {self.length} tokens, but {subject.name} has {subject.positions} positions "
                f"and an answer takes up to {self.generates}: ask for --context "
                f"{subject.positions - self.generates} or less"
            )
        documents = [self._asked(subject, self.state + number) for number in range(self.documents)]
        texts = [asked[0].context for asked in documents]
        checks.check_distinct((text for text in texts), "the documents that are asked")
        coded = [[code_document(subject, each) for each in asked] for asked in documents]
        yield Sample(
            point={"length": self.length, "questions": self.questions},
            text="generated documents, several questions",
            text_hash=hash_of(*(torch.cat(parts) for asked in coded for parts in asked)),
            state=self.state,
            steps=self.documents,
            scored=lambda: texts,
            data=coded,
        )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        hits: list[list[bool]] = []
        nll: list[list[float]] = []
        weights: list[Mapping[str, Any]] = []
        for asked in sample.data:
            found, weight = _answers(subject, contestant, asked)
            hits.append([hit for hit, _ in found])
            nll.append([nats for _, nats in found])
            weights.append(weight)
            advance()
        values = {
            "right": tuple(fmean(each) for each in hits),
            "worst": tuple(float(all(each)) for each in hits),
            "nll": tuple(fmean(each) for each in nll),
            "worst_nll": tuple(max(each) for each in nll),
        }
        return Scored(
            samples=self.documents,
            tokens_scored=sum(int(answer.numel()) for asked in sample.data for _, _, answer in asked),
            metrics={
                "accuracy": fmean(values["right"]),
                "worst": fmean(values["worst"]),
                "answer_nll": fmean(values["nll"]),
                "worst_nll": fmean(values["worst_nll"]),
                **{
                    f"accuracy_{place}": fmean(float(asked[place]) for asked in hits)
                    for place in range(self.questions)
                    if all(place < len(asked) for asked in hits)
                },
            },
            values=values,
            held=max(weights, key=lambda each: each.get("bytes_held", 0)),
        )

    def _asked(self, subject: Subject, state: int) -> list[Document]:
        """One document, once for each of its questions, in the order of their facts."""
        # The facts of a document are drawn first from its random source.
        source = random_source("needle", state, _SPLIT)
        facts = [needle_fact(source) for _ in range(self.questions)]
        try:
            document = make_document(
                "needle",
                state=state,
                split=_SPLIT,
                length=self.length - subject.start().numel(),
                count_tokens=subject.count,
                distractors=self.questions - 1,
            )
        except ValueError as error:
            raise KvtailorError(str(error)) from error
        lost = [fact.sentence for fact in facts if fact.sentence not in document.context]
        if lost:
            raise KvtailorError(f"the document of state {state} does not say {lost[0]!r}; please report it")
        return [replace(document, question=fact.question, answer=fact.answer) for fact in facts]


def _answers(
    subject: Subject, contestant: Contestant, asked: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> tuple[list[tuple[bool, float]], dict[str, Any]]:
    """Whether each answer is right with its nats a token, and what the cache of the context weighed."""

    _, read = subject.prefill(asked[0][0][None], subject.new_cache(contestant), last_only=True)
    weight, found = weigh(read), []
    for _, question, answer in asked:
        logits, cache = subject.forward(question[None], copy.deepcopy(read), last_only=True)
        hit, nats, _ = feed_answer(subject, logits, cache, answer)
        found.append((hit, nats / int(answer.numel())))
    return found, weight
