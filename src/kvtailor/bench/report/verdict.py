"""The sentence above a table: which plan, at which memory, loses nothing measurable here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.bench.report.quality import NATS, POINTS, Measure, Score
from kvtailor.bench.report.rows import FULL, OWN, Row
from kvtailor.bench.statistics import FEWEST

__all__ = ["beats_full", "beyond_the_model", "headline"]

POINTS_MAY_DROP = 2.0
COARSE_NATS = 0.05
COARSE_POINTS = 5.0
LEAST_TELLING = 5.0


@dataclass(frozen=True)
class _Judged:
    """A plan with what it scored in each measure that 'full' has too, and whether it scored in all of them."""

    row: Row
    scores: tuple[tuple[Measure, Score, Score], ...]
    complete: bool

    def drop(self, unit: str) -> float:
        """The largest loss in differences of one unit; a drop of answers that counts as none is 0."""
        if unit == NATS:
            found = [s.difference.value for m, s, _ in self.scores if m.difference_unit == NATS and s.difference]
            return max(found, default=0.0)
        lost = [full.value - s.value for m, s, full in self.scores if m.difference_unit == unit]
        return max([x for x in lost if x > POINTS_MAY_DROP], default=0.0)

    def score_drop(self) -> float:
        """The largest loss beyond chance in scores on scales of their own, as a share of what 'full' has."""
        found = [(m, s, full) for m, s, full in self.scores if m.difference_unit not in (NATS, POINTS)]
        return max([_share_lost(*each) for each in found if not _kept(*each)], default=0.0)


def headline(rows: Sequence[Row], measures: Sequence[Measure]) -> str:
    """Which plan, at which memory, loses nothing measurable here; if none does, which loses least and how much.

    A plan loses nothing only if it was asked all that 'full' was asked and loses nothing in any of it.
    """
    full = next((row for row in rows if row.label == FULL), None)
    smaller = [row for row in rows if row.plan_hash != OWN and row.ratio is not None and row.ratio < 0.99]
    if full is None or not smaller:
        return "No plan of this run holds less than the full cache, so there is nothing to choose."
    # Without numbers for single samples nothing can be told from chance: such a measure decides nothing.
    paired = [m for m in measures if full.plan_hash in m.scores and m.scores[full.plan_hash].difference is not None]
    asked = [m for m in paired if not beyond_the_model(m, full)]
    if paired and not asked:
        return (
            "No verdict: 'full' itself gets next to nothing right in all that was asked, so that nothing shows "
            "what the saved bytes cost."
        )
    judged = [each for each in (_judge(row, full, asked) for row in smaller) if each.scores]
    if not judged:
        return _nothing_to_judge(smaller, measures)
    if all(m.difference_unit == NATS and s.difference is not None and s.difference.low is None
           for each in judged for m, s, _ in each.scores):  # fmt: skip
        return f"Too few windows to tell a loss from chance: ask for at least {FEWEST}, better 50."
    complete = [each for each in judged if each.complete]
    if not complete:
        return (
            f"No plan that holds less was measured in all {len(asked)} texts and tasks that 'full' was measured in, so "
            "none can be said to lose nothing."
        )
    fine = [each for each in complete if all(_kept(*score) for score in each.scores)]
    if fine:
        best = min(fine, key=lambda each: each.row.ratio or 1.0)
        return f"{best.row.label} loses nothing measurable here at {_share(best)} of the bytes{_how_sure(best)}."
    worse = [each for each in complete if not beats_full(each.row)]
    if not worse:
        return (
            "No verdict: every plan that holds less does better than 'full' beyond chance, so this model does not use "
            "the context of this text."
        )
    mildest = min(worse, key=lambda each: (each.drop(POINTS), each.score_drop(), each.drop(NATS)))
    who = "Every plan here that saves bytes"
    if len(complete) < len(smaller):
        who += " and was measured in everything"
    what = _loss(mildest)
    return f"{who} loses something; the mildest is {mildest.row.label}: {what}, at {_share(mildest)} of the bytes."


def beats_full(row: Row) -> bool:
    """Whether a plan predicts the text better than 'full' beyond chance, which no compression should."""
    return row.loss is not None and row.loss.high is not None and row.loss.high < 0


def beyond_the_model(measure: Measure, full: Row) -> bool:
    """Whether 'full' has so few right answers that no drop could count as one."""
    score = measure.scores.get(full.plan_hash)
    return score is not None and measure.difference_unit == POINTS and score.value < LEAST_TELLING


def _nothing_to_judge(smaller: Sequence[Row], measures: Sequence[Measure]) -> str:
    if any(row.kl is not None for row in smaller):
        return (
            "No verdict: no perplexity and no answers to judge a smaller plan by were measured in this run; KL and "
            "top-1 say how far its predictions are from those of 'full', not what that costs."
        )
    if measures:
        return "No verdict: no smaller plan has a perplexity or answers in this run that it can be judged by."
    return "Quality was not measured in this run: nothing can be said about what the saved bytes cost."


def _judge(row: Row, full: Row, asked: Sequence[Measure]) -> _Judged:
    found = tuple(
        (m, m.scores[row.plan_hash], m.scores[full.plan_hash]) for m in asked if row.plan_hash in m.scores
    )  # fmt: skip
    return _Judged(row=row, scores=found, complete=len(found) == len(asked))


def _kept(measure: Measure, ours: Score, full: Score) -> bool:
    found = ours.difference
    if found is None:
        return False
    if measure.difference_unit == NATS:
        # Better beyond chance is no praise: it says that the text or the model is odd, and a footnote says so.
        return found.low is not None and found.high is not None and found.low <= 0 <= found.high
    if measure.difference_unit != POINTS:
        worst = found.low if measure.lower_is_better else found.high
        return worst is not None and (worst <= 0 if measure.lower_is_better else worst >= 0)
    return ours.value >= full.value - POINTS_MAY_DROP and not (found.high is not None and found.high < 0)


def _share_lost(measure: Measure, ours: Score, full: Score) -> float:
    """Above 0 where 'full' is better; of two scales neither counts more than the other."""
    lost = ours.value - full.value if measure.lower_is_better else full.value - ours.value
    return lost / abs(full.value) if full.value else lost


def _worst(judged: _Judged) -> tuple[Measure, Score] | None:
    """Of the texts, the one whose interval reaches furthest above 0."""
    nats = [(m, s) for m, s, _ in judged.scores if m.difference_unit == NATS and s.difference is not None]

    def reach(each: tuple[Measure, Score]) -> float:
        found = each[1].difference
        assert found is not None
        return found.value if found.high is None else found.high

    return max(nats, key=reach, default=None)


def _loss(judged: _Judged) -> str:
    several = len([m for m, _, _ in judged.scores if m.difference_unit == NATS]) > 1
    parts = []
    worst = max(
        ((m, s.difference.value) for m, s, _ in judged.scores if m.difference_unit == NATS and s.difference),
        key=lambda each: each[1],
        default=None,
    )
    if worst is not None:
        parts.append(f"{_signed(worst[1], 3)} nats per token" + (f" on {worst[0].name}" if several else ""))
    parts += _answers(judged)
    return ", ".join(parts) or "fewer right answers"


def _answers(judged: _Judged) -> list[str]:
    """Right answers, and where a score on its own scale fell most: beside answers only if it fell beyond chance."""
    shares = [(m, s, full) for m, s, full in judged.scores if m.difference_unit == POINTS]
    others = [each for each in judged.scores if each[0].difference_unit not in (NATS, POINTS) and each[1].difference]
    worst = max(others, key=lambda each: (not _kept(*each), _share_lost(*each)), default=None)
    scores = []
    if worst is not None and worst[1].difference is not None and not (shares and _kept(*worst)):
        scores = [f"{worst[1].difference.value:+.3g} in {worst[0].name}"]
    return _right_answers(shares) + scores


def _right_answers(shares: Sequence[tuple[Measure, Score, Score]]) -> list[str]:
    """In numbers where one kind of them was asked; else where most were lost."""
    if not shares:
        return []
    if len(shares) == 1 and shares[0][0].task == "needle" and shares[0][0].name.endswith("right"):
        _, ours, full = shares[0]
        return [
            f"{round(ours.value * ours.samples / 100)} of {ours.samples} answers right "
            f"('full': {round(full.value * full.samples / 100)})"
        ]
    measure, ours, full = min(shares, key=lambda each: each[1].value - each[2].value)
    change = f"{_signed(ours.value - full.value, 1)} points"
    found = ours.difference
    if found is not None and found.low is not None and found.high is not None and found.low < found.high:
        # A set's own score may differ from the mean that the interval is of.
        change = f"{_signed(found.value, 1)} points ({_signed(found.low, 1)} to {_signed(found.high, 1)})"
    return [
        f"{change} in {measure.name}"
        if len(shares) == 1
        else f"at worst of {len(shares)} tasks {change} in {measure.name}"
    ]


def _how_sure(judged: _Judged) -> str:
    parts = []
    texts = [m for m, _, _ in judged.scores if m.difference_unit == NATS]
    worst = _worst(judged)
    reach = None
    if worst is not None:
        measure, score = worst
        assert score.difference is not None
        low, reach = score.difference.low, score.difference.high
        if low is not None and reach is not None:
            where = f" of {measure.name}, the widest of {len(texts)}" if len(texts) > 1 else ""
            parts.append(f"ΔNLL {low:+.3f} to {reach:+.3f} nats over {score.samples} windows{where}")
    parts += _answers(judged)
    if reach is not None and reach > COARSE_NATS:
        parts.append(f"losses below {reach:.2f} nats would not show with so few windows")
    shares = [s for m, s, _ in judged.scores if m.difference_unit == POINTS]
    lows = [s.difference.low for s in shares if s.difference is not None and s.difference.low is not None]
    if lows and min(lows) < -COARSE_POINTS:
        parts.append(f"drops below {-min(lows):.0f} points would not show with so few examples")
    return f" ({'; '.join(parts)})" if parts else ""


def _share(judged: _Judged) -> str:
    """Of the bytes: at the main table's point, or from the least to the most over all that was measured."""
    assert judged.row.ratio is not None
    shares = [judged.row.ratio, *(s.ratio for _, s, _ in judged.scores if s.ratio is not None)]
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _signed(value: float, digits: int) -> str:
    """With its sign, and none for what is shown as 0."""
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"
