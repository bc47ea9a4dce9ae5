"""Plans measured on pieces: every number is a record of the bench, and nothing is measured twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from kvtailor.bench import checks
from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.overlap import Calibrated
from kvtailor.bench.resources import CellResources
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.cluster import Executor
from kvtailor.fitting.damage import Damage
from kvtailor.fitting.pieces import TEXT, Piece
from kvtailor.plan import Plan
from kvtailor.presets import FULL

__all__ = ["CalibratedHere", "Measured", "Measurer", "quiet"]

_NO_TRACE = ("untouched cache", "equal results", "same results on other data")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a plan does on some pieces.

    Attributes:
        plan: the plan.
        kl: by group, KL to the full cache of each piece, nats per token.
        hits: by family, 1 or 0 for each document.
        bytes_held: the most that its cache weighed, of one row.
        bytes_full: of the same tokens without compression.
        error: why it could not be measured; then the rest is empty.
    """

    plan: Plan
    kl: Mapping[str, tuple[float, ...]]
    hits: Mapping[str, tuple[float, ...]]
    bytes_held: int | None = None
    bytes_full: int | None = None
    error: str | None = None

    @property
    def loss(self) -> float:
        """Mean KL on text, and the mean over families of that on answers on top; nats per token."""
        text = fmean(self.kl[TEXT])
        answers = [fmean(each) for group, each in self.kl.items() if group != TEXT]
        return text + (fmean(answers) if answers else 0.0)

    def with_more(self, more: Measured) -> Measured:
        """Return it with what the same plan does on further pieces; an error of theirs is one of the whole.

        Args:
            more: of the same plan, on other pieces.
        """
        if more.error is not None:
            return more
        heaviest = max(self, more, key=lambda each: each.bytes_held or 0)
        return replace(
            self,
            kl=_joined(self.kl, more.kl),
            hits=_joined(self.hits, more.hits),
            bytes_held=heaviest.bytes_held,
            bytes_full=heaviest.bytes_full,
        )

    def each(self) -> list[float]:
        """One number for each piece, of which `loss` is the weighted mean: paired with those of another plan."""
        groups = [group for group in self.kl if group != TEXT]
        # A piece of a family counts so much that each family weighs the same, and all together what the text weighs.
        total = sum(len(each) for each in self.kl.values())
        found = [total * value / len(self.kl[TEXT]) for value in self.kl[TEXT]]
        for group in groups:
            found += [total * value / len(self.kl[group]) / len(groups) for value in self.kl[group]]
        return found


def _joined(
    first: Mapping[str, tuple[float, ...]], more: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    return {name: (*first.get(name, ()), *more.get(name, ())) for name in {**first, **more}}


class CalibratedHere:
    """Whether plans were calibrated on what judges them; each artefact is held against the texts once.

    Args:
        texts: what is searched and judged on.
    """

    def __init__(self, texts: Sequence[str]):
        self._texts = texts
        self._known: dict[Calibrated, str | None] = {}

    def sentence(self, calibration: Sequence[Calibrated]) -> str | None:
        """Say which artefact of these was made from the texts; None where none was."""
        for made in calibration:
            if made not in self._known:
                try:
                    checks.check_calibration((made,), self._texts, "the texts of this fit")
                except Fraud as error:
                    self._known[made] = str(error)
                else:
                    self._known[made] = None
        return next((told for made in calibration if (told := self._known[made]) is not None), None)


class Measurer:
    """Measures plans, in a folder of records.

    Args:
        subject: the model.
        folder: where records are, and are written to.
        executor: of a cluster; None: here.
        resources, workers: see `bench.runner.run`.
        advance: called after each piece with a label; pieces of the plan 'full', which every call has, are not told.
        finish: called with each record.
        calibrated: what plans were calibrated on is held against all texts, each artefact once, and a plan that was
            calibrated on them is not run; None: a run holds each plan against the pieces that it measures.
    """

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        *,
        executor: Executor | None = None,
        resources: CellResources | None = None,
        workers: int = 1,
        advance: Callable[[str], None] = lambda label: None,
        finish: Callable[[Record], None] = lambda record: None,
        calibrated: CalibratedHere | None = None,
    ):
        self.subject, self.folder = subject, folder
        self._executor, self._resources, self._workers = executor, resources, workers
        self._finish = finish
        self._calibrated = calibrated
        of_full = f" · {FULL}"

        def told(label: str) -> None:
            if not label.endswith(of_full):
                advance(label)

        self._advance = told
        self._known: dict[tuple[str, str], Measured] = {}

    def measure(
        self, plans: Sequence[Plan], pieces: Sequence[Piece], *, may_do_nothing: bool = False
    ) -> list[Measured]:
        """Return what each plan does on the pieces; plans that are the same are measured once.

        A plan whose results fail a sanity check of the bench has an error; it would be the first to win a search.

        Args:
            plans: any number.
            pieces: the same for all.
            may_do_nothing: a plan may compress without a trace in the results, as one layer of many may.

        Raises:
            KvtailorError: no plan can be measured.
        """
        task = Damage(pieces=tuple(pieces))
        name = str([id(piece) for piece in pieces])
        new = {plan.hash: plan for plan in plans if (plan.hash, name) not in self._known}
        if self._calibrated is not None:
            for plan in list(new.values()):
                told = self._calibrated.sentence(self.subject.provenance(Contestant.of(str(plan))))
                if told is not None:
                    self._known[plan.hash, name] = Measured(plan=plan, kl={}, hits={}, error=told)
                    del new[plan.hash]
        if new:
            contestants = contestants_of([str(plan) for plan in new.values()])
            records = self._run(contestants, task)
            wrong = _wrong(records, _NO_TRACE if may_do_nothing else ())
            for plan in new.values():
                own = [record for record in records if record.plan_hash == plan.hash]
                self._known[plan.hash, name] = _measured(plan, own, wrong.get(plan.hash))
        return [self._known[plan.hash, name] for plan in plans]

    def _run(self, contestants: Sequence[Contestant], task: Damage) -> list[Record]:
        with quiet():
            return self._records(contestants, task)

    def _records(self, contestants: Sequence[Contestant], task: Damage) -> list[Record]:
        return run(
            self.subject,
            contestants,
            [task],
            out=self.folder,
            advance=self._advance,
            finish=self._finish,
            bandwidth=False,
            executor=self._executor,
            resources=self._resources,
            workers=self._workers,
            judge=lambda records: None,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence about plans that keep nothing but their window: such are tried, and their numbers say what they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _wrong(records: Sequence[Record], allowed: Collection[str]) -> dict[str, str]:
    """Sentences about plans whose results cannot be what they say, by plan hash.

    Raises:
        Fraud: what is wrong is not of single plans.
    """
    found: dict[str, str] = {}
    for finding in checks.findings(records):
        if finding.name in allowed:
            continue
        if not finding.records:
            raise Fraud(finding.name, finding.sentence)
        for record in finding.records:
            found.setdefault(record.plan_hash, f"{finding.name}: {finding.sentence}")
    return found


def _measured(plan: Plan, records: Sequence[Record], wrong: str | None) -> Measured:
    error = wrong or next((record.error for record in records if record.error is not None), None)
    if error is not None:
        return Measured(plan=plan, kl={}, hits={}, error=error)
    heaviest = max(records, key=lambda record: record.bytes_held or 0)
    return Measured(
        plan=plan,
        kl={str(record.point["group"]): record.values["kl"] for record in records},
        hits={str(record.point["group"]): record.values["hit"] for record in records if "hit" in record.values},
        bytes_held=heaviest.bytes_held,
        bytes_full=heaviest.bytes_full,
    )
