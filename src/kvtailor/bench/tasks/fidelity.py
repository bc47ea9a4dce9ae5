"""How far a plan's predictions and attention lie from the full cache's, on the same tokens.

For each window of a text the context is prefilled and compressed, and the continuation is fed on what the cache holds,
as in `perplexity`. The reference is the plan 'full', in the same run, on a cache of its own.

Metrics of the predictions, over all continuation tokens: `kl` (mean of KL(full || plan) in nats), `kl_p99` and
`kl_p999` (its 99th percentile and that of 99.9 %), `kl_max` (the largest), `top1` (share of tokens of which both find
the same most likely), `ece` (expected calibration error of the plan's own predictions, 15 bins). Metrics of the
attention, means over layers (see `bench.measure.inside`; null where a model has no compressed layers): `key_error`,
`value_error`, `retained_mass`, `attention_cosine`, `output_error`, each also by layer as `output_error_0`, ... They
describe what is held: a plan that reads only a part of that loses more.

A mean over tokens hides a text that is lost. So each window counts as ruined where its continuation loses more than
`RUINED` nats a token over 'full' (`ruined`, the share of windows). And both decode greedily after the same context, up
to `GREEDY` tokens and no more than the continuation has: `divergence` is the mean number of tokens before the first one
in which their texts differ, where a window that never differs counts with all of them; `same_text` is the share of such
windows, and `repetition` the share of the plan's own runs of four tokens that its text had before.
Values: `kl`, `top1` and `nll_over_full`, the mean of each window; its `kl_max`; `ruined`, `same_text` (1 or 0),
`divergence` and `repetition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.measure.statistics import calibration_error, quantile
from kvtailor.bench.tasks.contract import AllAtOnce, NotANumber, Sample, Scored, Turns, hash_of
from kvtailor.bench.tasks.perplexity import Perplexity, Window, origin_notes, scored_pieces, whole_budgets
from kvtailor.bench.tasks.settings import (
    CONTEXT,
    CONTINUATION,
    STATE,
    WINDOWS,
    Column,
    Count,
    Metric,
    Shown,
    Whole,
    setting,
)
from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.subject import Subject

__all__ = ["GREEDY", "RUINED", "Fidelity", "repetition"]

RUINED = 0.5
"""Nats a token: a perplexity of 1.65 times that of the full cache."""
GREEDY = 64
_QUERIES = 8
_RUN = 4


@dataclass
class _Found:
    """What one plan gave so far, window by window."""

    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    right: list[Tensor] = field(default_factory=list)
    over: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    decoded: int = 0
    layers: list[dict[str, tuple[float, ...]]] = field(default_factory=list)
    weight: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fidelity(AllAtOnce):
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
    order: ClassVar[int] = 3
    reads_text: ClassVar[bool] = True
    of_each_text: ClassVar[bool] = True
    of_one_run: ClassVar[bool] = False
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="kl", unit="nats per token", higher_is_better=False, mean_of="kl"),
        Metric(name="kl_p99", unit="nats per token", higher_is_better=False),
        Metric(name="kl_p999", unit="nats per token", higher_is_better=False),
        Metric(name="kl_max", unit="nats", higher_is_better=False),
        Metric(name="ruined", unit="share", higher_is_better=False, mean_of="ruined"),
        Metric(name="divergence", unit="tokens", higher_is_better=True, mean_of="divergence"),
        Metric(name="same_text", unit="share", higher_is_better=True, mean_of="same_text"),
        Metric(name="repetition", unit="share", higher_is_better=False, mean_of="repetition"),
        Metric(name="top1", unit="share", higher_is_better=True, mean_of="top1"),
        Metric(name="ece", unit="share", higher_is_better=False, meaning="expected calibration error"),
        Metric(name="key_error", unit="relative", higher_is_better=False),
        Metric(name="value_error", unit="relative", higher_is_better=False),
        Metric(name="retained_mass", unit="share", higher_is_better=True),
        Metric(name="attention_cosine", unit="relative", higher_is_better=True),
        Metric(name="output_error", unit="relative", higher_is_better=False),
    )
    shown: ClassVar[Shown] = Shown(
        first=(Column("KL", "kl", 4), Column("top-1, %", "top1", 1, 100)),
        terminal=(Column("KL", "kl", 3), Column("top-1", "top1", 1, 100, unit=" %")),
        title="Fidelity",
        note=(
            "Against 'full' on the same tokens. Errors are relative, means over layers; the charts have them "
            "by layer. They describe what is held. Ruined: windows whose continuation loses more than 0.5 "
            "nats a token over 'full'. First difference: of two texts that are decoded greedily, up to 64 "
            "tokens, all of which count where none differs. Repeated: runs of four tokens in the plan's text "
            "that it had before. A largest value grows with the tokens."
        ),
        own=(
            Column("KL", "kl"),
            Column("KL, 99th percentile", "kl_p99"),
            Column("KL, 99.9 %", "kl_p999"),
            Column("largest KL", "kl_max"),
            Column("ruined, %", "ruined", scale=100),
            Column("tokens to first difference", "divergence", 1),
            Column("same text, %", "same_text", scale=100),
            Column("repeated, %", "repetition", scale=100),
            Column("top-1, %", "top1", scale=100),
            Column("calibration error, %", "ece", scale=100),
            Column("key error", "key_error"),
            Column("value error", "value_error"),
            Column("mass retained, %", "retained_mass", scale=100),
            Column("attention cosine", "attention_cosine", 4),
            Column("output error", "output_error"),
        ),
    )
    values: ClassVar[tuple[str, ...]] = (
        "kl",
        "top1",
        "kl_max",
        "nll_over_full",
        "ruined",
        "divergence",
        "same_text",
        "repetition",
    )
    by_sample: ClassVar[bool] = True
    text: str
    source: str
    origin: str | None = None
    context: Count = setting(512, option=CONTEXT, counts_tokens=True)
    continuation: Count = setting(128, option=CONTINUATION, counts_tokens=True)
    windows: Count = setting(20, option=WINDOWS)
    least_distinct: float = 0.9
    state: Whole = setting(0, option=STATE)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def steps(self) -> int:
        return self.windows

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        import torch

        from kvtailor.bench import checks

        windows = self._windows_task().cut(subject)
        checks.check_repetition([w.text for w in windows], self.least_distinct, self.source)
        full = next((each for each in contestants if each.is_full), None)
        yield Sample(
            point={"context": self.context, "continuation": self.continuation},
            text=self.source,
            text_hash=hash_of(*(torch.cat([w.context, w.targets]) for w in windows)),
            state=self.state or None,
            steps=self.windows,
            notes=tuple(origin_notes(self.source, self.origin)),
            scored=lambda: scored_pieces(windows, self.text),
            whole=self.text,
            data=(windows, full, whole_budgets(subject, contestants, windows[0], self.source)),
        )

    def score_all(
        self, subject: Subject, contestants: Sequence[Contestant], sample: Sample, turns: Turns
    ) -> Mapping[str, Scored]:
        windows, full, whole = sample.data
        if full is None:
            raise KvtailorError("asked for fidelity without the plan 'full', which all is compared to: add it")
        notes: dict[str, tuple[str, ...]] = {}
        found = {contestant.hash: _Found() for contestant in contestants}
        for window in windows:
            reference = _run(subject, full, window)
            decoded = min(GREEDY, window.targets.numel())
            text = _greedy(subject, full, window, decoded)
            for contestant in contestants:
                with turns(contestant) as live:
                    if live:
                        if contestant.hash not in notes:
                            notes[contestant.hash] = whole.check(contestant)
                        ours = reference if contestant is full else _run(subject, contestant, window)
                        _add(found[contestant.hash], reference, ours, window.targets)
                        mine = text if contestant is full else _greedy(subject, contestant, window, decoded)
                        _add_text(found[contestant.hash], text, mine)
        return {
            contestant.hash: _scored(found[contestant.hash], len(windows), notes[contestant.hash])
            for contestant in contestants
            if turns.live(contestant)
        }


def _scored(found: _Found, windows: int, notes: Sequence[str]) -> Scored:
    import torch

    from kvtailor.bench.measure.inside import LAYERWISE

    kl = torch.cat(found.kl)
    by_window: dict[str, tuple[float, ...]] = {
        "ruined": tuple(float(over > RUINED) for over in found.over),
        "divergence": tuple(map(float, found.agreed)),
        "same_text": tuple(float(agreed == found.decoded) for agreed in found.agreed),
        "repetition": tuple(found.repeated),
    }
    metrics: dict[str, float | None] = {
        "kl": float(kl.mean()),
        "kl_p99": quantile(kl.tolist(), 0.99),
        "kl_p999": quantile(kl.tolist(), 0.999),
        "kl_max": float(kl.max()),
        **{name: fmean(column) for name, column in by_window.items()},
        "top1": float(torch.cat(found.same).double().mean()),
        "ece": calibration_error(torch.cat(found.confidence).tolist(), torch.cat(found.right).tolist()),
    }
    for name in LAYERWISE:
        rows = [layers[name] for layers in found.layers]
        by_layer = [fmean(column) for column in zip(*rows, strict=True)] if rows else []
        metrics[name] = fmean(by_layer) if by_layer else None
        metrics |= {f"{name}_{index}": value for index, value in enumerate(by_layer)}
    return Scored(
        samples=windows,
        tokens_scored=int(kl.numel()),
        metrics=metrics,
        values={
            "kl": tuple(float(x.mean()) for x in found.kl),
            "top1": tuple(float(x.double().mean()) for x in found.same),
            "kl_max": tuple(float(x.max()) for x in found.kl),
            "nll_over_full": tuple(found.over),
            **by_window,
        },
        notes=notes,
        held=found.weight,
    )


@dataclass(frozen=True)
class _Run:
    """One window under one plan: (t, V) float32 log-probabilities, and what the cache held before the continuation."""

    scores: Tensor
    held: list[Any] | None
    queries: list[Any]
    weight: dict[str, Any]


def _run(subject: Subject, contestant: Contestant, window: Window) -> _Run:
    import torch

    from kvtailor.bench.measure.inside import contents, queries_of
    from kvtailor.hf.cache import KvCache

    logits, cache = subject.prefill(window.context[None], subject.new_cache(contestant), last_only=True)
    weight = weigh(cache)
    held = contents(cache) if isinstance(cache, KvCache) else None
    rows, queries = [logits[0, -1:]], []
    if window.targets.numel() > 1:
        if held is None:
            rows.append(subject.forward(window.targets[None, :-1], cache, ends=True)[0][0])
        else:
            with queries_of(cache) as queries:
                rows.append(subject.forward(window.targets[None, :-1], cache, ends=True)[0][0])
    scores = torch.cat(rows).float().cpu().log_softmax(-1)
    if bool(scores.isnan().any()):
        raise NotANumber.of_logits()
    return _Run(scores, held, queries, weight)


def _greedy(subject: Subject, contestant: Contestant, window: Window, tokens: int) -> list[int]:
    """The tokens that a plan decodes after the window's context, each the likeliest."""
    import torch

    logits, cache = subject.prefill(window.context[None], subject.new_cache(contestant), last_only=True)
    made = [int(logits[0, -1].argmax())]
    while len(made) < tokens:
        logits, cache = subject.forward(torch.tensor([made[-1:]]), cache, last_only=True)
        made.append(int(logits[0, -1].argmax()))
    return made


def _add_text(found: _Found, text: Sequence[int], mine: Sequence[int]) -> None:
    agreed = next((place for place, (a, b) in enumerate(zip(text, mine, strict=True)) if a != b), len(text))
    found.agreed.append(agreed)
    found.repeated.append(repetition(mine))
    found.decoded = len(text)


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of runs of four tokens that stood in the text before; 0 where it has no two runs."""
    runs = [tuple(tokens[place : place + _RUN]) for place in range(len(tokens) - _RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _add(found: _Found, reference: _Run, ours: _Run, targets: Tensor) -> None:
    from kvtailor.bench.measure.inside import compare_layers

    found.kl.append((reference.scores.exp() * (reference.scores - ours.scores)).sum(-1).clamp_min(0).double())
    behind = (reference.scores - ours.scores).gather(-1, targets[:, None].to(ours.scores.device))
    found.over.append(float(behind.double().mean()))
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
    import torch

    count = min(_QUERIES, states.shape[1])
    return states[:, torch.linspace(0, states.shape[1] - 1, count).long()]
