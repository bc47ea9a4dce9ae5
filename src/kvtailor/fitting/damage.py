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
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import NotANumber, PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.settings import Metric
from kvtailor.errors import KvtailorError
from kvtailor.fitting.pieces import TEXT, Piece
from kvtailor.types.late_checks import all_finite

__all__ = ["Damage"]

_MOST_BYTES = 2 << 30
"""Of references that are kept; those of further pieces are computed again each time."""
_ROWS = 8
"""Targets whose log-probabilities are compared at a time."""
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
            logits, weight = _logits(subject, contestant, piece)
            losses = _compare(reference, logits, piece.targets)
            found["kl"].append(float(losses.apart[1:].mean()))
            found["nll"].append(-float(losses.told[1:].mean()))
            if "hit" in found:
                found["hit"].append(float(bool((losses.likeliest == piece.targets).all())))
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
        scores = torch.cat(_logits(subject, full, piece)[0]).float().log_softmax(-1).cpu()
        if sum(each.nbytes for each in kept.values()) + scores.nbytes > _MOST_BYTES:
            return scores
        kept[name] = scores
    return kept[name]


def _logits(subject: Subject, contestant: Contestant, piece: Piece) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """(1, V) of the prefill and (t - 1, V) of the targets behind it, and what the cache weighed after the context."""
    context = piece.context[None]
    logits, cache = subject.prefill(context, subject.new_cache(contestant), last_only=True)
    weight = weigh(cache)
    return (logits[0, -1:], subject.follow(context, piece.targets[None, :-1], cache)[0]), weight


class _Losses(NamedTuple):
    """Of each target: KL to the full cache, its log-probability in float64, and the likeliest token, all (t,)."""

    apart: Tensor
    told: Tensor
    likeliest: Tensor


def _compare(reference: Tensor, logits: Sequence[Tensor], targets: Tensor) -> _Losses:
    """Compare predictions with the full cache's.

    Args:
        reference: (t, V) float32 log-probabilities on the CPU.
        logits: (t, V) of the plan, in pieces of whole rows.
        targets: (t,) int64.

    Raises:
        NotANumber: a log-probability is not a number.
    """
    apart, told, likeliest = [], [], []
    first = 0
    # A few rows at a time stay in a core's cache; tensors of all rows would be new memory each time.
    for rows in (rows for piece in logits for rows in piece.split(_ROWS)):
        ours = rows.float().log_softmax(-1).cpu()
        if not bool(all_finite(ours)):
            raise NotANumber.of_logits()
        whole = reference[first : first + len(rows)]
        apart.append((whole.exp() * (whole - ours)).sum(-1).clamp_min(0).double())
        told.append(ours.gather(1, targets[first : first + len(rows), None])[:, 0].double())
        likeliest.append(ours.argmax(-1))
        first += len(rows)
    return _Losses(torch.cat(apart), torch.cat(told), torch.cat(likeliest))
