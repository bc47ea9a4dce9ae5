"""The loop over the samples of a task and the plans: what is known, what fails, how far it is, and the records."""

from __future__ import annotations

import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace

from kvtailor.bench import checks
from kvtailor.bench.checks import Fraud
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.forks import LostFork, Score, score_in_forks
from kvtailor.bench.measure.kept_prompts import KeptPrompts
from kvtailor.bench.measure.memory_gauge import is_out_of_memory, out_of_memory
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.contract import AllAtOnce, NotANumber, PlanByPlan, Sample, Scored, Task
from kvtailor.errors import ArgumentError, KvtailorError, suggest
from kvtailor.presets import FULL

__all__ = [
    "Calibrations",
    "Given",
    "blank_of",
    "known_together",
    "memory_suffices",
    "records_of",
    "records_of_sample",
    "sides_of",
]


class Calibrations:
    """Holds what plans were calibrated on against the scored texts, each pair once."""

    def __init__(self) -> None:
        # The functions themselves are kept: the identity of one that is gone may come again.
        self._checked: list[tuple[str, object]] = []

    def check(self, contestant: Contestant, sample: Sample) -> None:
        """Compare a plan with a sample.

        Raises:
            Fraud: "calibration on the evaluated text".
        """
        done = any(plan == contestant.hash and of is sample.scored for plan, of in self._checked)
        if sample.scored is not None and contestant.calibration and not done:
            checks.check_calibration(contestant.calibration, sample.scored(), str(sample.text), whole=sample.whole)
            self._checked.append((contestant.hash, sample.scored))


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a task is measured with.

    Attributes:
        subject: the model.
        contestants: the plans, the null plan first.
        blank: a record of one plan with all that does not depend on the task.
        advance: called after each unit of work with the label of what runs.
        known: the finished record of an earlier run that measured exactly this, by the record that would be written but
            for its results; None where there is none. Such a record is given back in place of measuring again.
        calibrations: what plans were calibrated on, as far as it has been held against the texts.
        workers: so many plans of a sample are scored side by side, see `bench.forks`.
    """

    subject: Subject
    contestants: Sequence[Contestant]
    blank: Callable[[Contestant], Record]
    advance: Callable[[str], None]
    known: Callable[[Record], Record | None] = lambda blank: None
    calibrations: Calibrations = field(default_factory=Calibrations)
    workers: int = 1


def records_of(task: Task, given: Given) -> Iterator[Record]:
    """Yield the records of all plans, sample by sample. A plan that fails gives a record with `error`.

    Raises:
        KvtailorError: the task itself cannot be done, it gives a metric that it does not declare, NaN or infinity
            came out for 'full', or the memory did not suffice for what all plans share.
        Fraud: a sanity check failed that is not of one plan alone.
    """
    failed = dict[str, str]()
    with memory_suffices(task.name):
        for sample in task.samples(given.subject, given.contestants):
            yield from records_of_sample(task, sample, given, sides_of(task, given.contestants), failed)


@contextmanager
def memory_suffices(where: str) -> Iterator[None]:
    """While it is open, too little memory is a sentence on what all plans of a task share, and not on one of them.

    Args:
        where: the task, and its text if that is known.

    Raises:
        KvtailorError: the memory did not suffice.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise KvtailorError(f"{where}, in what all plans share: {out_of_memory(error)}") from error


def sides_of(task: Task, contestants: Sequence[Contestant]) -> list[Contestant]:
    """Return the plans, and before them the model's own cache where the task measures that too."""
    return [OWN, *contestants] if task.own_cache else list(contestants)


def records_of_sample(
    task: Task, sample: Sample, given: Given, contestants: Sequence[Contestant], failed: dict[str, str]
) -> Iterator[Record]:
    """Yield the records of one sample.

    Args:
        task: of the sample.
        sample: one of its samples.
        given: what it is measured with.
        contestants: those of `sides_of` that are asked for.
        failed: by plan hash, the errors of plans that failed on earlier samples and are not tried again; what fails
            here is added.

    Raises:
        KvtailorError, Fraud: see `records_of`.
    """
    cells = [_Cell(task, sample, given, contestant) for contestant in contestants]
    with _sharing(given, sample), memory_suffices(_where(task.name, sample.text)):
        yield from _of_cells(task, sample, given, cells, failed)


@contextmanager
def _sharing(given: Given, sample: Sample) -> Iterator[None]:
    """While it is open, prompts of a sample are kept for all plans of a run; what is kept is dropped then."""
    kept = _kept_of(given)
    kept.begin([each.plan for each in given.contestants if each.plan is not None], of=sample.text_hash)
    try:
        yield
    finally:
        kept.end()


def _kept_of(given: Given) -> KeptPrompts:
    """The kept prompts of a subject; of one without, some that nothing comes to."""
    kept = given.subject.kept
    return kept if isinstance(kept, KeptPrompts) else KeptPrompts()


def _of_cells(
    task: Task, sample: Sample, given: Given, cells: Sequence[_Cell], failed: dict[str, str]
) -> Iterator[Record]:
    if isinstance(task, AllAtOnce):
        yield from _all_at_once(task, sample, given, cells, failed)
    elif isinstance(task, PlanByPlan):
        yield from _one_by_one(task, sample, given, cells, failed)
    else:
        raise ArgumentError(f"the task {task.name!r} is neither PlanByPlan nor AllAtOnce: derive it from one of them")


def _one_by_one(
    task: PlanByPlan, sample: Sample, given: Given, cells: Sequence[_Cell], failed: dict[str, str]
) -> Iterator[Record]:
    """The records of plans that are scored one after the other, or side by side; then in the order in which they end.

    The first plan is scored here in any case: it leaves behind what the others can use, such as kept prompts.
    """
    rest: list[_Cell] = []
    begun = False
    for cell in cells:
        scored = cell.known is None and cell.contestant.hash not in failed
        if begun and scored and given.workers > 1:
            rest.append(cell)
        else:
            yield _of_one(task, sample, given, cell, failed)
        begun = begun or (scored and not cell.contestant.is_own)

    kept = _kept_of(given)

    def score(cell: _Cell) -> Score:
        return lambda step: (_of_one(task, sample, given, cell.told_by(step), failed), kept.findings())

    going = score_in_forks([score(cell) for cell in rest], given.workers, lambda number: rest[number].advance())
    with closing(going):
        for number, found in going:
            cell = rest[number]
            cell.finish()
            if isinstance(found, LostFork):
                record = replace(cell.blank, error=str(found))
            else:
                record, findings = found
                kept.learn(findings)
            if record.error is not None:
                failed[cell.contestant.hash] = record.error
            yield record


def blank_of(sample: Sample, blank: Record) -> Record:
    """Return a plan's record with what a sample says, and no results."""
    return replace(
        blank,
        point=dict(sample.point),
        text=sample.text,
        text_hash=sample.text_hash,
        state=sample.state,
        notes=sample.notes,
    )


def _with_prompts(record: Record, kept: KeptPrompts, cell: _Cell) -> Record:
    """A record, with what became of its plan's prompts."""
    plan = cell.contestant.plan
    return replace(record, notes=(*record.notes, *kept.notes_on(plan)), **kept.told(plan))


def _of_one(task: PlanByPlan, sample: Sample, given: Given, cell: _Cell, failed: dict[str, str]) -> Record:
    if cell.known is not None:
        task.recall(cell.contestant, sample, cell.known.values)
        cell.finish()
        return cell.known
    if cell.contestant.hash in failed:
        return replace(cell.blank, error=failed[cell.contestant.hash])
    begin = time.perf_counter()
    kept = _kept_of(given)
    kept.begin_record()
    try:
        given.calibrations.check(cell.contestant, sample)
        scored = task.score(given.subject, cell.contestant, sample, cell.advance)
        _check_numbers(scored)
    except Exception as error:
        failed[cell.contestant.hash] = _of_plan(error, cell)
        cell.finish()
        return replace(cell.blank, error=failed[cell.contestant.hash])
    cell.finish()
    found = _filled(task, cell.blank, scored, time.perf_counter() - begin)
    return _with_prompts(found, kept, cell)


def _all_at_once(
    task: AllAtOnce, sample: Sample, given: Given, cells: Sequence[_Cell], failed: dict[str, str]
) -> Iterator[Record]:
    known = known_together(task, [cell.known for cell in cells])
    turns = _Turns({cell.contestant.hash: cell for cell in cells}, cells[0].blank.machine if cells else {}, failed)
    missing = []
    for cell, record in zip(cells, known, strict=True):
        if record is None and turns.live(cell.contestant):
            with turns.own_errors(cell.contestant):
                given.calibrations.check(cell.contestant, sample)
                missing.append(cell.contestant)
    begin, kept = time.perf_counter(), _kept_of(given)
    kept.begin_record()
    try:
        scored = task.score_all(given.subject, missing, sample, turns) if missing else {}
    except NotANumber as error:
        raise _of_reference(error, cells[0].blank, FULL) from error
    wall = time.perf_counter() - begin
    for plan, each in scored.items():
        with turns.own_errors(turns.cells[plan].contestant):
            _check_numbers(each)
    for cell, record in zip(cells, known, strict=True):
        cell.finish()
        if record is not None:
            yield record
        elif cell.contestant.hash in turns.errors:
            yield replace(cell.blank, error=turns.errors[cell.contestant.hash])
        else:
            filled = _filled(task, cell.blank, scored[cell.contestant.hash], wall)
            yield _with_prompts(filled, kept, cell)


def known_together(task: AllAtOnce, known: list[Record | None]) -> list[Record | None]:
    """Return those of the known records of a sample that may stand beside each other: all of one run, or none.

    Where numbers of several runs can be compared, that is each of them.
    """
    if task.of_one_run and not (all(known) and len({record.run for record in known if record is not None}) == 1):
        return [None] * len(known)
    return known


class _Cell:
    """One plan on one sample: its blank record, what is known of it, and its steps."""

    def __init__(self, task: Task, sample: Sample, given: Given, contestant: Contestant):
        self.contestant = contestant
        self.blank = blank_of(sample, given.blank(contestant))
        self.known = given.known(self.blank)
        self._tell, self._left = given.advance, sample.steps
        self._label = f"{sample.label or task.name} · {contestant.label}"

    def told_by(self, step: Callable[[], None]) -> _Cell:
        """Return one like it, whose steps are told in another way."""
        found = copy(self)
        found._tell = lambda label: step()
        return found

    def advance(self) -> None:
        """Tell one step."""
        self._left -= 1
        self._tell(self._label)

    def finish(self) -> None:
        """Tell the steps that were promised and not taken."""
        while self._left > 0:
            self.advance()


@dataclass
class _Turns:
    """See `tasks.contract.Turns`."""

    cells: dict[str, _Cell]
    machine: Mapping[str, object]
    errors: dict[str, str]

    @contextmanager
    def __call__(self, contestant: Contestant) -> Iterator[bool]:
        with self.own_errors(contestant):
            yield self.live(contestant)
        self.cells[contestant.hash].advance()

    @contextmanager
    def own_errors(self, contestant: Contestant) -> Iterator[None]:
        """Take down what is raised while it is open as the plan's own error, if it can be."""
        try:
            yield
        except Exception as error:
            self.errors[contestant.hash] = _of_plan(error, self.cells[contestant.hash])

    def live(self, contestant: Contestant) -> bool:
        return contestant.hash not in self.errors


def _of_plan(error: Exception, cell: _Cell) -> str:
    """Return the error that a plan's record has; raise one that is not the plan's alone.

    Raises:
        Fraud: it is one of those that end a run.
        KvtailorError: it is of what all plans are compared with.
        Exception: it is one that nobody raised on purpose, and no method of the plan is of another package.
    """
    if isinstance(error, Fraud) and error.name not in checks.OF_ONE_PLAN:
        raise error
    if isinstance(error, NotANumber) and (cell.contestant.is_full or cell.contestant.is_own):
        raise _of_reference(error, cell.blank, cell.contestant.label) from error
    if is_out_of_memory(error):
        return out_of_memory(error)
    if isinstance(error, KvtailorError | ValueError):
        return str(error)
    methods = cell.blank.machine.get("methods")
    if not isinstance(methods, dict):
        raise error
    return _of_others_code(error, methods)


def _of_others_code(error: Exception, modules: Iterable[str]) -> str:
    """Return an error that a method of another package raised, and where in these modules it came from."""
    files = {getattr(sys.modules.get(module), "__file__", None) for module in modules}
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if frame.filename in files), frames[-1])
    return f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"


def _of_reference(error: NotANumber, blank: Record, label: str) -> KvtailorError:
    """Return the error that ends a task since there is nothing to compare with."""
    where = _where(blank.task, blank.text)
    return KvtailorError(f"NaN or infinity of {label}, with which every plan is compared, in {where}: {error}")


def _where(task: str, text: str | None) -> str:
    return task if text is None else f"{task} on {text}"


def _check_numbers(scored: Scored) -> None:
    """Check that all numbers of a plan are numbers, since no record can hold others.

    Raises:
        NotANumber: with the names of those that are not.
    """
    parts = (scored.metrics, scored.held, {"floor_seconds": scored.floor_seconds}, scored.values, scored.timings)
    odd = [name for part in parts for name, value in part.items() if not _is_finite(value)]
    if odd:
        raise NotANumber.of_results(dict.fromkeys(odd))


def _is_finite(value: object) -> bool:
    """Return whether no float within a value is NaN or infinite; of torch and numpy neither."""
    if hasattr(value, "tolist"):
        return _is_finite(value.tolist())
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _filled(task: Task, blank: Record, scored: Scored, wall: float) -> Record:
    if task.metrics is not None:
        names = [metric.name for metric in task.metrics]
        for name in scored.metrics:
            if name not in names and re.sub(r"_\d+$", "", name) not in names:
                raise KvtailorError(
                    f"the task {task.name!r} gives the metric {name!r}, which it does not declare"
                    f"{suggest(name, names)}: add it to `metrics` of {type(task).__name__}"
                )
    means = {metric.name: metric.mean_of for metric in task.metrics or () if metric.mean_of}
    without = [
        name
        for name, value in scored.metrics.items()
        if value is not None and means.get(name, "") not in {"", *scored.values}
    ]
    if without:
        raise KvtailorError(
            f"the task {task.name!r} gives {', '.join(without)} without the values that they are declared "
            f"to be the mean of ({', '.join(means[name] for name in without)}): add them to `Scored.values`"
        )
    return replace(
        blank,
        samples=scored.samples,
        tokens_scored=scored.tokens_scored,
        metrics=dict(scored.metrics),
        values={name: tuple(each) for name, each in scored.values.items()},
        timings=dict(scored.timings),
        floor_seconds=scored.floor_seconds,
        notes=(*blank.notes, *scored.notes),
        wall_seconds=wall,
        **scored.held,
    )
