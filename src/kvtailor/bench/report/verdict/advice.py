"""What to do after a run, in one sentence: the plan to use, the plan to leave alone, and what to type next.

Nothing here is said from an interval that contains 0. A plan is recommended where its loss is shown to be below the
margin, and named as harmful where its loss is shown to be above it. Right answers are told as counts; where they are
too few to show anything, the sentence says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtailor.bench.report.tables.quality import NATS, POINTS, Measure, Score
from kvtailor.bench.report.verdict.verdict import (
    Judged,
    Judgement,
    MeasuredScore,
    best_of,
    fell,
    share_of_bytes,
    whole_of,
)

__all__ = ["Advice", "advise"]

_BROKEN = 2.0
"""Times the perplexity of 'full' from which on a plan is called broken; also a half of its right answers."""
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do.

    Attributes:
        sentence: empty where nothing can be said; then the headline says why.
        next: what to type; None where nothing follows.
    """

    sentence: str = ""
    next: str | None = None


def advise(found: Judgement, model: str) -> Advice:
    """Return what to do after a run.

    Args:
        found: what it shows.
        model: its name, for the command.
    """
    fair, limit = found.fair, found.limit
    if not fair:
        return Advice()
    harmful = _harmful(found.judged)
    but = f"; {harmful}" if harmful else ""
    shown = [each for each in fair if each.shown]
    best = best_of(shown, fair)
    if best is not None:
        said = f"Use {best.row.label}: {share_of_bytes(best)} of the bytes, {_kept(best)}{but}."
        return Advice(sentence=said, next=_run(best, model))
    if shown:
        # One that is shown to lose little is beaten by one of which that is not shown.
        sure = min(shown, key=_bytes)
        better = min((other for other in fair if sure.beaten_by(other)), key=_bytes)
        said = (
            f"Measure more before you choose: {sure.row.label} is shown to lose less than {limit} at "
            f"{share_of_bytes(sure)} of the bytes, and {better.row.label}, at {share_of_bytes(better)}, may lose no "
            f"more{but}."
        )
        return Advice(sentence=said, next=_the_same_with(_more([better])))
    undecided = [each for each in fair if not each.worse]
    if not undecided:
        said = f"Use none of these plans: each loses more than {limit.replace(' and ', ' or ')}; {harmful}."
        return Advice(sentence=said, next=f"kvtailor fit --model {model} --text FILE --memory 50%")
    on_text = best_of([each for each in undecided if _is_shown_on_text(each)], fair)
    if on_text is not None:
        more = _more([on_text])
        enough = f", too few to be sure of them{f' ({more} would do)' if more else ''}"
        said = f"Use {on_text.row.label}: {share_of_bytes(on_text)} of the bytes, {_kept(on_text)}{enough}{but}."
        return Advice(sentence=said, next=_run(on_text, model))
    names = _listed([each.row.label for each in undecided])
    are, their = ("is", "Its") if len(undecided) == 1 else ("are", "Their")
    said = (
        f"Use none of these plans yet: {names} {are} undecided. {their} loss is not shown to be less than {limit}, "
        f"nor to be more{but}."
    )
    return Advice(sentence=said, next=_the_same_with(_more(undecided)))


def _run(best: Judged, model: str) -> str:
    return f'kvtailor run --model {model} --plan "{best.row.label}" --prompt-file FILE'


def _the_same_with(more: str) -> str | None:
    return f"the same with {more}" if more else None


def _is_shown_on_text(judged: Judged) -> bool:
    """Whether a plan is shown to lose little on all text, and needles, if too few, show no loss beyond chance."""
    texts = [found.below for m, _, _, found in judged.scores if m.difference_unit == NATS]
    others = [(m, s) for m, s, _, _ in judged.scores if m.difference_unit != NATS]
    return bool(texts) and all(texts) and all(m.task == "needle" and not fell(m, s) for m, s in others)


def _bytes(judged: Judged) -> float:
    return judged.row.ratio or 1.0


def _kept(best: Judged) -> str:
    """What a plan is shown to lose at most, and its right answers; of several kinds of them those it lost most of."""
    bounds = [found.bound for m, _, _, found in best.scores if m.difference_unit == NATS and found.bound is not None]
    parts = [f"at most {max(0.0, math.ceil(1000 * max(bounds)) / 1000):.3f} nats per token lost"] if bounds else []
    answers = [(m, s, full) for m, s, full, _ in best.scores if m.task == "needle" and m.difference_unit == POINTS]
    if answers:
        measure, ours, full = min(answers, key=lambda each: each[1].value - each[2].value)
        parts.append(_answers(measure, ours, full, several=len(answers) > 1))
    return ", ".join(parts) or "its loss shown to be below the margin"


def _harmful(judged: Sequence[Judged]) -> str:
    """The plans that are shown to lose more than the margin, the worst with its numbers; empty where there is none.

    A plan whose loss is larger and not shown is not named; the words then say that the worst is one of those shown.
    """
    worst = sorted((each for each in judged if each.worse), key=lambda each: (_is_broken(each), _shown(each)))[::-1]
    if not worst:
        return ""
    first, broken = worst[0], [each.row.label for each in worst[1:] if _is_broken(each)]
    if _is_broken(first):
        said = f"{first.row.label} is broken here"
    elif any(_exceeds(each, first) for each in judged):
        said = f"of the plans that are shown to lose, {first.row.label} loses most"
    else:
        said = f"{first.row.label} loses most here"
    return f"{said}: {_numbers(first)}" + (f" ({_listed(broken)} too)" if broken else "")


def _shown(judged: Judged) -> tuple[float, float, float]:
    """The largest losses that are shown to be above the margin: nats, points, share of a score on its own scale."""
    return _largest([each for each in judged.scores if each.found.above])


def _exceeds(judged: Judged, worst: Judged) -> bool:
    """Whether a plan lost more, shown or not, in what the numbers of the worst are told in."""
    told, lost = _shown(worst), _largest(judged.scores)
    return next((theirs > ours for ours, theirs in zip(told, lost, strict=True) if ours > 0), False)


def _largest(scores: Sequence[MeasuredScore]) -> tuple[float, float, float]:
    found = {NATS: 0.0, POINTS: 0.0, "": 0.0}
    for measure, ours, full, _ in scores:
        if ours.losses is not None:
            unit = measure.difference_unit if measure.difference_unit in (NATS, POINTS) else ""
            share = ours.losses.mean if unit else ours.losses.mean / whole_of(measure, full)
            found[unit] = max(found[unit], share)
    return found[NATS], found[POINTS], found[""]


def _is_broken(judged: Judged) -> bool:
    for measure, ours, full, found in judged.scores:
        if found.above and measure.difference_unit == NATS and ours.value >= _BROKEN * full.value:
            return True
        if found.above and measure.difference_unit == POINTS and _BROKEN * ours.value <= full.value:
            return True
    return False


def _numbers(judged: Judged) -> str:
    """What a plan reached where it is shown to lose, against 'full': of several texts or tasks the worst."""
    above = [each for each in judged.scores if each.found.above]
    texts = [each for each in above if each.measure.difference_unit == NATS]
    if texts:
        _, ours, full, _ = max(texts, key=lambda each: each.ours.value / each.full.value)
        return f"perplexity {ours.value:.3g} against {full.value:.3g}"
    measure, ours, full, _ = max(above, key=lambda each: abs(each.ours.value - each.full.value))
    if measure.difference_unit == POINTS:
        return _answers(measure, ours, full, several=sum(m.difference_unit == POINTS for m, *_ in judged.scores) > 1)
    return f"{ours.value:.3g} against {full.value:.3g} in {measure.name}"


def _more(undecided: Sequence[Judged]) -> str:
    """What would decide it for one of the plans, if further samples turn out alike; empty: no number would.

    It names its verb, since the records may be of another one, which has no such options, or of Python.
    """
    found: list[tuple[int, str]] = []
    for each in undecided:
        lacking = [(m.task, f.needed, s.points) for m, s, _, f in each.scores if not f.below]
        if any(needed is None or task not in ("perplexity", "needle") for task, needed, _ in lacking):
            continue
        words = []
        windows = [needed or 0 for task, needed, _ in lacking if task == "perplexity"]
        # The option says how many for each length and depth, and each of these is a record.
        answers = [(needed or 0, points) for task, needed, points in lacking if task == "needle"]
        if windows:
            words.append(f"--windows {_round_up(max(windows))}")
        if answers:
            words.append(f"--documents {max(math.ceil(needed / points) for needed, points in answers)}")
        if words:
            found.append((max([*windows, *(needed for needed, _ in answers)]), " ".join(words)))
    return f"kvtailor bench {min(found)[1]}" if found else ""


def _round_up(number: int) -> int:
    digits = max(0, len(str(number)) - 2)
    step: int = 10**digits
    return math.ceil(number / step) * step


def _answers(measure: Measure, ours: Score, full: Score, *, several: bool) -> str:
    """Right answers of a plan and of 'full', with the name of what was asked where it is one of several."""
    where = f" in {measure.name.removesuffix(', right')}" if several else ""
    return f"{_right(ours)} of {ours.samples} answers right{where} ('full': {_right(full)})"


def _right(score: Score) -> int:
    return round(score.value * score.samples / 100)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
