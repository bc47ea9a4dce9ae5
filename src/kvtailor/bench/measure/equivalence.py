"""Whether a plan loses less than a margin: a one-sided test of paired losses (Schuirmann 1987, one of his two tests).

A plan passes only where the upper end of its loss's interval is below the margin, so noise never helps it. Three
things keep a sentence about the best of several plans true in 95 % of runs:

- *Several plans*: each is tested at the share `ERROR / plans` (Bonferroni). Of several texts and tasks every one must
  pass, which needs no further share (an intersection-union test).
- *Rare losses*: below `least_samples` windows there is no verdict, since a loss that falls on one window in ten might
  not have been met at all. From there on Student's bound also holds up on skewed losses: docs/write_coverage.py.
- *Windows of one document* count as one cluster: the bound has the cluster-robust error and as many degrees of freedom
  as there are documents, less one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvtailor.bench.measure.paired_hits import differing, loss_bound, pairs_for
from kvtailor.bench.measure.statistics import FEWEST, student_quantile
from kvtailor.errors import ArgumentError

__all__ = ["ERROR", "Losses", "Margins", "Outcome", "least_samples", "losses_of", "outcome"]

ERROR = 0.05
RARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Margins:
    """What counts as no loss. A loss must be shown to be smaller.

    Attributes:
        nats: per token, for texts. 0.02 is 2 % of perplexity, a sixth of what lies between Llama 2 with 7 and with 13
            billion parameters (5.47 and 4.88 on WikiText-2, so 0.114 nats).
        points: of percent, for right answers; of scores on a scale of their own, percent of what 'full' has, and
            of those in nats of 0.2 at least. 10 points
            are what 25 answers can show for one plan, and 46 for four.

    Raises:
        ArgumentError: a margin that is not above 0.
    """

    nats: float = 0.02
    points: float = 10.0

    def __post_init__(self) -> None:
        for name in ("nats", "points"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ArgumentError(f"asked for a margin of {getattr(self, name)} {name}: give a number above 0")


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Paired losses to 'full', as far as a bound of their mean needs them.

    Attributes:
        count: windows, documents or examples.
        mean: above 0 is worse.
        deviation: standard error of the mean, over documents where windows share some; None with fewer than `FEWEST`.
        freedom: degrees of freedom behind it.
        design: how many times more windows this takes than independent ones would, at least 1.
        documents: how many the windows come from; None where the record lacks it, or where they count as one each.
        lost, gained: of hits, how many each side alone got right; None for what is no hit.
        scale: what a hit counts.
    """

    count: int
    mean: float
    deviation: float | None
    freedom: int
    design: float = 1.0
    documents: int | None = None
    lost: float | None = None
    gained: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One plan in one text or task.

    Attributes:
        below: the loss is shown to be smaller than the margin.
        above: it is shown to be larger.
        bound: what it is below; None without one.
        precise: there are samples enough for this margin, whatever the loss turns out to be.
        needed: samples until `below`, if more turn out as these did; None where the mean loss is not below the margin,
            so that no number would show it.
    """

    below: bool
    above: bool
    bound: float | None
    precise: bool
    needed: int | None


def losses_of(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    lower_is_better: bool,
    documents: Sequence[float] = (),
    top: float | None = None,
) -> Losses:
    """Losses of `ours` against `theirs`, sample by sample.

    Args:
        ours, theirs: as many, sample i of both is the same.
        lower_is_better: whether the smaller one is the better one.
        documents: which document each sample is from; empty where that is not known.
        top: the score of a right answer, for scores between 0 and it; None: they have no such range.
    """
    changes = [(a - b) if lower_is_better else (b - a) for a, b in zip(ours, theirs, strict=True)]
    count, middle = len(changes), fmean(changes)
    lost = gained = None
    if top is not None:
        lost, gained, hits = differing([x / top for x in ours], [x / top for x in theirs])
        lost, gained = (lost, gained) if hits else (None, None)
    if count < FEWEST:
        return Losses(count=count, mean=middle, deviation=None, freedom=0, lost=lost, gained=gained, scale=top or 1.0)
    apart = [change - middle for change in changes]
    single = math.sqrt(math.fsum(x * x for x in apart) / (count - 1) / count)
    groups: dict[float, float] = {}
    for document, each in zip(documents, apart, strict=False):
        groups[document] = groups.get(document, 0.0) + each
    if len(documents) != count or not FEWEST <= len(groups) < count:
        return Losses(
            count=count, mean=middle, deviation=single, freedom=count - 1, lost=lost, gained=gained, scale=top or 1.0
        )
    of_groups = math.fsum(x * x for x in groups.values()) * len(groups) / (len(groups) - 1)
    # Windows that differ more within a document than between documents are no more than independent.
    deviation = max(single, math.sqrt(of_groups) / count)
    return Losses(
        count=count,
        mean=middle,
        deviation=deviation,
        freedom=len(groups) - 1,
        lost=lost,
        gained=gained,
        design=(deviation / single) ** 2 if single else 1.0,
        documents=len(groups),
        scale=top or 1.0,
    )


def least_samples(error: float) -> int:
    """Independent samples of which at least one meets, with a chance of `1 - error`, a loss of one sample in ten."""
    return math.ceil(math.log(error) / math.log(1 - RARE))


def outcome(losses: Losses, margin: float, error: float) -> Outcome:
    """Whether losses are shown to be below a margin, at this chance of an error."""
    if losses.lost is not None and losses.gained is not None:
        return _of_hits(losses, losses.lost, losses.gained, margin, error)
    least = math.ceil(least_samples(error) * losses.design)
    distance = margin - max(0.0, losses.mean)
    if losses.deviation is None:
        return Outcome(below=False, above=False, bound=None, precise=False, needed=least if distance > 0 else None)
    reach = student_quantile(1 - error, losses.freedom) * losses.deviation
    precise = losses.count >= least and reach <= margin
    needed = max(least, math.ceil(losses.count * (reach / distance) ** 2)) if distance > 0 else None
    return Outcome(
        below=precise and losses.mean + reach < margin,
        above=losses.mean - reach > margin,
        bound=losses.mean + reach,
        precise=precise,
        needed=needed,
    )


def _of_hits(losses: Losses, lost: float, gained: float, margin: float, error: float) -> Outcome:
    limit = margin / losses.scale
    bound = loss_bound(lost, gained, losses.count, error=error)
    without = pairs_for(0.0, 0.0, losses.count, margin=limit, error=error)
    needed = pairs_for(lost, gained, losses.count, margin=limit, error=error)
    return Outcome(
        below=bound < limit,
        above=-loss_bound(gained, lost, losses.count, error=error) > limit,
        bound=losses.scale * bound,
        precise=without is not None and losses.count >= without,
        needed=needed,
    )
