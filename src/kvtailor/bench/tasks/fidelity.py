"""How far a plan's predictions and attention lie from the full cache's, on the same tokens.

For each window of a text the context is prefilled and compressed, and the continuation is fed on what the cache holds,
as in `perplexity`. The reference is the plan 'full', in the same run, on a cache of its own.

Metrics of the predictions, over all continuation tokens: `kl` (mean of KL(full || plan) in nats), `kl_p99` (its 99th
percentile), `top1` (share of tokens of which both find the same most likely), `ece` (expected calibration error of the
plan's own predictions, 15 bins). Metrics of the attention, means over layers (see `bench.measure.inside`; null where
a model has no compressed layers): `key_error`, `value_error`, `retained_mass`, `attention_cosine`, `output_error`, each
also by layer as `output_error_0`, ... They describe what is held: a plan that reads only a part of that loses more.
Values: `kl` and `top1`, the mean of each window.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtailor.bench import checks
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.measure.inside import LAYERWISE, compare_layers, contents, queries_of
from kvtailor.bench.measure.statistics import calibration_error, quantile
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject, hash_of
from kvtailor.bench.tasks import Given, Task
from kvtailor.bench.tasks.perplexity import Perplexity, Window, origin_notes, whole_budgets
from kvtailor.errors import KvtailorError

__all__ = ["Fidelity"]

_QUERIES = 8


@dataclass
class _Found:
    """What one plan gave so far, window by window."""

    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    layers: list[dict[str, tuple[float, ...]]] = field(default_factory=list)
    weight: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fidelity(Task):
    """The windows of `Perplexity`, compared with 'full' token by token.

    Attributes:
        text: the text itself.
        source: its name in records and reports.
        origin: where a corpus was read from, for a note; None: the name says it.
        context: tokens that are prefilled and compressed.
        continuation: tokens that are compared.
        windows: how many.
        least_distinct: see `checks.check_repetition`.
        state: see `Perplexity`.
    """

    name: ClassVar[str] = "fidelity"
    version: ClassVar[int] = 1
    text: str
    source: str
    origin: str | None = None
    context: int = 512
    continuation: int = 128
    windows: int = 20
    least_distinct: float = 0.9
    state: int = 0

    def __post_init__(self) -> None:
        self._windows_task()

    def _windows_task(self) -> Perplexity:
        return Perplexity(
            text=self.text,
            source=self.source,
            context=self.context,
            continuation=self.continuation,
            windows=self.windows,
            state=self.state,
        )

    def texts(self) -> dict[str, str]:
        return {self.source: self.text}

    def units(self, contestants: int) -> int:
        return self.windows * contestants

    def measure(self, given: Given) -> Iterator[Record]:
        begin = time.perf_counter()
        windows = self._windows_task().cut(given.subject)
        checks.check_repetition([w.text for w in windows], self.least_distinct, self.source)
        blanks = [self._blank(given, contestant, windows) for contestant in given.contestants]
        known = [given.known(blank) for blank in blanks]
        if all(known):
            for _ in range(self.units(len(blanks))):
                given.advance("fidelity")
            yield from (record for record in known if record is not None)
            return
        full = next((c for c in given.contestants if c.label == "full"), None)
        if full is None:
            raise KvtailorError("asked for fidelity without the plan 'full', which all is compared to: add it")
        pieces = [w.text for w in windows] if all(w.text for w in windows) else [self.text]
        for contestant in given.contestants:
            checks.check_calibration(contestant.calibration, pieces, self.source, whole=self.text)
        whole = whole_budgets(given, windows[0], self.source)
        blanks = [
            blank
            if earlier is not None
            else replace(blank, notes=(*origin_notes(self.source, self.origin), *whole.check(contestant)))
            for contestant, blank, earlier in zip(given.contestants, blanks, known, strict=True)
        ]
        found = [_Found() for _ in given.contestants]
        for window in windows:
            reference = _run(given.subject, full, window)
            for contestant, blank, result, earlier in zip(given.contestants, blanks, found, known, strict=True):
                if result.error is None and earlier is None:
                    try:
                        ours = reference if contestant is full else _run(given.subject, contestant, window)
                        _add(result, reference, ours, window.targets)
                    except (KvtailorError, ValueError) as error:
                        result.error = str(error)
                given.advance(f"fidelity · {blank.label}")
        for _ in range((self.windows - len(windows)) * len(blanks)):
            given.advance("fidelity")
        for blank, result, earlier in zip(blanks, found, known, strict=True):
            yield earlier if earlier is not None else self._record(blank, result, windows, time.perf_counter() - begin)

    def _blank(self, given: Given, contestant: Contestant, windows: Sequence[Window]) -> Record:
        return replace(
            given.blank(contestant),
            point={"context": self.context, "continuation": self.continuation},
            text=self.source,
            text_hash=hash_of(*(torch.cat([w.context, w.targets]) for w in windows)),
            state=self.state or None,
        )

    def _record(self, blank: Record, found: _Found, windows: Sequence[Window], wall: float) -> Record:
        if found.error is not None:
            return replace(blank, error=found.error)
        kl = torch.cat(found.kl)
        metrics: dict[str, float | None] = {
            "kl": float(kl.mean()),
            "kl_p99": quantile(kl.tolist(), 0.99),
            "top1": float(torch.cat(found.same).double().mean()),
            "ece": calibration_error(torch.cat(found.confidence).tolist(), torch.cat(found.right).tolist()),
        }
        for name in LAYERWISE:
            rows = [layers[name] for layers in found.layers]
            by_layer = [fmean(column) for column in zip(*rows, strict=True)] if rows else []
            metrics[name] = fmean(by_layer) if by_layer else None
            metrics |= {f"{name}_{index}": value for index, value in enumerate(by_layer)}
        return replace(
            blank,
            samples=len(windows),
            tokens_scored=int(kl.numel()),
            metrics=metrics,
            values={
                "kl": tuple(float(x.mean()) for x in found.kl),
                "top1": tuple(float(x.double().mean()) for x in found.same),
            },
            wall_seconds=wall,
            **found.weight,
        )


@dataclass(frozen=True)
class _Run:
    """One window under one plan: (t, V) float32 log-probabilities, and what the cache held before the continuation."""

    scores: Tensor
    held: list[Any] | None
    queries: list[Any]
    weight: dict[str, Any]


def _run(subject: Subject, contestant: Contestant, window: Window) -> _Run:
    logits, cache = subject.prefill(window.context[None], subject.new_cache(contestant), last_only=True)
    weight = weigh(cache)
    held = contents(cache) if hasattr(cache, "engine") else None
    rows, queries = [logits[0, -1:]], []
    if window.targets.numel() > 1:
        if held is None:
            rows.append(subject.forward(window.targets[None, :-1], cache)[0][0])
        else:
            with queries_of(cache) as queries:
                rows.append(subject.forward(window.targets[None, :-1], cache)[0][0])
    return _Run(torch.cat(rows).float().cpu().log_softmax(-1), held, queries, weight)


def _add(found: _Found, reference: _Run, ours: _Run, targets: Tensor) -> None:
    found.kl.append((reference.scores.exp() * (reference.scores - ours.scores)).sum(-1).clamp_min(0).double())
    best, place = ours.scores.max(-1)
    found.same.append(place == reference.scores.argmax(-1))
    found.confidence.append(best.exp())
    found.right.append(place == targets)
    if reference.held is not None and ours.held is not None and reference.queries:
        some = [replace(each, states=_spread(each.states)) for each in reference.queries]
        found.layers.append(compare_layers(reference.held, ours.held, some))
    if ours.weight.get("bytes_held", 0) >= found.weight.get("bytes_held", 0):
        found.weight = ours.weight


def _spread(states: Tensor) -> Tensor:
    """At most `_QUERIES` of the queries (q, t, d), evenly spread."""
    count = min(_QUERIES, states.shape[1])
    return states[:, torch.linspace(0, states.shape[1] - 1, count).long()]
