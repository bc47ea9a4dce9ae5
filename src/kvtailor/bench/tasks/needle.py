"""Retrieval: a fact stands somewhere in a generated document, and the question comes at its end.

The document (question included, unless `question_outside`) is prefilled and compressed; then the answer is decoded
token by token on the compressed cache. An answer counts where greedy decoding gives all of its tokens exactly.
Documents of the evaluation split only; all plans get the same ones.

Metrics: `accuracy` (share of answers that are exactly right), `answer_nll` (nats per answer token, with the right
answer fed so far: it tells plans apart where accuracy is 0 or 1). Values: `hit` (1 or 0), `nll`, `state`, one for each
document.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.bench import tripwires
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Contestant, Subject, hash_of, weigh
from kvtailor.bench.synthetic import Document, make_document
from kvtailor.bench.tasks import Given, Task
from kvtailor.errors import KvtailorError

__all__ = ["Needle", "answer_document"]

_ANSWER_ROOM = 32


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Documents over a grid of lengths and depths.

    Attributes:
        lengths: tokens of document and question together.
        depths: where the fact stands, 0.0 (start) to 1.0 (end).
        documents: how many for each length and depth.
        kind: which documents, see `bench.synthetic.TASKS`.
        question_outside: the question is not in the compressed context but comes after it, as on a cache that is kept
            for questions nobody knows yet. Methods that look at the end of the prompt then lose what helps them.
        state: the first random state; each document takes the next.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[int] = 1
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    documents: int = 4
    kind: str = "needle"
    question_outside: bool = False
    state: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths or self.documents < 1:
            raise ValueError(
                f"asked for {len(self.lengths)} lengths, {len(self.depths)} depths and {self.documents} "
                "documents: give at least "
                "one of each"
            )

    def units(self, contestants: int) -> int:
        return len(self.lengths) * len(self.depths) * self.documents * contestants

    def measure(self, given: Given) -> Iterator[Record]:
        grid = self._grid(given.subject)
        broken: dict[str, str] = {}
        for (length, depth), documents in grid.items():
            coded = [_code(given.subject, document) for document in documents]
            hashes = hash_of(*(torch.cat(parts) for parts in coded))
            for contestant in given.contestants:
                begin = time.perf_counter()
                blank = replace(
                    given.blank(contestant),
                    point={
                        "length": length,
                        "depth": depth,
                        "kind": self.kind,
                        "question_outside": self.question_outside,
                    },
                    text=f"generated {self.kind} documents",
                    text_hash=hashes,
                    state=documents[0].state,
                )
                if (known := given.known(blank)) is not None:
                    for _ in documents:
                        given.advance(f"needle · {contestant.label}")
                    yield known
                    continue
                if contestant.hash in broken:
                    yield replace(blank, error=broken[contestant.hash])
                    continue
                try:
                    found = []
                    for context, question, answer in coded:
                        found.append(
                            answer_document(
                                given.subject,
                                contestant,
                                context,
                                question,
                                answer,
                                question_outside=self.question_outside,
                            )
                        )
                        given.advance(f"needle · {contestant.label}")
                except (KvtailorError, ValueError) as error:
                    broken[contestant.hash] = str(error)
                    yield replace(blank, error=str(error))
                    continue
                yield replace(
                    blank,
                    samples=len(found),
                    tokens_scored=sum(int(answer.numel()) for _, _, answer in coded),
                    metrics={
                        "accuracy": fmean(hit for hit, _, _ in found),
                        "answer_nll": fmean(nll for _, nll, _ in found),
                    },
                    values={
                        "hit": tuple(float(hit) for hit, _, _ in found),
                        "nll": tuple(nll for _, nll, _ in found),
                        "state": tuple(float(document.state) for document in documents),
                    },
                    wall_seconds=time.perf_counter() - begin,
                    **max((weight for _, _, weight in found), key=lambda w: w.get("bytes_held", 0)),
                )

    def _grid(self, subject: Subject) -> dict[tuple[int, float], list[Document]]:
        longest = max(self.lengths)
        if subject.positions is not None and longest + _ANSWER_ROOM > subject.positions:
            raise KvtailorError(
                f"asked for documents of {longest} tokens, but {subject.name} has {subject.positions} positions "
                "and an answer takes "
                f"up to {_ANSWER_ROOM}: ask for --needles {subject.positions - _ANSWER_ROOM} or shorter"
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
        tripwires.check_distinct((text for text in texts), f"the {self.kind} documents")
        return grid


@torch.inference_mode()
def answer_document(
    subject: Subject,
    contestant: Contestant,
    context: Tensor,
    question: Tensor,
    answer: Tensor,
    *,
    question_outside: bool = False,
) -> tuple[bool, float, dict[str, Any]]:
    """Decodes an answer (a,) after a context (n,) and its question (t,).

    Returns:
        whether greedy decoding gives exactly the answer, its nats per token, and the weight of the compressed cache.
    """
    cache = subject.new_cache(contestant)
    prompt = context if question_outside else torch.cat([context, question])
    logits, cache = subject.forward(prompt[None], cache, last_only=True)
    weight = weigh(cache)
    if question_outside:
        logits, cache = subject.forward(question[None], cache, last_only=True)
    hit, nats = True, 0.0
    for index, target in enumerate(answer.tolist()):
        scores = logits[0, -1].float().log_softmax(-1)
        hit &= int(scores.argmax()) == target
        nats -= float(scores[target])
        if index + 1 < answer.numel():
            logits, cache = subject.forward(answer[None, index : index + 1], cache, last_only=True)
    return hit, nats / int(answer.numel()), weight


def _code(subject: Subject, document: Document) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of context, question and answer, as a tokenizer cuts them where they stand together if it can."""
    prompt, whole = subject.prompt(document.prompt), subject.prompt(document.prompt + document.answer)
    context = subject.prompt(document.context)
    answer = whole[prompt.numel() :]
    if not torch.equal(whole[: prompt.numel()], prompt):
        answer = subject.prompt(document.answer)[subject.start().numel() :]
    if torch.equal(prompt[: context.numel()], context):
        return context, prompt[context.numel() :], answer
    return context, subject.prompt(document.question)[subject.start().numel() :], answer
