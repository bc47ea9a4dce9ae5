"""Stage 2: the structure of the plan, by Optuna's tree-structured Parzen estimator over records of the bench.

Every point that is suggested fills the same memory. It is measured on a few pieces first; Wilcoxon's signed-rank test
over these pieces, paired with the best plan so far, decides whether it is measured on the others as well. The study is
kept as SQLite beside the records. A search that was killed is asked the same questions again in the same order, and
its answers are there: so it ends as it would have, and nothing is measured twice.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from kvtailor.errors import KvtailorError
from kvtailor.fitting.measuring import Measured, Measurer
from kvtailor.fitting.pieces import Piece
from kvtailor.fitting.space import NONE, POOLED, Space, layers_start
from kvtailor.plan import Plan

__all__ = ["Candidate", "Searched", "measured_to_fit", "same_score", "search"]

_AT_ONCE = 4
"""Trials that are asked for together; the same on every machine, so that a cluster gives the same search."""
_FEWEST_PIECES = 4
_NOT_BETTER = 0.1


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A point of the space at a memory, with what was measured.

    Attributes:
        point: see `Space`.
        plan: of the point.
        first: on the pieces that all candidates have.
        whole: on all pieces; None for one that was given up before.
    """

    point: Mapping[str, Any]
    plan: Plan
    first: Measured
    whole: Measured | None

    @property
    def loss(self) -> float:
        """On as many pieces as it was measured on."""
        return (self.whole or self.first).loss

    @property
    def is_preset(self) -> bool:
        """Whether it is a shipped preset."""
        return bool(self.point["how"] == "preset")


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search met.

    Attributes:
        candidates: in the order in which they were met, each plan once.
        refused: sentences about points that could not be measured.
        trials: how many points were asked for.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    trials: int

    def presets(self) -> list[Candidate]:
        """Return the presets, the least loss on the first pieces first: many are given up after these."""
        return _presets(self.candidates)

    def best(self, *, presets: bool | None = None) -> list[Candidate]:
        """Return the candidates that were measured whole, the least loss first.

        Args:
            presets: only presets, or none of them; None: all.
        """
        found = [
            each
            for each in self.candidates
            if each.whole is not None and (presets is None or each.is_preset is presets)
        ]
        return sorted(found, key=lambda each: (each.loss, str(each.plan)))


@dataclass
class _Search:
    """One search under way."""

    space: Space
    measurer: Measurer
    memory: int
    first: Sequence[Piece]
    rest: Sequence[Piece]
    told: Callable[[Candidate | None, int], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def answer(self, study: optuna.Study, trials: Sequence[optuna.Trial]) -> None:
        """Measure what some trials suggest, and tell the study."""
        points: list[Mapping[str, Any]] = [self.space.suggest(trial) for trial in trials]
        plans = [self.space.plan(point, self.memory) for point in points]
        there = [plan for plan in plans if plan is not None]
        fitted = measured_to_fit(self.space, self.measurer, there, self.first, memory=self.memory)
        whole: list[tuple[optuna.Trial, Mapping[str, Any], Measured]] = []
        for trial, point, plan in zip(trials, points, plans, strict=True):
            found = None if plan is None else fitted[plan.hash]
            if found is None or found.error is not None:
                if found is not None:
                    self.refused.append(f"{found.plan}: {found.error}")
                # A constraint above 0 tells the sampler that such points are no plans; they have no value.
                _constrain(trial, 1.0)
                study.tell(trial, float("inf"))
                self.told(None, len(self.rest) + (len(self.first) if found is None else 0))
                continue
            _constrain(trial, 0.0)
            trial.set_user_attr("plan", str(found.plan))
            trial.set_user_attr("bytes", found.bytes_held)
            for step, value in enumerate(found.each()):
                trial.report(value, step)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                self._take(Candidate(point=point, plan=found.plan, first=found, whole=None))
            else:
                whole.append((trial, point, found))
        if not self.rest:
            measured = [found for _, _, found in whole]
        else:
            more = self.measurer.measure([found.plan for _, _, found in whole], self.rest) if whole else []
            measured = [found.with_more(each) for (_, _, found), each in zip(whole, more, strict=True)]
        for (trial, point, found), every in zip(whole, measured, strict=True):
            if every.error is not None:
                _constrain(trial, 1.0)
                self.refused.append(f"{found.plan}: {every.error}")
                study.tell(trial, float("inf"))
                self.told(None, 0)
                continue
            study.tell(trial, every.loss)
            self._take(Candidate(point=point, plan=found.plan, first=found, whole=every))

    def _take(self, candidate: Candidate) -> None:
        name = candidate.plan.hash
        if name not in self.candidates or self.candidates[name].whole is None:
            self.candidates[name] = candidate
        self.told(candidate, len(self.rest) if candidate.whole is None else 0)


def measured_to_fit(
    space: Space, measurer: Measurer, plans: Sequence[Plan], pieces: Sequence[Piece], *, memory: int
) -> dict[str, Measured]:
    """Return plans measured, by the hash of what was asked: with a smaller budget where the bytes were too many.

    Args:
        space: whose sizes are used.
        measurer: measures.
        plans: any number.
        pieces: the same for all.
        memory: bytes of the whole cache.
    """
    found = dict(zip([plan.hash for plan in plans], measurer.measure(plans, pieces), strict=True))
    sizer = space.sizer
    for _ in range(3):
        held = {
            name: sizer.measured(each.plan, each.bytes_held)
            for name, each in found.items()
            if each.bytes_held is not None
        }
        smaller = {
            name: sizer.cut(found[name].plan, 0.995 * memory / size) for name, size in held.items() if size > memory
        }
        for name, plan in smaller.items():
            if plan is None:
                found[name] = replace(found[name], error="it has more bytes than the memory", bytes_held=None)
        again = {name: plan for name, plan in smaller.items() if plan is not None}
        if not again:
            return found
        found |= dict(zip(again, measurer.measure(list(again.values()), pieces), strict=True))
    return found


def search(
    space: Space,
    measurer: Measurer,
    *,
    memory: int,
    first: Sequence[Piece],
    rest: Sequence[Piece],
    trials: int,
    state: int,
    storage: Path | None,
    name: str = "fit",
    starts: Sequence[Mapping[str, Any]] = (),
    told: Callable[[Candidate | None, int], None] = lambda candidate, skipped: None,
) -> Searched:
    """Return what a search under a memory met.

    Args:
        space: what can be suggested.
        measurer: measures plans.
        memory: bytes of the whole cache.
        first: pieces that every candidate is measured on. rest: those that the promising ones are measured on too.
        trials: how many points are asked for beside those that it begins with.
        state: random state.
        storage: SQLite file of the study; None: in memory.
        name: of the study in the file.
        starts: parameters to begin with beside the space's own.
        told: called once for each trial, with its candidate if it is a plan, and how many pieces were left out for it.

    Raises:
        KvtailorError: not one point could be measured.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Some of what is used is marked as experimental since its names may still change; the versions are pinned.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = _study(storage, name, state)
        work = _Search(space=space, measurer=measurer, memory=memory, first=first, rest=rest, told=told)
        begun = [*space.starts(memory), *starts]
        for each in begun:
            study.enqueue_trial(dict(each), skip_if_exists=True)
        left = trials + len(begun)
        crossed = False
        while left > 0:
            work.answer(study, [study.ask() for _ in range(min(_AT_ONCE, left))])
            left -= _AT_ONCE
            if not crossed and len(study.trials) >= len(begun):
                crossed = True
                for each in _crossed(work.candidates.values(), space):
                    study.enqueue_trial(each, skip_if_exists=True)
    if not work.candidates:
        raise KvtailorError("no plan could be measured: " + "; ".join(work.refused[:3]))
    return Searched(candidates=tuple(work.candidates.values()), refused=tuple(work.refused), trials=len(study.trials))


def _study(storage: Path | None, name: str, state: int) -> optuna.Study:
    sampler = optuna.samplers.TPESampler(
        seed=state,
        multivariate=True,
        group=True,
        n_startup_trials=8,
    )
    pruner = optuna.pruners.WilcoxonPruner(p_threshold=_NOT_BETTER, n_startup_steps=_FEWEST_PIECES)
    url = None
    if storage is not None:
        url = f"sqlite:///{storage}"
        try:
            known = {each.study_name for each in optuna.get_all_study_summaries(url)} if storage.exists() else set()
            if name in known:
                # It is asked anew from its beginning: what it had been told is in the records.
                optuna.delete_study(study_name=name, storage=url)
        except Exception:  # of SQLAlchemy or Optuna: the file is damaged, or of another version.
            # Nothing is lost: what was measured is in the records. The file stays for whoever wants to look.
            storage.replace(storage.with_name(f"unreadable-{storage.name}"))
    return optuna.create_study(sampler=sampler, pruner=pruner, storage=url, study_name=name)


def _constrain(trial: optuna.Trial, over: float) -> None:
    """Tell the sampler whether a point is a plan at all: above 0, it is none."""
    trial.set_constraint("fits", over)


def _crossed(candidates: Iterable[Candidate], space: Space) -> list[dict[str, Any]]:
    """Points between presets: the scorers of the best ones, with stage 1's layers and with codecs."""
    named = [score for each in _presets(candidates)[:6] for score in space.scores if same_score(each.plan, score)]
    best = list(dict.fromkeys([*named, *(score for score in space.scores if score == "snapkv")]))[:3]
    found: list[dict[str, Any]] = []
    for score in best:
        if space.layers is not None:
            found += [layers_start(space.layers, score, allocate=each) for each in space.allocations]
        for family, bits in (("kivi", 4), ("lowrank", 4)):
            if family in space.families and POOLED in space.allocators:
                each: dict[str, Any] = {
                    "how": "words",
                    "score": score,
                    "allocate": POOLED,
                    "merge": "drop",
                    "family": family,
                }
                each |= (
                    {"key_bits": bits, "value_bits": bits} if family == "kivi" else {"rank": 0.5, "lowrank_bits": bits}
                )
                found.append(each)
    return found


def _presets(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted((each for each in candidates if each.is_preset), key=lambda each: each.first.loss)


def same_score(plan: Plan, word: str) -> bool:
    """Whether a plan has this scorer, which is in the plan language."""
    return plan.score is not None and word != NONE and Plan.parse(f"{word} @ tokens=1").score == plan.score
