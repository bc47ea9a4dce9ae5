"""How far a plan's predictions lie from the full cache's, piece by piece: what the search compares plans by.

For each piece the context is prefilled and compressed, and the targets are fed on what is held. The first target is
told by the prefill, which nothing has compressed, and is left out. The reference is the plan 'full' on a cache of its
own.

Values, one for each piece: `kl` (mean of KL(full || plan) over its targets, nats per token), `nll` (nats per target
token), and of answers `hit` (1 where greedy decoding gives all of it). KL is the loss that is expected over all
texts that the model finds as likely as it does; it scatters far less over pieces than `nll` does, so that fewer pieces
tell plans apart. What the proof says is in `nll` and right answers, by the bench's own tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.subject import Subject, hash_of
from kvtailor.bench.tasks.contract import PlanByPlan, Sample, Scored
from kvtailor.bench.tasks.settings import Metric
from kvtailor.errors import KvtailorError
from kvtailor.fitting.pieces import TEXT, Piece

__all__ = ["Damage"]

_MOST_BYTES = 2 << 30
"""Of references that are kept; those of further pieces are computed again each time."""
_REFERENCES: WeakKeyDictionary[Any, dict[str, Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Damage(PlanByPlan):
    """Some pieces, one sample for each group of them.

    Attributes:
        pieces: what is scored.
    """

    name: ClassVar[str] = "damage"
    version: ClassVar[int] = 1
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="kl", unit="nats per token", higher_is_better=False, mean_of="kl"),
        Metric(name="nll", unit="nats per token", higher_is_better=False, mean_of="nll"),
        Metric(name="hit", unit="share", higher_is_better=True, mean_of="hit"),
    )
    values: ClassVar[tuple[str, ...]] = ("kl", "nll", "hit")
    by_sample: ClassVar[bool] = True
    pieces: tuple[Piece, ...]

    def groups(self) -> dict[str, list[Piece]]:
        """Return the pieces by their groups."""
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.group, []).append(piece)
        return found

    def points(self) -> int:
        return len(self.groups())

    def steps(self) -> int:
        return len(self.pieces)

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        full = next((each for each in contestants if each.is_full), None)
        if full is None:
            raise KvtailorError("asked for damage without the plan 'full', which all is compared to: add it")
        for group, pieces in self.groups().items():
            texts = [piece.text for piece in pieces]
            yield Sample(
                point={"group": group, "pieces": len(pieces)},
                text=" + ".join(dict.fromkeys(piece.source for piece in pieces)),
                text_hash=hash_of(*(each for piece in pieces for each in (piece.context, piece.targets))),
                steps=len(pieces),
                label=group,
                scored=lambda texts=texts: texts,  # type: ignore[misc]
                data=(full, pieces),
            )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        full, pieces = sample.data
        found: dict[str, list[float]] = {"kl": [], "nll": []}
        if any(piece.group != TEXT for piece in pieces):
            found["hit"] = []
        heaviest: Mapping[str, Any] = {}
        for piece in pieces:
            reference = _reference(subject, full, piece)
            ours, weight = _scores(subject, contestant, piece)
            if not bool(torch.isfinite(ours).all()):
                raise KvtailorError("The model gave a log-probability that is not a number.")
            apart = (reference.exp() * (reference - ours)).sum(-1).clamp_min(0)
            found["kl"].append(float(apart[1:].double().mean()))
            told = ours.gather(1, piece.targets[:, None])[1:, 0]
            found["nll"].append(-float(told.double().mean()))
            if "hit" in found:
                found["hit"].append(float(bool((ours.argmax(-1) == piece.targets).all())))
            if weight.get("bytes_held", 0) >= heaviest.get("bytes_held", 0):
                heaviest = weight
            advance()
        return Scored(
            samples=len(pieces),
            tokens_scored=sum(int(piece.targets.numel()) - 1 for piece in pieces),
            metrics={name: fmean(each) for name, each in found.items()},
            values={name: tuple(each) for name, each in found.items()},
            held=heaviest,
        )


def _reference(subject: Subject, full: Contestant, piece: Piece) -> Tensor:
    """(t, V) of the plan 'full'; kept while the model is there and memory allows."""
    kept = _REFERENCES.setdefault(subject.model, {})
    name = hash_of(piece.context, piece.targets)
    if name not in kept:
        scores = _scores(subject, full, piece)[0]
        if sum(each.nbytes for each in kept.values()) + scores.nbytes > _MOST_BYTES:
            return scores
        kept[name] = scores
    return kept[name]


def _scores(subject: Subject, contestant: Contestant, piece: Piece) -> tuple[Tensor, dict[str, Any]]:
    """(t, V) float32 log-probabilities on the CPU, and what the cache weighed after the context."""
    logits, cache = subject.prefill(piece.context[None], subject.new_cache(contestant), last_only=True)
    weight = weigh(cache)
    rest = subject.forward(piece.targets[None, :-1], cache)[0][0]
    return torch.cat([logits[0, -1:], rest]).float().log_softmax(-1).cpu(), weight
