"""What a repetition of a passage finds of each token, beside what a network may read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.bench.subject import Subject
from kvtailor.calibration.contract import Job
from kvtailor.calibration.passages import Passage
from kvtailor.errors import KvtailorError
from kvtailor.hf.run.prefill import prefill
from kvtailor.plan import Plan
from kvtailor.score.by_repetition.own_token import own_token
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["Lessons", "lessons_of", "split"]

_SAMPLED = 256
_EACH = 4
_FEWEST = 8


@dataclass(frozen=True)
class Lessons:
    """Of some tokens of one passage, the same in all layers and kv heads.

    Attributes:
        tokens: (l, h, n, d + dv) float16, see `score.by_repetition.own_token`.
        found: (l, h, n) float32 what the repetition found of them.
    """

    tokens: Tensor
    found: Tensor


@dataclass(frozen=True, kw_only=True)
class _Listening(Scorer):
    """Another scorer, of which it is remembered what it was shown: for each layer the tokens and what was found."""

    of: Scorer
    heard: list[tuple[Tensor, Tensor]] = field(default_factory=list, compare=False, hash=False, repr=False)

    @property
    def needs(self) -> Needs:
        return self.of.needs | Needs(rotation=True)

    def score(self, held: Held) -> Tensor:
        assert held.reconstruction is not None
        tokens = torch.stack([own_token(held, head)[0] for head in range(held.keys.shape[1])])
        self.heard.append((tokens.half().cpu(), held.reconstruction[0].float().cpu()))
        return self.of.score(held)


def split(job: Job) -> tuple[list[Passage], list[Passage]]:
    """The passages to learn from, and every fourth, which is held out to judge by.

    Raises:
        KvtailorError: they are too few.
    """
    if len(job.passages) < _FEWEST:
        raise KvtailorError(
            f"asked to learn from {len(job.passages)} passages: ask for at least {_FEWEST * job.context} tokens"
        )
    held = list(job.passages[_EACH - 1 :: _EACH])
    return [each for index, each in enumerate(job.passages) if (index + 1) % _EACH], held


@torch.inference_mode()
def lessons_of(job: Job, passages: Sequence[Passage], teacher: Scorer) -> list[Lessons]:
    """The lessons of each passage.

    Args:
        job: whose model repeats them.
        passages: which.
        teacher: a scorer that needs a repetition.
    """
    generator, found = torch.Generator().manual_seed(job.state), []
    for passage in passages:
        tokens, looked_at = _repeated(job.subject, passage, teacher)
        some = torch.randperm(tokens.shape[2], generator=generator)[:_SAMPLED].sort().values
        found.append(Lessons(tokens[:, :, some].clone(), looked_at[:, :, some].clone()))
        job.advance("repetitions")
    return found


def _repeated(subject: Subject, passage: Passage, teacher: Scorer) -> tuple[Tensor, Tensor]:
    """(l, h, n, d + dv) and (l, h, n) of all tokens of a passage."""
    listening = _Listening(of=teacher)
    ids = passage.ids[None].to(subject.device)
    prefill(subject.model, ids, plan=Plan(score=listening, keep=1.0), tokenizer=subject.tokenizer)
    tokens, found = zip(*listening.heard, strict=True)
    return torch.stack(tokens), torch.stack(found)
