"""The sentence above a table: which plan, at which memory, is shown to lose less than a stated margin.

First a plan of which it may speak, then the parts of the sentence, then how it is found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtailor.bench.measure.equivalence import ERROR, Margins, Outcome, least_samples, outcome
from kvtailor.bench.report.table import OWN, Row
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score

__all__ = [
    "Judged",
    "Judgement",
    "MeasuredScore",
    "beats_full",
    "best_of",
    "beyond_the_model",
    "fell",
    "headline",
    "how_judged",
    "judge",
    "limits",
    "share_of_bytes",
]

POINTS_MAY_DROP = 2.0


class MeasuredScore(NamedTuple):
    """What a plan and 'full' have in a measure, and what the plan's losses show."""

    measure: Measure
    ours: Score
    full: Score
    found: Outcome


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan that holds less than 'full'.

    Attributes:
        row: the plan.
        scores: in each measure that 'full' has too.
        complete: whether it was measured in all that 'full' was.
    """

    row: Row
    scores: tuple[MeasuredScore, ...]
    complete: bool

    @property
    def shown(self) -> bool:
        """Whether its loss is shown to be below the margin in everything."""
        return all(found.below for *_, found in self.scores)

    @property
    def worse(self) -> bool:
        """Whether its loss is shown to be above the margin in anything."""
        return any(found.above for *_, found in self.scores)

    def drop(self, unit: str) -> float:
        """The largest loss in differences of one unit; a drop of answers that counts as none is 0."""
        lost = [s.losses.mean for m, s, _, _ in self.scores if m.difference_unit == unit and s.losses is not None]
        return max([x for x in lost if unit == NATS or x > POINTS_MAY_DROP], default=0.0)

    def score_drop(self) -> float:
        """The largest loss beyond chance in scores on scales of their own, as a share of what 'full' has."""
        found = [each for each in self.scores if each.measure.difference_unit not in (NATS, POINTS)]
        return max(
            [s.losses.mean / whole_of(m, full) for m, s, full, _ in found if s.losses is not None and fell(m, s)],
            default=0.0,
        )

    def beaten_by(self, other: Judged) -> bool:
        """Whether another plan holds no more bytes and loses no more in anything, and less of one of the two."""
        pairs = [(self.row.ratio or 1.0, other.row.ratio or 1.0)]
        theirs = {id(measure): score for measure, score, _, _ in other.scores}
        for measure, ours, _, _ in self.scores:
            score = theirs.get(id(measure))
            if score is None or ours.losses is None or score.losses is None:
                return False
            pairs.append((ours.losses.mean, score.losses.mean))
            if ours.ratio is not None and score.ratio is not None:
                pairs.append((ours.ratio, score.ratio))
        return all(b <= a for a, b in pairs) and any(b < a for a, b in pairs)


def whole_of(measure: Measure, full: Score) -> float:
    """What shares of a score are of: what 'full' has, and in nats at least `LEAST_NATS`."""
    return max(abs(full.value), LEAST_NATS if measure.unit == NATS else 0.0) or 1.0


def fell(measure: Measure, score: Score) -> bool:
    """Whether a score's interval of the difference leaves out 0 on the bad side."""
    found = score.difference
    worst = None if found is None else found.low if measure.lower_is_better else found.high
    return worst is not None and (worst > 0 if measure.lower_is_better else worst < 0)


def limits(asked: Sequence[Measure], margins: Margins) -> str:
    """The margins of the units that were measured, in words."""
    units = {measure.difference_unit for measure in asked}
    parts = [f"{margins.nats:g} nats per token"] * (NATS in units)
    parts += [f"{margins.points:g} points of right answers"] * (POINTS in units)
    scores = [measure for measure in asked if measure.difference_unit not in (NATS, POINTS)]
    least = f", or {margins.points / 100 * LEAST_NATS:g} nats where that is more"
    parts += [f"{margins.points:g} % of a score{least * any(m.unit == NATS for m in scores)}"] * bool(scores)
    return " and ".join(parts)


def counted(number: int, measure: Measure) -> str:
    """So many samples in the measure's own word; large numbers are rounded up to two figures."""
    digits = max(0, len(str(number)) - 2) if number >= 100 else 0
    shown = math.ceil(number / 10**digits) * 10**digits
    return f"{'about ' if digits else ''}{shown:,} {_samples(measure)}"


def never(judged: Judged) -> str:
    """Samples of which no number would show that a plan loses little, as its mean loss is not below the margin; in the
    measures' own words, empty where there is no such measure."""
    words = [_samples(measure) for measure, _, _, found in judged.scores if not found.below and found.needed is None]
    return " or ".join(dict.fromkeys(words))


def to_show(judged: Judged) -> list[tuple[str, int]]:
    """For each task the samples that it would take to show that a plan loses little, in words, and how many there are.

    Of several texts or sets of a task those of the one that takes most. Empty where no number would do.
    """
    if never(judged):
        return []
    lacking: dict[str, tuple[int, Measure, int]] = {}
    for measure, score, _, found in judged.scores:
        if found.below or found.needed is None or found.needed <= score.samples:
            continue
        if found.needed > lacking.get(measure.task, (0, measure, 0))[0]:
            lacking[measure.task] = found.needed, measure, score.samples
    asked = [measure.task for measure, *_ in judged.scores]
    return [
        (counted(n, measure) + _OF_EACH.get(task, "") * (asked.count(task) > 1), has)
        for task, (n, measure, has) in lacking.items()
    ]


def too_few(judged: Judged) -> str:
    """What it would take to show that a plan loses little, and what there is; empty where no number would do."""
    return " and ".join(f"{words} (this run has {has})" for words, has in to_show(judged))


_OF_EACH = {
    "perplexity": " of each text",
    "needle": " of each kind",
    "longcontext": " of each set",
    "harness": " of each task",
}


def _samples(measure: Measure) -> str:
    return {"perplexity": "windows", "needle": "answers"}.get(measure.task, "examples")


def loss_words(judged: Judged) -> str:
    """What a plan lost: of several texts and tasks the worst."""
    texts = [(m, s.difference) for m, s, _, _ in judged.scores if m.difference_unit == NATS and s.difference]
    parts = []
    if texts:
        measure, worst = max(texts, key=lambda each: each[1].value)
        where = f" on {measure.name}" if len(texts) > 1 else ""
        if worst.low is not None and worst.high is not None and worst.low <= 0 <= worst.high:
            # A mean that may be chance is not told as a loss.
            where += f" ({signed(worst.low, 3)} to {signed(worst.high, 3)})"
        parts.append(f"{signed(worst.value, 3)} nats per token{where}")
    parts += _answers(judged)
    return ", ".join(parts) or "fewer right answers"


def how_sure(judged: Judged) -> str:
    """In brackets: what each loss is below, over how many samples."""
    texts = [each for each in judged.scores if each.measure.difference_unit == NATS and each.found.bound is not None]
    parts = []
    if texts:
        measure, score, _, found = max(texts, key=lambda each: each.found.bound or 0.0)
        assert score.losses is not None and found.bound is not None
        where = f" of {measure.name}, the worst of {len(texts)}" if len(texts) > 1 else ""
        if score.losses.documents is not None:
            where += f" from {score.losses.documents} documents"
        parts.append(
            f"ΔNLL {signed(score.losses.mean, 4)}, at most {signed(found.bound, 4)}, "
            f"over {score.samples} windows{where}"
        )
    answers = _answers(judged)
    bounds = [f.bound for m, _, _, f in judged.scores if m.difference_unit == POINTS and f.bound is not None]
    if answers and bounds:
        answers[0] += f", at most {max(bounds):.1f} points lost"
    return f" ({'; '.join(parts + answers)})" if parts or answers else ""


def share_of_bytes(judged: Judged) -> str:
    """At the main table's point, or from the least to the most over all that was measured."""
    assert judged.row.ratio is not None
    shares = [judged.row.ratio, *(s.ratio for _, s, _, _ in judged.scores if s.ratio is not None)]
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def signed(value: float, digits: int) -> str:
    """With its sign, and none for what is shown as 0."""
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def _answers(judged: Judged) -> list[str]:
    """Right answers, and where a score on its own scale fell most: beside answers only if it fell beyond chance."""
    shares = [each for each in judged.scores if each.measure.difference_unit == POINTS]
    others = [
        each for each in judged.scores if each.measure.difference_unit not in (NATS, POINTS) and each.ours.difference
    ]
    worst = max(others, key=lambda each: (fell(*each[:2]), _share_lost(*each[:3])), default=None)
    scores = []
    if worst is not None and worst.ours.difference is not None and (not shares or fell(*worst[:2])):
        scores = [f"{worst.ours.difference.value:+.3g} in {worst.measure.name}"]
    return _right_answers(shares) + scores


def _right_answers(shares: Sequence[MeasuredScore]) -> list[str]:
    """In numbers where one kind of them was measured; else where most were lost."""
    if not shares:
        return []
    if len(shares) == 1 and shares[0].measure.task == "needle" and shares[0].measure.name.endswith("right"):
        _, ours, full, _ = shares[0]
        return [
            f"{round(ours.value * ours.samples / 100)} of {ours.samples} answers right "
            f"('full': {round(full.value * full.samples / 100)})"
        ]
    measure, ours, full, _ = min(shares, key=lambda each: each.ours.value - each.full.value)
    change = f"{signed(ours.value - full.value, 1)} points"
    found = ours.difference
    if found is not None and found.low is not None and found.high is not None:
        # A set's own score may differ from the mean that the interval is of.
        change = f"{signed(found.value, 1)} points ({signed(found.low, 1)} to {signed(found.high, 1)})"
    return [
        f"{change} in {measure.name}"
        if len(shares) == 1
        else f"at worst of {len(shares)} tasks {change} in {measure.name}"
    ]


def _share_lost(measure: Measure, ours: Score, full: Score) -> float:
    """Above 0 where 'full' is better; of two scales neither counts more than the other."""
    lost = ours.value - full.value if measure.lower_is_better else full.value - ours.value
    return lost / whole_of(measure, full)


LEAST_TELLING = 5.0
LEAST_NATS = 0.2
"""A tenth is 0.02, the margin of text. Where 'full' is sure of its answers, at 0.005, a tenth of that is nothing."""
LEAST_GAIN = 0.005


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a run shows of its plans, by one equivalence test for all of them.

    Attributes:
        full: the row of 'full'; None where it was not run, and then nothing is judged.
        smaller: the plans that hold less than it.
        measures: everything that was measured.
        asked: what the plans are judged by: what 'full' has samples of, and gets some of right.
        judged: of the smaller plans those that were measured in any of it.
        margins: what counts as no loss.
    """

    full: Row | None
    smaller: tuple[Row, ...]
    measures: tuple[Measure, ...]
    asked: tuple[Measure, ...]
    judged: tuple[Judged, ...]
    margins: Margins

    @property
    def complete(self) -> list[Judged]:
        """The plans that were measured in all that 'full' was."""
        return [each for each in self.judged if each.complete]

    @property
    def fair(self) -> list[Judged]:
        """Those of them that may be chosen.

        Better beyond chance is no merit: it shows that the text or the model is unusual, and a footnote states it.
        """
        return [each for each in self.complete if not beats_full(each.row)]

    @property
    def limit(self) -> str:
        """The margins of what was asked, in words."""
        return limits(self.asked, self.margins)


def judge(rows: Sequence[Row], measures: Sequence[Measure], margins: Margins | None = None) -> Judgement:
    """Return what every plan that holds less than 'full' lost, and what that shows.

    Args:
        rows: from `rows_of`.
        measures: from `measures_of`.
        margins: what counts as no loss; None: the usual ones.
    """
    margins = margins or Margins()
    full = next((row for row in rows if row.is_full), None)
    smaller = tuple(row for row in rows if row.plan_hash != OWN and row.ratio is not None and row.ratio < 0.99)
    asked = [] if full is None else [each for each in _paired(full, measures) if not beyond_the_model(each, full)]
    error = ERROR / _competing(smaller, asked)
    judged = [_judge_plan(row, full, asked, margins, error) for row in smaller] if full is not None else []
    return Judgement(
        full=full,
        smaller=smaller,
        measures=tuple(measures),
        asked=tuple(asked),
        judged=tuple(each for each in judged if each.scores),
        margins=margins,
    )


def headline(found: Judgement) -> str:
    """Which plan with the fewest bytes is shown to lose less than the margins; if none is, why.

    A plan loses less than the margins only if it was measured in all that 'full' was measured in, and in each of it the
    upper end of its loss's interval is below the margin, see `bench.measure.equivalence`. It is not named where another
    plan beats it in bytes and in loss, shown or not.
    """
    if found.full is None:
        return (
            "There is no record of 'full' in this run, so nothing can be compared with it: run the bench with 'full'."
        )
    said = _headline(found, found.full)
    # What plans were measured in and 'full' was not, or failed at: nothing of it can be compared.
    apart = [f"{m.task} {m.name}" for m in found.measures if found.full.plan_hash not in m.scores]
    return f"{said} Left out, since 'full' has no numbers there: {'; '.join(apart)}." if apart else said


def _headline(found: Judgement, full: Row) -> str:
    if not found.smaller:
        return "No plan of this run holds less than the full cache, so there is nothing to choose."
    if not found.asked and _paired(full, found.measures):
        return (
            "No verdict: 'full' itself gets next to nothing right in all that was asked, so that nothing shows "
            "what the saved bytes cost."
        )
    if not found.judged:
        return _nothing_to_judge(found.smaller, found.measures)
    if not found.complete:
        return (
            f"No plan that holds less was measured in all {len(found.asked)} texts and tasks that 'full' was measured "
            "in, so none can be said to lose nothing."
        )
    fair, limit = found.fair, found.limit
    if not fair:
        return (
            "No verdict: every plan that holds less does better than 'full' beyond chance, so this model does not use "
            "the context of this text."
        )
    shown = [each for each in fair if each.shown]
    best = best_of(shown, fair)
    if best is not None:
        return f"{best.row.label} loses less than {limit} here at {share_of_bytes(best)} of the bytes{how_sure(best)}."
    if shown:
        return _beaten(min(shown, key=_by_bytes), fair, limit)
    mildest = min(fair, key=lambda each: (each.drop(POINTS), each.score_drop(), each.drop(NATS), *_by_bytes(each)))
    if all(each.worse for each in fair):
        who = "Every plan here that saves bytes"
        if len(found.complete) < len(found.smaller):
            who += " and was measured in everything"
        return (
            f"{who} loses more than {limit.replace(' and ', ' or ')}; the mildest is {mildest.row.label}: "
            f"{loss_words(mildest)}, at {share_of_bytes(mildest)} of the bytes."
        )
    return _no_verdict(mildest, found)


def how_judged(found: Judgement) -> str | None:
    """By which rule the headline was found, whole sentences; None where there was nothing to judge."""
    if not found.smaller or not found.asked:
        return None
    count = _competing(found.smaller, found.asked)
    sure = "with 95 % confidence" if count == 1 else f"with 95 % confidence for all {count} plans together (Bonferroni)"
    said = (
        f"The first line: a plan loses less than {found.limit} where the upper end of its loss's one-sided "
        f"interval is below that in every text and task, {sure}"
    )
    if any(measure.difference_unit == NATS for measure in found.asked):
        least = least_samples(ERROR / count)
        said += f"; with fewer than {least} windows a loss on one window in ten might not be met at all"
    open_ = [
        f"{each.row.label} needs {' and '.join(words for words, _ in lacking)}"
        for each in found.complete
        if not each.worse and (lacking := to_show(each))
    ]
    if not open_:
        return f"{said}."
    return (
        f"{said}. What is lacking to show it for a plan, if further samples turn out as those of this run did: "
        f"{'; '.join(open_)}."
    )


def beats_full(row: Row) -> bool:
    """Whether a plan predicts the text better than 'full' beyond chance, and by more than rounding could."""
    return row.loss is not None and row.loss.high is not None and row.loss.high < 0 and row.loss.value < -LEAST_GAIN


def beyond_the_model(measure: Measure, full: Row) -> bool:
    """Whether 'full' has so few right answers that no drop could count as one."""
    score = measure.scores.get(full.plan_hash)
    return score is not None and measure.difference_unit == POINTS and score.value < LEAST_TELLING


def _paired(full: Row, measures: Sequence[Measure]) -> list[Measure]:
    """Without numbers for single samples nothing can be distinguished from chance: such a measure decides nothing."""
    return [m for m in measures if full.plan_hash in m.scores and m.scores[full.plan_hash].losses is not None]


def _competing(smaller: Sequence[Row], asked: Sequence[Measure]) -> int:
    """The plans among which the headline may choose."""
    return max(1, sum(all(row.plan_hash in measure.scores for measure in asked) for row in smaller))


def _judge_plan(row: Row, full: Row, asked: Sequence[Measure], margins: Margins, error: float) -> Judged:
    scores = []
    for measure in (measure for measure in asked if row.plan_hash in measure.scores):
        score, theirs = measure.scores[row.plan_hash], measure.scores[full.plan_hash]
        if score.losses is not None:
            found = outcome(score.losses, _margin(measure, theirs, margins), error)
            scores.append(MeasuredScore(measure, score, theirs, found))
    return Judged(row=row, scores=tuple(scores), complete=len(scores) == len(asked))


def _margin(measure: Measure, full: Score, margins: Margins) -> float:
    if measure.difference_unit == NATS:
        return margins.nats
    if measure.difference_unit == POINTS:
        return margins.points
    return margins.points / 100 * whole_of(measure, full)


def _by_bytes(judged: Judged) -> tuple[float, float]:
    return judged.row.ratio or 1.0, judged.drop(NATS)


def best_of(shown: Sequence[Judged], fair: Sequence[Judged]) -> Judged | None:
    """Return, of the plans that are shown to lose little, and that no other beats, the one with the fewest bytes."""
    unbeaten = [each for each in shown if not any(each.beaten_by(other) for other in fair)]
    return min(unbeaten, key=_by_bytes, default=None)


def _beaten(shown: Judged, fair: Sequence[Judged], limit: str) -> str:
    better = min((other for other in fair if shown.beaten_by(other)), key=_by_bytes)
    lacking = too_few(better)
    return (
        f"No plan is recommended: {shown.row.label} loses less than {limit} at {share_of_bytes(shown)} of the bytes, "
        f"yet {better.row.label} lost less ({loss_words(better)}) at {share_of_bytes(better)}, which is not shown to "
        f"be below that{': ' + lacking if lacking else ''}."
    )


def _no_verdict(mildest: Judged, judgement: Judgement) -> str:
    fair, limit = judgement.fair, judgement.limit
    undecided = [each for each in fair if not each.worse]
    # What is lacking is that of the plan that is nearest to a verdict.
    nearest = min(
        undecided,
        key=lambda each: (bool(never(each)), sum(not found.below for *_, found in each.scores), each.drop(NATS)),
    )
    lacking, hopeless = too_few(nearest), never(nearest)
    said = f"No verdict: no plan that saves bytes is shown to lose less than {limit}"
    said += f"; the mildest is {mildest.row.label}: {loss_words(mildest)}, at {share_of_bytes(mildest)} of the bytes."
    if hopeless:
        whom = "" if nearest is mildest else f" for {nearest.row.label}"
        said += (
            f" As these turned out, no number of {hopeless} would show it{whom}, since the mean loss is not below the "
            "margin."
        )
    elif lacking:
        said += f" If further samples turn out as these did, to show it for {nearest.row.label} takes {lacking}."
    texts = [measure for measure in judgement.asked if measure.difference_unit == NATS]
    if texts and len(texts) < len(judgement.asked):
        alone = [
            each
            for each in fair
            if not each.worse
            and all(found.below for m, *_, found in each.scores if m.difference_unit == NATS)
            and not any(fell(m, s) for m, s, *_ in each.scores if m.difference_unit != NATS)
        ]
        best = best_of(alone, fair)
        if best is not None:
            said += (
                f" On the text alone, {best.row.label} loses less than {limits(texts, judgement.margins)} at "
                f"{share_of_bytes(best)} of the bytes{how_sure(best)}."
            )
    return said


def _nothing_to_judge(smaller: Sequence[Row], measures: Sequence[Measure]) -> str:
    if any(row.kl is not None for row in smaller):
        return (
            "No verdict: no perplexity and no answers to judge a smaller plan by were measured in this run; KL and "
            "top-1 say how far its predictions are from those of 'full', not what that costs."
        )
    if measures:
        return "No verdict: no smaller plan has a perplexity or answers in this run that it can be judged by."
    return "Quality was not measured in this run: nothing can be said about what the saved bytes cost."
