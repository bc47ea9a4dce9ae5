"""Networks for `score/atskv.py`: for each kv head one that predicts which tokens the queries to come attend to.

Learned from the texts' passages, cut in their middle and before their end, and from as many generated documents whose
facts stand among sentences of those passages. A quarter of both is held out: it shows how good the networks are, and
whether they beat the SnapKV score among their own features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvtailor.calibration.contract import Calibrator, Job, Made
from kvtailor.calibration.relevance import (
    KEEPS,
    RIVALS,
    AskedText,
    RelevanceExample,
    as_text,
    cut_passage,
    documents_of,
    examples_of,
    of_attention,
    of_models,
    sentence,
    train,
)
from kvtailor.errors import KvtailorError
from kvtailor.score.atskv import ATSKV as Scorer

__all__ = ["ATSKV"]

_EACH = 4
_FEWEST = 8
_TOLD = 20


@dataclass(frozen=True, kw_only=True)
class ATSKV(Calibrator):
    """Relevance networks.

    Attributes:
        steps: of the optimizer.
    """

    summary = "a small network for each kv head that predicts which tokens will be looked at"
    tokens: ClassVar[int] = 98_304
    context: ClassVar[int] = 1536
    steps: int = 1200

    def units(self, passages: int) -> int:
        return 2 * passages + self.steps // _TOLD + 2 * len(KEEPS) * (1 + len(RIVALS))

    def measure(self, job: Job) -> Made:
        """Networks, and how good they are on the held-out quarter."""
        if len(job.passages) < _FEWEST:
            raise KvtailorError(
                f"asked to learn from {len(job.passages)} passages: ask for at least {_FEWEST * job.context} tokens"
            )
        # Every fourth passage is held out, and so is what is made of its sentences.
        held = job.passages[_EACH - 1 :: _EACH]
        rest = [each for index, each in enumerate(job.passages) if (index + 1) % _EACH]
        learn: list[RelevanceExample] = []
        check: list[RelevanceExample] = []
        unseen: list[AskedText] = []
        asked: list[str] = []
        for number, (passages, examples) in enumerate(((rest, learn), (held, check))):
            documents = documents_of(job.subject, passages, job.context, 2 * job.state + number)
            asked += [document.prompt + document.answer for document in documents]
            texts = [cut_passage(each) for each in passages] + [as_text(job.subject, each) for each in documents]
            unseen = texts
            for text in texts:
                examples.extend(examples_of(job.subject, text, Scorer()))
                job.advance("attention to come")
        networks = train(learn, steps=self.steps, state=job.state, advance=_every(_TOLD, job.advance))
        always = Scorer().window + Scorer().sinks
        attention = of_attention(networks, check, always=always)
        models = of_models(job.subject, job.draft(networks), unseen, advance=job.advance)
        facts = {"verdict": sentence(attention, models), "held_out": {**attention, "nats": models}}
        name = "generated questions of the calibration split"
        return Made(tensors=networks, facts=facts, texts={name: "\n\n".join(asked)})


def _every(count: int, advance: Callable[[str], None]) -> Callable[[], None]:
    """Call `advance` once for so many calls."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done % count == 0:
            advance("training")

    return step
