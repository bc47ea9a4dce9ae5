"""Which plan the proof names, and how it compares with the others.

The rule that names the plan:

1. Out is a plan that loses right answers beyond chance, over all families that the full cache can do, against the plan
   that has most (an exact sign test over the documents of which only one of the two has the answer).
2. Of the others the one with the least loss on text and answers together is the *best*. Both are in nats per token, and
   answers weigh as much as the text does. Out is each that loses more than the best beyond chance, on text or on
   answers, and each that may lose more by `TIE`: whose interval on text reaches past it.
3. Those that are left cannot be told apart. The one with the fewest bytes is taken; of equal bytes (to one percent) the
   simplest plan.

A plan that another one beats in bytes and in loss beyond chance is therefore never named.

Before that, limits that a plan of the proof either meets or not, whatever it loses. What is out is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.errors import KvtailorError
from kvtailor.ops.sizes import byte_text

__all__ = ["DOABLE", "Family", "Judged", "TIE", "Verdict", "fast_enough", "regret_of_text", "small_enough", "verdict"]

TIE = 0.005
"""Nats per token within which losses count as equal where nothing tells them apart."""
DOABLE = 0.5
"""Share of right answers that the full cache must have, for a family to say something of plans."""
_ALIKE = 0.01
_CHANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Family:
    """Right answers of one family.

    Attributes:
        name: of the family.
        seen: the search had documents of this family (others than these).
        hits: 1 or 0 for each document.
        full: the same under the full cache.
        nll: nats per answer token, for each document; with the right answer so far.
    """

    name: str
    seen: bool
    hits: tuple[float, ...]
    full: tuple[float, ...]
    nll: tuple[float, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether the full cache can do it at all."""
        return fmean(self.full) >= DOABLE


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan as the proof measured it.

    Attributes:
        label: the plan, or the preset that it is of.
        plan: in one line.
        origin: "fitted", "layers" (stage 1 alone), "words", "preset" or "full".
        bytes: of all rows, from what was measured on one.
        nll: by window, nats per token.
        full: the same of the full cache.
        documents: which text each window is from.
        families: right answers.
        seconds: for a decoded token of all rows, with its quartiles; None where it was not measured.
        methods: how many methods the plan names besides the defaults.
        error: why it has no numbers.
    """

    label: str
    plan: str
    origin: str
    bytes: int
    nll: tuple[float, ...] = ()
    full: tuple[float, ...] = ()
    documents: tuple[float, ...] = ()
    families: tuple[Family, ...] = ()
    seconds: Mapping[str, float | None] | None = None
    methods: int = 0
    error: str | None = None

    @property
    def loss(self) -> Estimate:
        """Against the full cache, nats per token."""
        return mean_difference(self.nll, self.full, documents=self.documents)

    def loss_below(self, confidence: float) -> float:
        """What the loss is below, at this confidence; infinite where there are too few windows to say."""
        high = mean_difference(self.nll, self.full, documents=self.documents, confidence=confidence).high
        return math.inf if high is None else high

    def against(self, other: Judged, confidence: float = 0.95) -> Estimate:
        """By how much it loses more than another plan, on the same windows; below 0: it loses less."""
        return mean_difference(self.nll, other.nll, documents=self.documents, confidence=confidence)

    @property
    def answers(self) -> tuple[float, ...]:
        """Nats per answer token of each document of the families that count."""
        return tuple(value for each in self.families if each.counts for value in each.nll)

    @property
    def hits(self) -> tuple[float, ...]:
        """1 or 0 for each document of the families that count."""
        return tuple(hit for each in self.families if each.counts for hit in each.hits)

    @property
    def both(self) -> float:
        """Nats per token on text, and on answers on top."""
        return fmean(self.nll) + (fmean(self.answers) if self.answers else 0.0)

    @property
    def right(self) -> int:
        """Right answers over all families that count."""
        return round(sum(sum(each.hits) for each in self.families if each.counts))

    @property
    def asked(self) -> int:
        """How many answers these are of."""
        return sum(len(each.hits) for each in self.families if each.counts)

    def points_lost(self) -> float | None:
        """The most points of percent that it loses in any family that counts, to the full cache; None without one."""
        lost = [100 * (fmean(each.full) - fmean(each.hits)) for each in self.families if each.counts]
        return max(0.0, *lost) if lost else None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which plan, and how it compares.

    Attributes:
        chosen: the plan that is named.
        against: its paired difference to each other plan, by that plan's label; below 0: it loses less.
        told: by label: "better", "worse" or "not told apart", beyond chance.
        sentence: all of it in words.
        needed: windows that would tell it from the best plain preset, if more turn out as these did; None where it is
            told apart, or where there is no preset beside it.
    """

    chosen: Judged
    against: Mapping[str, Estimate]
    told: Mapping[str, str]
    sentence: str
    needed: int | None = None


def verdict(
    plans: Sequence[Judged], *, aim: str = "loss", loss: float | None = None, points: float | None = None
) -> Verdict:
    """Return the plan that the rule of this file names, among plans that have numbers.

    Args:
        plans: without 'full'.
        aim: what is made small, see `Question.aim`.
        loss: the most that may be lost, nats per token; the upper end of the interval must be below.
        points: the most points of percent of right answers that may be lost in any family.

    Raises:
        KvtailorError: no plan has numbers, or none loses so little.
    """
    live = [each for each in plans if each.error is None]
    if not live:
        raise KvtailorError("no plan could be proved: " + "; ".join(str(each.error) for each in plans))
    if loss is not None:
        # Each plan is one more chance to meet the limit by luck.
        meeting = [each for each in live if each.loss_below(1 - _CHANCE / len(live)) <= loss]
        if not meeting:
            raise KvtailorError(_none_meets(min(live, key=lambda each: each.loss.value), loss))
        live = meeting
    if points is not None:
        lost = {id(each): each.points_lost() for each in live}
        known = {name: value for name, value in lost.items() if value is not None}
        if not known:
            raise KvtailorError(
                f"asked for a plan that loses at most {points} points of right answers, but the full cache has less "
                "than half of the answers of each family right, which then says nothing: give other tasks"
            )
        meeting = [each for each in live if known[id(each)] <= points]
        if not meeting:
            least_points = min(live, key=lambda each: known[id(each)])
            raise KvtailorError(
                f"no plan loses at most {points} points of right answers: the least is {known[id(least_points)]:.1f}"
                f", by {least_points.label}. Give more points, or more memory"
            )
        live = meeting
    most = max(live, key=lambda each: (each.right, -each.both))
    # Where the user said how many answers may be lost, the limit decides and not the most that can be had.
    keeping = live if points is not None else [each for each in live if not _loses_answers(each, most)]
    if aim == "bytes":
        chosen = min(keeping, key=lambda each: (each.bytes, each.loss.value))
    elif aim == "time" and all(each.seconds is not None for each in keeping):
        chosen = min(keeping, key=lambda each: (each.seconds or {}).get("median") or math.inf)
    else:
        chosen = _simplest(_not_worse(keeping))
    others = [each for each in plans if each.error is None and each is not chosen]
    # The plan was chosen among all by these very windows, so each pair is a comparison (Bonferroni).
    count = len(others) + 1
    confidence = 1 - _CHANCE / max(1, count * (count - 1) // 2)
    against = {each.label: chosen.against(each, confidence) for each in others}
    told = {label: _told(found) for label, found in against.items()}
    presets = [each for each in others if each.origin == "preset"]
    rival = min(presets, key=lambda each: each.loss.value) if presets else None
    needed = None
    if rival is not None and told[rival.label] == "not told apart":
        needed = _windows_for(chosen, rival, confidence)
    return Verdict(
        chosen=chosen,
        against=against,
        told=told,
        needed=needed,
        sentence=_sentence(chosen, rival, against, told, needed),
    )


def regret_of_text(proved: Sequence[Judged]) -> str | None:
    """Say what the plan with the least loss on text has fewer of right answers than the one with most.

    Both are picked on the proof itself, among the few that it has, whether they meet the limits or not.

    Args:
        proved: plans, 'full' may be among them.
    """
    live = [each for each in proved if each.error is None and each.origin != "full"]
    if not live or not live[0].asked:
        return None
    by_text = min(live, key=lambda each: fmean(each.nll))
    most = max(live, key=lambda each: each.right)
    return (
        f"Chosen by text alone, of the plans of the proof, it would be {by_text.label}, with {by_text.right} of "
        f"{by_text.asked} answers right; the most that any of them has is {most.right}, by {most.label}."
    )


def _not_worse(plans: Sequence[Judged]) -> list[Judged]:
    """The plans that cannot be told from the best one, and that cannot be worse by more than `TIE`."""
    best = min(plans, key=lambda each: each.both)
    left = [best]
    for each in plans:
        if each is best:
            continue
        apart = each.against(best)
        if apart.low is None or apart.high is None or apart.low > 0 or apart.high > TIE:
            continue
        if each.answers and len(each.answers) == len(best.answers):
            answers = mean_difference(each.answers, best.answers)
            if each.right < best.right or answers.low is None or answers.low > 0:
                continue
        left.append(each)
    return left


def _loses_answers(one: Judged, other: Judged) -> bool:
    """Whether a plan has fewer right answers than another beyond chance: exact sign test over those that differ."""
    lost = sum(a < b for a, b in zip(one.hits, other.hits, strict=True))
    gained = sum(a > b for a, b in zip(one.hits, other.hits, strict=True))
    if lost <= gained:
        return False
    tail = sum(math.comb(lost + gained, k) for k in range(lost, lost + gained + 1)) / 2 ** (lost + gained)
    return bool(tail < _CHANCE)


def _simplest(plans: Sequence[Judged]) -> Judged:
    least = min(each.bytes for each in plans)
    alike = [each for each in plans if each.bytes <= least * (1 + _ALIKE)]
    return min(alike, key=lambda each: (each.methods, len(each.plan), each.bytes))


def _told(found: Estimate) -> str:
    if found.ends is None or found.ends[0] <= 0 <= found.ends[1]:
        return "not told apart"
    return "better" if found.ends[1] < 0 else "worse"


def _windows_for(chosen: Judged, rival: Judged, confidence: float) -> int | None:
    """Windows after which the interval leaves out 0 in four of five cases, if more turn out as these did.

    Windows of one text count as independent here. None: no number would do.
    """
    differences = [a - b for a, b in zip(chosen.nll, rival.nll, strict=True)]
    middle = abs(fmean(differences))
    if len(differences) < 2 or middle == 0:
        return None
    normal = NormalDist()
    reach = normal.inv_cdf(1 - (1 - confidence) / 2) + normal.inv_cdf(0.8)
    return max(len(differences) + 1, math.ceil((reach * stdev(differences) / middle) ** 2))


def _sentence(
    chosen: Judged,
    rival: Judged | None,
    against: Mapping[str, Estimate],
    told: Mapping[str, str],
    needed: int | None,
) -> str:
    loss = chosen.loss
    words = f"It loses {_interval(loss)} nats per token to the full cache on text that the search never saw"
    if chosen.asked:
        words += f", and has {chosen.right} of {chosen.asked} answers right"
    words += ". "
    if rival is None:
        return words + "No preset of the proof stands beside it."
    found = against[rival.label]
    best = "the best other preset" if chosen.origin == "preset" else "the best preset"
    if told[rival.label] == "not told apart":
        words += f"It is not told apart from {best}, {rival.label} (this less that: {_interval(found)} nats)"
        return words + (f": about {needed} windows would be needed." if needed else ".")
    how = "less" if told[rival.label] == "better" else "more"
    shown = found if found.value >= 0 else found.map(lambda each: -each)
    return words + f"It loses {_interval(shown)} nats {how} than {best}, {rival.label}."


def _interval(found: Estimate) -> str:
    return f"{found.value:.4f} ({found.interval(4) or 'too few windows for an interval'})"


def _none_meets(least: Judged, loss: float) -> str:
    found = least.loss
    return (
        f"no plan is shown to lose at most {loss} nats per token: the least is {_interval(found)}, by {least.label}. "
        "Give more text, where the interval is wide, a larger loss, or more memory"
    )


def small_enough(proved: Sequence[Judged], limit: int | None, notes: list[str]) -> list[Judged]:
    """Return those that have no more bytes than the memory on the text of the proof either.

    Args:
        proved: plans.
        limit: bytes of all rows; None: there is no limit.
        notes: sentences about plans that are out are added.

    Raises:
        KvtailorError: all that have numbers are out.
    """
    if limit is None:
        return list(proved)
    fitting = [each for each in proved if each.error is not None or each.bytes <= limit]
    notes += [
        f"{each.label} has {byte_text(each.bytes)} on the text of the proof, more than the memory, and is out."
        for each in proved
        if each not in fitting
    ]
    if len(fitting) < len(proved) and not any(each.error is None for each in fitting):
        raise KvtailorError(
            f"every plan of the proof has more bytes on its text than the {limit} that were asked for: heads hold "
            "other numbers of tokens there. Give a little more memory, or more text"
        )
    return fitting


def fast_enough(proved: Sequence[Judged], limit: float | None, notes: list[str]) -> list[Judged]:
    """Return those whose median time of a token is at most the limit.

    Args:
        proved: plans.
        limit: seconds; None: there is no limit.
        notes: sentences about plans that are out are added.

    Raises:
        KvtailorError: none is so fast, or no time could be measured.
    """
    if limit is None:
        return list(proved)
    medians = [(each.seconds or {}).get("median") for each in proved]
    fast = [each for each, median in zip(proved, medians, strict=True) if median is not None and median <= limit]
    if not fast:
        known = [(median, each.label) for each, median in zip(proved, medians, strict=True) if median is not None]
        if not known:
            raise KvtailorError(f"asked for a token in {1e3 * limit:g} ms, but no time could be measured here")
        median, label = min(known)
        raise KvtailorError(
            f"no plan decodes a token in {1e3 * limit:g} ms: the fastest takes {1e3 * median:.2f} ms, {label}"
        )
    notes += [
        f"{each.label} is out: a token takes longer than {1e3 * limit:g} ms, or its time could not be measured."
        for each in proved
        if each not in fast
    ]
    return fast
