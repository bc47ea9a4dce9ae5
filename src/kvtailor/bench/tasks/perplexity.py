"""Perplexity of a continuation on the compressed cache.

For each window of a text: the context is prefilled and compressed, and the continuation is fed on what the cache then
holds, with its own positions: in one go, or streamed in chunks of a few tokens, after each of which a plan that evicts
while it decodes may evict. The first target is scored from the prefill's logits, the others from the continuation's.
All plans score the same tokens of the same windows.

Metrics: `nll` (nats per target token), `perplexity` (exp of it), `bits_per_byte` (None where the tokenizer gives no
offsets), `distinct_8grams` (of the windows' words). Values: `nll`, the mean over each window's targets, and where it is
known `document`, the number of the document that its first target is from.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from kvtailor.bench.contestant import OWN_ROUNDED, Contestant
from kvtailor.bench.measure.cache_fields import weigh
from kvtailor.bench.tasks.contract import Demand, NotANumber, PlanByPlan, Sample, Scored, hash_of
from kvtailor.bench.tasks.settings import (
    CONTEXT,
    CONTINUATION,
    STATE,
    WINDOWS,
    Column,
    Count,
    Metric,
    Option,
    Shown,
    Whole,
    setting,
)
from kvtailor.errors import ArgumentError, KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.checks.reference import ReferenceScores
    from kvtailor.bench.checks.whole import WholeBudgets
    from kvtailor.bench.subject import Subject, Tokens

__all__ = ["Perplexity", "Window", "score_window", "scored_pieces", "whole_budgets"]

_CHECKED = 2
"""Windows that the sanity checks of a plan read besides."""


@dataclass(frozen=True)
class Window:
    """One piece of the text.

    Attributes:
        context: (n,) int64, the tokenizer's beginning tokens included.
        targets: (t,) int64.
        bytes: UTF-8 bytes of the targets' text; None where unknown.
        text: the whole window as text.
        document: which document of the text its first target is from; None where that is not known.
    """

    context: Tensor
    targets: Tensor
    bytes: int | None
    text: str
    document: int | None = None


@dataclass(kw_only=True)
class _Shared:
    """What all plans of a run have in common.

    Attributes:
        windows: the windows.
        distinct: share of different runs of 8 words.
        whole: tries plans at their whole budget.
        first: the null plan, or the first plan where there is none.
        own: scores and weights of the model's own cache, once they were needed.
        rounding: most by which a token's log-probability differs by rounding alone, once it was needed.
    """

    windows: list[Window]
    distinct: float | None
    whole: WholeBudgets
    first: Contestant
    own: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    rounding: float | None = None


@dataclass(frozen=True, kw_only=True)
class Perplexity(PlanByPlan):
    """Context-then-continue over windows of a text that do not overlap and are spread evenly over it.

    Attributes:
        text: the text itself.
        source: its name in records and reports.
        origin: where a corpus was read from, for a note; None: the name says it.
        starts: where the documents of the text begin, in characters; empty where that is not known.
        context: tokens that are prefilled and compressed.
        continuation: tokens that are scored.
        chunk: tokens of the continuation that are fed at once; None: all of them, so that they see each other exactly.
        beyond: a window may have more tokens than the model has positions, to see how a plan that streams fares there.
        windows: how many; fewer are taken, and it is said, where the text is too short.
        tolerance: most that 'full' may differ from the model's own cache, in nats of one token; None: as much as
            rounding gives, see `checks.check_identity`.
        least_distinct: see `checks.check_repetition`.
        state: 0: the windows that are spread evenly over the text. Any other chooses others at random, from another
            beginning, and is in every record.
        own_windows: on how many of them 'full' is held against the model's own cache; None: on all.
        finely: plans at their whole budget are held against 'full' in a finer dtype too, see `WholeBudgets`.
        probes: each plan is tried at its whole budget, and is seen to read what it holds and to list all of it.
        whole_chunk: tokens that are fed at once to plans at their whole budget; None: all.
    """

    name: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 2
    order: ClassVar[int] = 1
    usual: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    of_each_text: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="nll", unit="nats per token", higher_is_better=False, mean_of="nll"),
        Metric(name="perplexity", unit="perplexity", higher_is_better=False, meaning="exp of nll"),
        Metric(name="bits_per_byte", unit="bits per byte", higher_is_better=False),
        Metric(name="distinct_8grams", unit="share", meaning="of the text, whatever the plan"),
    )
    shown: ClassVar[Shown] = Shown(
        first=(
            Column("nats over full", "nll_over_full", 4, sign=True, interval=True, is_difference=True),
            Column("perplexity", "perplexity", 3),
            Column("bits per byte", "bits_per_byte", 4),
        ),
        terminal=(Column("ΔNLL (95 %)", "nll_over_full", 3, sign=True, interval=True, is_difference=True),),
    )
    values: ClassVar[tuple[str, ...]] = ("nll",)
    by_sample: ClassVar[bool] = True
    own_windows: ClassVar[int | None] = None
    finely: ClassVar[bool] = True
    probes: ClassVar[bool] = True
    whole_chunk: ClassVar[int | None] = 1
    text: str
    source: str
    origin: str | None = None
    starts: tuple[int, ...] = ()
    context: Count = setting(512, option=CONTEXT, counts_tokens=True)
    continuation: Count = setting(128, option=CONTINUATION, counts_tokens=True)
    chunk: Count | None = setting(
        None,
        option=Option(
            flag="--chunk",
            help="Feed the continuation so many tokens at a time, so that eviction while decoding acts.  [all at once]",
        ),
    )
    beyond: bool = setting(
        False,
        option=Option(
            flag="--beyond",
            help="Windows may be longer than what the model was made for, as in streaming.",
        ),
    )
    windows: Count = setting(50, option=WINDOWS)
    tolerance: float | None = None
    least_distinct: float = 0.9
    state: Whole = setting(0, option=STATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.continuation < 2:
            raise ArgumentError(
                f"asked for {self.continuation} token behind windows of {self.context}: the prompt's own logits "
                "score it, and no cache is read: give a continuation of 2 or more (where none is given "
                "it is a quarter of the context)"
            )

    def texts(self) -> dict[str, str]:
        return {self.source: self.text}

    def steps(self) -> int:
        return self.windows

    def units(self, contestants: int) -> int:
        # The null plan is held against the model's own cache, which takes as many steps once more.
        own = self.windows if self.own_windows is None else self.own_windows
        return self.windows * contestants + min(self.windows, own)

    def demand(self) -> Demand:
        tokens = self.continuation * (self.windows + _CHECKED)
        one_by_one = self.chunk == 1
        return Demand(
            prompts={self.context: self.windows + _CHECKED},
            following=0 if one_by_one else tokens,
            decoded=tokens if one_by_one else 0,
        )

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        import torch

        from kvtailor.bench import checks

        windows, share = self.cut_distinct(subject)
        checks.check_distinct([hash_of(w.context, w.targets) for w in windows], self.source)
        notes = origin_notes(self.source, self.origin)
        size, positions = self.context + self.continuation, subject.positions
        if positions is not None and size > positions:
            notes.append(
                f"Windows of {size} tokens: the model was made for {positions}, 'full' is no yardstick past them."
            )
        if len(windows) < self.windows:
            notes.append(f"The text has room for {len(windows)} windows, not for {self.windows}.")
        yield Sample(
            point={"context": self.context, "continuation": self.continuation, "chunk": self.chunk},
            text=self.source,
            text_hash=hash_of(*(torch.cat([w.context, w.targets]) for w in windows)),
            state=self.state or None,
            steps=self.windows,
            notes=tuple(notes),
            scored=lambda: scored_pieces(windows, self.text),
            whole=self.text,
            data=_Shared(
                windows=windows,
                distinct=share,
                whole=whole_budgets(
                    subject, contestants, windows[0], self.source, finely=self.finely, chunk=self.whole_chunk
                ),
                first=next((each for each in contestants if each.is_full), contestants[0]),
            ),
        )

    def score(self, subject: Subject, contestant: Contestant, sample: Sample, advance: Callable[[], None]) -> Scored:
        from kvtailor.bench import checks
        from kvtailor.bench.checks.probing import probe

        shared: _Shared = sample.data
        windows = shared.windows
        tried = shared.whole.check(contestant) if self.probes else ()
        scored = self._run(subject, contestant, windows, advance)
        if contestant.is_full and self.own_windows != 0:
            shared.own = shared.own or self._run(subject, OWN_ROUNDED, windows[: self.own_windows], advance)
            said = self._check_identity(subject, scored[: self.own_windows], shared.own, windows)
            tried += () if said is None else (said,)
        nll = tuple(-float(s.mean()) for s, _ in scored)
        if not all(math.isfinite(x) for x in nll):
            raise NotANumber.of_logits()
        heaviest = max((w for _, w in scored), key=lambda w: w.get("bytes_held", 0))
        if self.probes and contestant.is_full:
            shared.rounding = self._rounding(subject, contestant, windows[0], scored[0][0])
        elif self.probes and checks.is_smaller(heaviest):
            if shared.rounding is None:
                shared.rounding = self._rounding(subject, shared.first, windows[0])
            heaviest |= probe(
                subject,
                contestant,
                windows[-1].context,
                windows[-1].targets,
                scored[-1][0],
                shared.rounding,
                self.chunk,
            )
        documents = [float(window.document) for window in windows if window.document is not None]
        return Scored(
            samples=len(windows),
            tokens_scored=sum(int(w.targets.numel()) for w in windows),
            metrics={
                "nll": fmean(nll),
                "perplexity": _exp(fmean(nll)),
                "bits_per_byte": _bits_per_byte([-float(s.sum()) for s, _ in scored], [w.bytes for w in windows]),
                "distinct_8grams": shared.distinct,
            },
            values={"nll": nll, **({"document": documents} if len(documents) == len(windows) else {})},
            notes=tried,
            held=heaviest,
        )

    def cut_distinct(self, subject: Subject) -> tuple[list[Window], float | None]:
        """The windows, and what share of their words' runs is different, see `checks.check_repetition`.

        Raises:
            Fraud: "repeated text", where that is too small.
            KvtailorError: see `cut`.
        """
        from kvtailor.bench import checks

        windows = self.cut(subject)
        return windows, checks.check_repetition([w.text for w in windows], self.least_distinct, self.source)

    def cut(self, subject: Subject) -> list[Window]:
        """The windows, the same for every plan.

        Raises:
            KvtailorError: the model's positions or the text are too short for one window.
        """
        start = subject.start()
        size = self.context + self.continuation
        if subject.positions is not None and size > subject.positions and not self.beyond:
            raise KvtailorError(
                f"asked for windows of {self.context} + {self.continuation} tokens, but {subject.name} has "
                f"{subject.positions} "
                "positions: ask for a shorter --context or --continuation, or for --beyond"
            )
        if self.context <= start.numel():
            raise KvtailorError(
                f"asked for a context of {self.context} token, which the beginning token fills: ask for more"
            )
        tokens = subject.tokens(self.text)
        stride = size - start.numel()
        fit = tokens.ids.numel() // stride
        if fit < 1:
            raise KvtailorError(
                f"asked for windows of {size} tokens, but {self.source} has {tokens.ids.numel()} tokens: give a "
                "longer text or ask "
                "for a shorter --context"
            )
        starts = self._starts_in_bytes()
        if self.state:
            draw = random.Random(f"windows:{self.state}")
            first = draw.randrange(tokens.ids.numel() - fit * stride + 1 if fit == 1 else stride)
            fit = (tokens.ids.numel() - first) // stride
            chosen = sorted(draw.sample(range(fit), min(fit, self.windows)))
            return [self._window(tokens, start, first + i * stride, stride, starts) for i in chosen]
        count = min(fit, self.windows)
        return [self._window(tokens, start, i * fit // count * stride, stride, starts) for i in range(count)]

    def _starts_in_bytes(self) -> list[int]:
        pieces = [self.text[a:b] for a, b in pairwise([0, *self.starts])]
        return list(accumulate(len(piece.encode()) for piece in pieces))

    def _window(self, tokens: Tokens, start: Tensor, at: int, stride: int, starts: Sequence[int]) -> Window:
        import torch

        split, end = at + stride - self.continuation, at + stride
        if tokens.ends is None:
            return Window(torch.cat([start, tokens.ids[at:split]]), tokens.ids[split:end], None, "")
        text = tokens.text.encode()[(tokens.ends[at - 1] if at else 0) : tokens.ends[end - 1]].decode(errors="replace")
        size = tokens.ends[end - 1] - tokens.ends[split - 1]
        document = bisect_right(starts, tokens.ends[split - 1]) if starts else None
        return Window(torch.cat([start, tokens.ids[at:split]]), tokens.ids[split:end], size, text, document)

    def _run(
        self, subject: Subject, contestant: Contestant, windows: Sequence[Window], advance: Callable[[], None]
    ) -> list[tuple[Tensor, dict[str, Any]]]:
        found = []
        for window in windows:
            found.append(score_window(subject, contestant, window.context, window.targets, self.chunk))
            advance()
        return found

    def _rounding(self, subject: Subject, full: Contestant, window: Window, scores: Tensor | None = None) -> float:
        from kvtailor.bench.checks.probing import rounding_of

        if scores is None:
            scores = score_window(subject, full, window.context, window.targets, self.chunk)[0]
        return rounding_of(subject, full, window.context, window.targets, scores, self.chunk)

    def _check_identity(
        self,
        subject: Subject,
        ours: Sequence[tuple[Tensor, Any]],
        own: Sequence[tuple[Tensor, Any]],
        windows: Sequence[Window],
    ) -> str | None:
        """See `checks.check_identity`."""
        from kvtailor.bench import checks
        from kvtailor.bench.checks.reference import reference_of

        flat, stock = ([scores for scores, _ in each] for each in (ours, own))
        if any(bool(each.isnan().any()) for each in stock):
            raise NotANumber(subject.not_a_number(f"of {self.source}"))

        def reference(chosen: Sequence[int]) -> ReferenceScores:
            some = [windows[index] for index in chosen]

            def score(contestant: Contestant) -> list[Tensor]:
                return [score_window(subject, contestant, w.context, w.targets, self.chunk)[0] for w in some]

            return reference_of(subject, score, self.context + self.continuation, Contestant.of("full"))

        return checks.check_identity(flat, stock, subject.cache_dtype, self.source, reference, self.tolerance)


def origin_notes(source: str, origin: str | None) -> list[str]:
    """Where a corpus came from, as a note of a record."""
    return [] if origin is None else [f"{source} was read from {origin}."]


def scored_pieces(windows: Sequence[Window], text: str) -> list[str]:
    """The windows as texts; the text itself where the tokenizer gives no offsets."""
    return [w.text for w in windows] if all(w.text for w in windows) else [text]


def whole_budgets(
    subject: Subject,
    contestants: Sequence[Contestant],
    window: Window,
    source: str,
    *,
    finely: bool = True,
    chunk: int | None = 1,
) -> WholeBudgets:
    """Tries plans at their whole budget on the first tokens after a window's context, `chunk` at once; None: all."""
    from kvtailor.bench.checks.whole import WholeBudgets

    full = next((contestant for contestant in contestants if contestant.is_full), OWN_ROUNDED)

    def score(contestant: Contestant, count: int) -> Tensor:
        return score_window(subject, contestant, window.context, window.targets[:count], chunk)[0]

    return WholeBudgets(subject, full, score, source, window.context.numel(), window.targets.numel(), finely=finely)


def score_window(
    subject: Subject, contestant: Contestant, context: Tensor, targets: Tensor, chunk: int | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Log-probability of each target (t,) after a compressed context (n,), and what the cache weighed.

    It is weighed before the targets, or after them if they are fed in chunks of ``chunk`` tokens.
    """
    from kvtailor.bench.checks.probing import fed_scores

    logits, cache = subject.prefill(context[None], subject.new_cache(contestant), last_only=True)
    weight = weigh(cache)
    scores = fed_scores(subject, logits[0, -1:], cache, targets, chunk)
    return scores, weight if chunk is None else weigh(cache)


def _exp(nats: float) -> float:
    """Return e to the power of some nats; infinity, which no record takes, where that is more than a float holds."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _bits_per_byte(nats: Sequence[float], sizes: Sequence[int | None]) -> float | None:
    if any(size is None for size in sizes):
        return None
    total = sum(size for size in sizes if size is not None)
    return sum(nats) / math.log(2) / total if total else None
