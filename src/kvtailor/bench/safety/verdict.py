"""What a check shows of each plan, and which to take. Made of records and bytes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtailor.bench.measure.equivalence import losses_of, outcome
from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report.tables.quality import difference, documents_over
from kvtailor.bench.schema import Record

__all__ = [
    "HARMFUL",
    "NOT_MEASURED",
    "NOT_SHOWN",
    "SAFE",
    "SHARES",
    "Answered",
    "Verdict",
    "judged",
    "mildest",
    "taken",
]

SAFE, HARMFUL, NOT_SHOWN, NOT_MEASURED = "safe", "harmful", "not shown", "not measured"
SHARES = {"about half": 0.5, "a quarter": 0.25, "a fifth": 0.2, "an eighth": 0.125}
"""Of 16-bit bytes, by their words."""
_ABOUT = 1.13  # a plan of 0.28 of the bytes is one of about a quarter
_POINTS = 0.1  # of right answers that must be shown to be lost
_ERROR = 0.025  # of a one-sided bound: both ends of a 95 % interval
_LARGE = 0.1  # nats from which on the factor of perplexity is told
_LEAST_RIGHT = 3  # right answers of 'full' of which a loss can be seen


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Answers to questions on generated documents.

    Attributes:
        right: of the plan.
        full: of the uncompressed cache.
        count: of all.
        lost: more than a tenth of them are shown to be lost.
    """

    right: int
    full: int
    count: int
    lost: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is shown of one plan on one model.

    Attributes:
        plan: in one line.
        bytes: of its 16-bit cache over those of an uncompressed one.
        word: "safe", "harmful", "not shown", or "not measured".
        loss: nats a token over the uncompressed cache, with its 95 % interval; None where it was not measured.
        windows: that the loss is of.
        inside: answers to questions that stand at the end of the prompt; None where they were not asked.
        after: the same documents, asked after the cache was cut.
        cause: why it harms, where that is known.
        error: why it was not measured.
    """

    plan: str
    bytes: float
    word: str
    loss: Estimate | None = None
    windows: int = 0
    inside: Answered | None = None
    after: Answered | None = None
    cause: str | None = None
    error: str | None = None

    @property
    def sentence(self) -> str:
        """The verdict with its numbers."""
        if self.loss is None:
            return f"{self.plan}: not measured: {self.error}"
        found = f"{self.plan}: {self.word} here: {self.told}"
        return f"{found}; {self.cause}" if self.cause and self.word != SAFE else found

    @property
    def told(self) -> str:
        """The loss with its interval, and the answers."""
        assert self.loss is not None
        found = f"{self.loss.value:+.4f} nats a token"
        if (ends := self.loss.interval(4, signed=True)) is not None:
            found += f" ({ends})"
        if self.loss.value > _LARGE:
            found += f", perplexity times {math.exp(self.loss.value):.3g}"
        for where, answers in (("inside", self.inside), ("after the context", self.after)):
            if answers is not None:
                found += f"; {answers.right} of {answers.count} answers asked {where} (full: {answers.full})"
        return found

    @property
    def bound(self) -> float:
        """The upper end of the loss; infinity without one."""
        return math.inf if self.loss is None or self.loss.high is None else self.loss.high

    @property
    def forgets(self) -> bool:
        """Whether it is shown to lose answers to questions that come after the context."""
        return self.after is not None and self.after.lost


def judged(records: Sequence[Record], margin: float) -> dict[str, Verdict]:
    """Return what records show of each plan but 'full', by plan hash; `bytes` and `cause` are left to be filled in.

    A plan is safe where the upper end of its loss's 95 % interval is at most `margin` and no answers that were asked
    inside the prompt are shown to be lost; harmful where the lower end is above it, or such answers are.

    Args:
        records: of perplexity and needles, of one model. Of a text that 'full' was not measured on nothing is taken.
        margin: nats a token.
    """
    full = {_place(record): record for record in records if record.plan == "full" and record.error is None}
    plans = {record.plan_hash: record for record in records if record.plan not in ("full",)}
    found = {}
    for plan, first in plans.items():
        mine = [record for record in records if record.plan_hash == plan]
        errors = [record.error for record in mine if record.error is not None]
        pairs = [(each, full[_place(each)]) for each in mine if each.error is None and _place(each) in full]
        texts = [pair for pair in pairs if pair[0].task == "perplexity"]
        if not texts or errors:
            error = errors[0] if errors else "the uncompressed cache has no numbers there"
            found[plan] = Verdict(plan=first.label, bytes=1.0, word=NOT_MEASURED, error=error)
            continue
        ours, theirs = (tuple(x for pair in texts for x in pair[side].values["nll"]) for side in (0, 1))
        loss = difference(ours, theirs, documents=documents_over([pair[0] for pair in texts]))
        inside, after = (_answered(pairs, outside) for outside in (False, True))
        word = NOT_SHOWN
        if (loss.low is not None and loss.low > margin) or (inside is not None and inside.lost):
            word = HARMFUL
        elif loss.high is not None and loss.high <= margin:
            word = SAFE
        found[plan] = Verdict(
            plan=first.label, bytes=1.0, word=word, loss=loss, windows=len(ours), inside=inside, after=after
        )
    return found


def taken(verdicts: Sequence[Verdict]) -> Mapping[str, Verdict | None]:
    """Return the plan to take at each of `SHARES`: of those that are safe there, the one with the least upper end.

    Plans that are shown to lose answers to later questions come last. None: no plan of so few bytes is safe.
    """
    return {words: _best(verdicts, share) for words, share in SHARES.items()}


def _best(verdicts: Sequence[Verdict], share: float) -> Verdict | None:
    safe = [each for each in verdicts if each.word == SAFE and each.bytes <= _ABOUT * share]
    return min(safe, key=lambda each: (each.forgets, each.bound, each.bytes), default=None)


def mildest(verdicts: Sequence[Verdict], share: float) -> Verdict | None:
    """Return the plan of about so few bytes that lost least, whatever is shown of it; None where there is none."""
    near = [each for each in verdicts if each.loss is not None and each.bytes <= _ABOUT * share]
    return min(near, key=lambda each: each.loss.value if each.loss is not None else 0.0, default=None)


def _place(record: Record) -> tuple[str, str, str]:
    return record.task, record.text_hash or "", str(record.point)


def _answered(pairs: Sequence[tuple[Record, Record]], outside: bool) -> Answered | None:
    asked = [p for p in pairs if p[0].task == "needle" and bool(p[0].point.get("question_outside")) == outside]
    if not asked:
        return None
    ours, theirs = ([x for pair in asked for x in pair[side].values["hit"]] for side in (0, 1))
    lost = outcome(losses_of(ours, theirs, lower_is_better=False, top=1.0), _POINTS, _ERROR).above
    right = round(sum(theirs))
    return Answered(right=round(sum(ours)), full=right, count=len(ours), lost=lost and right >= _LEAST_RIGHT)
