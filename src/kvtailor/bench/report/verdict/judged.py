"""A plan of which a headline may speak: what it lost, and what that shows."""

from __future__ import annotations

from dataclasses import dataclass

from kvtailor.bench.measure.equivalence import Outcome
from kvtailor.bench.report.rows import Row
from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score

__all__ = ["POINTS_MAY_DROP", "Judged", "fell"]

POINTS_MAY_DROP = 2.0


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan that holds less than 'full'.

    Attributes:
        row: the plan.
        scores: each measure that 'full' has too, the plan's score, that of 'full', and what the losses show.
        complete: whether it was measured in all that 'full' was.
    """

    row: Row
    scores: tuple[tuple[Measure, Score, Score, Outcome], ...]
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
        found = [each for each in self.scores if each[0].difference_unit not in (NATS, POINTS)]
        return max(
            [s.losses.mean / abs(full.value or 1.0) for m, s, full, _ in found if s.losses is not None and fell(m, s)],
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


def fell(measure: Measure, score: Score) -> bool:
    """Whether a score's interval of the difference leaves out 0 on the bad side."""
    found = score.difference
    worst = None if found is None else found.low if measure.lower_is_better else found.high
    return worst is not None and (worst > 0 if measure.lower_is_better else worst < 0)
