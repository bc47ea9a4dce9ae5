"""Networks that a repetition of a passage teaches: what it finds of each token, what they may read of it, training.

A network for each kv head of each layer is trained, all at once, and it is told how well each agrees with its teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtailor.bench.measure.statistics import mean_difference
from kvtailor.bench.subject import Subject
from kvtailor.calibration.contract import Job
from kvtailor.calibration.passages import Passage
from kvtailor.errors import KvtailorError
from kvtailor.hf.run.prefill import prefill
from kvtailor.plan import Plan
from kvtailor.score.by_repetition.own_token import own_token
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = [
    "Lessons",
    "Networks",
    "Scales",
    "Predict",
    "STEPS_TOLD",
    "agreement",
    "judged",
    "lessons_of",
    "scales",
    "split",
    "train",
]

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


Networks = dict[str, Tensor]
Predict = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""From tokens (l, h, n, d + dv) and networks to what is predicted of each, (l, h, n)."""
STEPS_TOLD = 50
_RATE = 1e-3
_AT_ONCE = 512
_CLIPPED = 1.0
_SHARE = 0.25


class Scales(NamedTuple):
    """How numbers of tokens are spread: networks read them less `middle`, over `scale`, both (l, h, d + dv)."""

    middle: Tensor
    scale: Tensor


def scales(lessons: Sequence[Lessons]) -> Scales:
    """Return mean and standard deviation of what a network reads."""
    together = torch.cat([each.tokens for each in lessons], 2).float()
    return Scales(together.mean(2), together.std(2).clamp_min(1e-3))


def train(
    lessons: Sequence[Lessons],
    networks: Mapping[str, Tensor],
    predict: Predict,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    scales: Scales,
    steps: int,
    state: int,
    advance: Callable[[str], None] = lambda what: None,
) -> Networks:
    """The networks after so many steps of AdamW, 512 tokens each, with a rate that falls from 1e-3 as a cosine.

    Args:
        lessons: at least one.
        networks: to begin with, each (l, h, ...).
        predict: what they say.
        loss: from what they say and what was found to one number.
        scales: of what the networks read.
        steps: of the optimizer.
        state: random state of the order.
        advance: called after each `STEPS_TOLD` of them.

    Raises:
        KvtailorError: training ended with numbers that are none.
    """
    tokens, found = torch.cat([each.tokens for each in lessons], 2), torch.cat([each.found for each in lessons], 2)
    learned = {name: tensor.clone().requires_grad_() for name, tensor in networks.items()}
    descent = torch.optim.AdamW(learned.values(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(descent, steps)
    generator = torch.Generator().manual_seed(state)
    with torch.enable_grad():
        for step in range(1, steps + 1):
            some = torch.randint(tokens.shape[2], (_AT_ONCE,), generator=generator)
            read = (tokens[:, :, some].float() - scales.middle[:, :, None]) / scales.scale[:, :, None]
            lost = loss(predict(read, learned), found[:, :, some])
            descent.zero_grad()
            lost.backward()
            torch.nn.utils.clip_grad_norm_(learned.values(), _CLIPPED)
            descent.step()
            schedule.step()
            if step % STEPS_TOLD == 0:
                advance("training")
    made = {name: tensor.detach().clone() for name, tensor in learned.items()}
    if not all(bool(tensor.isfinite().all()) for tensor in made.values()):
        raise KvtailorError("training ended with weights that are no numbers: give more text, or another random state")
    return made


def agreement(said: Tensor, found: Tensor) -> float:
    """The share of each head's best quarter by `found` (l, h, n) that is in its best quarter by `said`, mean over all.

    A random choice has a quarter.
    """
    count = max(1, round(_SHARE * found.shape[-1]))
    ours, theirs = (torch.zeros_like(found).scatter(-1, of.topk(count, -1).indices, 1.0) for of in (said, found))
    return float((ours * theirs).sum(-1).mean() / count)


def judged(
    held_out: Sequence[Lessons],
    before: Networks,
    made: Networks,
    predict: Predict,
    loss: Callable[[Tensor, Tensor], Tensor],
    teacher: str,
) -> dict[str, Any]:
    """Facts of a file: the loss on passages that were held out, before and after, and the agreement with the teacher.

    Args:
        held_out: at least one.
        before: the networks that training began with.
        made: those that it ended with.
        predict, loss: see `train`.
        teacher: name of the scorer that gave what was found.
    """
    said = [predict(each.tokens.float(), made) for each in held_out]
    losses = {
        when: sum(float(loss(predict(each.tokens.float(), networks), each.found)) for each in held_out) / len(held_out)
        for when, networks in (("before", before), ("after", made))
    }
    agreed = [agreement(one, each.found) for one, each in zip(said, held_out, strict=True)]
    more = mean_difference(agreed, [_SHARE] * len(agreed))
    interval = more.map(lambda each: _SHARE + each).interval(1, scale=100) or "one passage"
    return {
        "verdict": (
            f"keeps {100 * sum(agreed) / len(agreed):.1f} % ({interval}) of the quarter of tokens that {teacher} keeps "
            f"in a head, on {len(held_out)} held-out passages; a random quarter has 25 %"
        ),
        "held_out": {"passages": len(held_out), "loss": losses, "agreement": agreed, "teacher": teacher},
    }
