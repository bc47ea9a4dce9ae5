"""The parts of the sentence above a table: margins, losses, how sure they are, and what would decide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtailor.bench.measure.equivalence import Margins, Outcome
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score
from kvtailor.bench.report.verdict.judged import Judged, fell

__all__ = ["counted", "how_sure", "limits", "loss_words", "never", "share_of_bytes", "to_show", "too_few"]

Asked = tuple[Measure, Score, Score, Outcome]


def limits(asked: Sequence[Measure], margins: Margins) -> str:
    """The margins of the units that were measured, in words."""
    units = {measure.difference_unit for measure in asked}
    parts = [f"{margins.nats:g} nats per token"] * (NATS in units)
    parts += [f"{margins.points:g} points of right answers"] * (POINTS in units)
    parts += [f"{margins.points:g} % of a score"] * bool(units - {NATS, POINTS})
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
    texts = [each for each in judged.scores if each[0].difference_unit == NATS and each[3].bound is not None]
    parts = []
    if texts:
        measure, score, _, found = max(texts, key=lambda each: each[3].bound or 0.0)
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
    shares = [each for each in judged.scores if each[0].difference_unit == POINTS]
    others = [each for each in judged.scores if each[0].difference_unit not in (NATS, POINTS) and each[1].difference]
    worst = max(others, key=lambda each: (fell(*each[:2]), _share_lost(*each[:3])), default=None)
    scores = []
    if worst is not None and worst[1].difference is not None and (not shares or fell(*worst[:2])):
        scores = [f"{worst[1].difference.value:+.3g} in {worst[0].name}"]
    return _right_answers(shares) + scores


def _right_answers(shares: Sequence[Asked]) -> list[str]:
    """In numbers where one kind of them was measured; else where most were lost."""
    if not shares:
        return []
    if len(shares) == 1 and shares[0][0].task == "needle" and shares[0][0].name.endswith("right"):
        _, ours, full, _ = shares[0]
        return [
            f"{round(ours.value * ours.samples / 100)} of {ours.samples} answers right "
            f"('full': {round(full.value * full.samples / 100)})"
        ]
    measure, ours, full, _ = min(shares, key=lambda each: each[1].value - each[2].value)
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
    return lost / abs(full.value) if full.value else lost
