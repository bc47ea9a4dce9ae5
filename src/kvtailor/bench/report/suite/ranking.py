"""Plans at equal bytes, from records alone: which budget each fits, what it lost, and who is shown to lose more.

A plan stands at the smallest budget that its measured bytes fit. In a column the plan that loses least by its mean
leads its budget. Another one is called worse only where a paired test of the same samples shows it, at 5 % over all
ordered pairs of that budget and column together (Bonferroni), since the samples chose the leader. One that holds
clearly fewer bytes than the leader is not called worse: bytes it does not use may be what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvtailor.bench.kinds import KINDS
from kvtailor.bench.measure.equivalence import ERROR, losses_of, outcome
from kvtailor.bench.measure.paired_hits import share, share_difference
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.report.suite.numbers import SHARES, documents_of, paired_samples, point_of
from kvtailor.bench.report.suite.records import SuiteRun, alike, by_task, whole
from kvtailor.bench.schema import Record
from kvtailor.bench.suite.cells import SuiteCell
from kvtailor.bench.suite.suite import Leaderboard, Suite
from kvtailor.errors import KvtailorError
from kvtailor.presets import FULL

__all__ = [
    "FEWER",
    "LEADS",
    "LEVEL",
    "WORSE",
    "Place",
    "RankedColumn",
    "RankedScore",
    "Ranking",
    "difference",
    "rank",
    "rank_each",
]

LEADS, LEVEL, WORSE, FEWER = "leads", "level", "worse", "fewer bytes"
_FEWER_BYTES = 0.95


@dataclass(frozen=True, kw_only=True)
class RankedColumn:
    """One thing that plans are ranked by.

    Attributes:
        label: as the suite heads it.
        name: of the values in records.
        hits: whether they are right answers, or parts of them, from 0 to 1.
        higher: whether more of it is better.
        full: what 'full' has: its mean, for answers with an interval; None where it was not measured.
        silent: why it says nothing of any plan, a sentence; None where it says something.
    """

    label: str
    name: str
    hits: bool
    higher: bool
    full: Estimate | None
    silent: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankedScore:
    """One plan in one column.

    Attributes:
        mean: of its samples.
        difference: to 'full', paired, with its 95 % interval.
        standing: among the plans of its budget; None where the column says nothing, or for 'full'.
        keys: of the records behind it.
    """

    mean: float
    difference: Estimate
    standing: str | None
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One plan.

    Attributes:
        family: the title of its table.
        label: its name there.
        plan: in one line.
        written: the same as the suite has it, see `SuiteCell.written`; of several rows that are one plan here, each.
        plan_hash: of its records.
        cells: of all tables that have the plan, by the label of their columns.
        share: the most of the uncompressed bytes that any of its records holds; None where none was measured.
        budget: the smallest that it fits; None for 'full', and where it fits none.
        scores: by the label of the column; what was not measured is not there.
        times: by the label of the column, the median over that of 'full' in the same run.
        missing: why it was not measured; None where it was, or where no record says why.
    """

    family: str
    label: str
    plan: str
    written: tuple[str, ...]
    plan_hash: str
    cells: Mapping[str, SuiteCell] = field(default_factory=dict, repr=False)
    share: float | None = None
    budget: float | None = None
    scores: Mapping[str, RankedScore] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All plans of a suite.

    Attributes:
        board: what the suite asks for.
        columns: those by which plans are ranked.
        timed: labels of the columns of times.
        full: the uncompressed cache.
        places: the plans, each once.
        last: the newest record, for what was measured where.
    """

    board: Leaderboard
    columns: tuple[RankedColumn, ...]
    timed: tuple[str, ...]
    full: Place
    places: tuple[Place, ...]
    last: Record

    def at(self, budget: float) -> list[Place]:
        """The plans that stand at a budget, from many bytes to few."""
        return sorted((each for each in self.places if each.budget == budget), key=lambda each: -(each.share or 0))


def rank(suite: Suite, records: Sequence[Record], *, model: str | None = None) -> Ranking | None:
    """The plans of a suite at equal bytes; None where it asks for no leaderboard, or has no column that ranks.

    Args:
        suite: from `read_suite`.
        records: of any runs.
        model: name in the records; None: that of the latest record.

    Raises:
        KvtailorError: no record is of this suite's tasks and this model.
    """
    if suite.leaderboard is None:
        return None
    found = alike(suite, records, model)
    of_task = by_task(found)
    # Times are compared with those of 'full' in the same run, so each run's may stand.
    timed = [r for r in found if r.error is None and r.timings]
    named = _named(suite, found[-1].model)
    full_hash = suite.contestant(FULL).hash
    every = {label: cell for place in named for label, cell in place.cells.items()}
    ranked = {label: cell for label, cell in every.items() if cell.measure.startswith("paired.")}
    if not ranked:
        return None
    columns = tuple(_column(suite.leaderboard, label, cell, of_task, full_hash) for label, cell in ranked.items())
    if not any(place.plan_hash == full_hash for place in named):
        named.append(Place(family="", label=FULL, plan=FULL, written=(FULL,), plan_hash=full_hash, cells=every))
    places = [_measured(suite.leaderboard, each, columns, of_task, timed, full_hash) for each in named]
    others = [each for each in places if each.plan_hash != full_hash]
    return Ranking(
        board=suite.leaderboard,
        columns=columns,
        timed=tuple(label for label, cell in every.items() if cell.measure.startswith("timings.")),
        full=next(each for each in places if each.plan_hash == full_hash),
        places=tuple(_standing(suite.leaderboard, others, columns, of_task)),
        last=found[-1],
    )


def rank_each(runs: Mapping[str, SuiteRun]) -> list[Ranking]:
    """The plans of a suite on each model, each ranked by itself; empty where the suite asks for no leaderboard.

    Args:
        runs: from `by_model`.

    Raises:
        KvtailorError: models are ranked by other budgets or rules, or a column is of other values on them, so that
            they cannot stand beside each other.
    """
    found = [each for model, run in runs.items() if (each := rank(run.suite, run.records, model=model)) is not None]
    for other in found[1:]:
        if differing := _other_rules(found[0], other):
            raise KvtailorError(
                f"asked for one leaderboard of {found[0].last.model} and {other.last.model}, whose suites differ "
                f"({differing}): report each folder by itself"
            )
    return found


def _other_rules(one: Ranking, other: Ranking) -> str:
    """What forbids that two rankings stand beside each other; empty where nothing does."""
    if one.board.rules != other.board.rules:
        return f"{one.board.rules}; {other.board.rules}"
    names = {column.label: column.name for column in one.columns}
    return "; ".join(
        f"{column.label} is {names[column.label]} and {column.name}"
        for column in other.columns
        if names.get(column.label, column.name) != column.name
    )


def _named(suite: Suite, model: str) -> list[Place]:
    """The plans of all tables, each once, as it is named first and with the cells of all of its rows."""
    found: dict[str, Place] = {}
    for table in suite.tables_for(model):
        for row in table.rows:
            cells = dict(zip(table.columns, row.cells, strict=True))
            plan, written = row.cells[0].plan, row.cells[0].written
            contestant = suite.contestant(plan)
            missing = f"this kvtailor does not have {', '.join(contestant.missing)}" if contestant.missing else None
            made = Place(
                family=table.title,
                label=row.labels[0],
                plan=plan,
                written=(written,),
                plan_hash=contestant.hash,
                missing=missing,
            )
            first = found.get(contestant.hash, made)
            every = tuple(dict.fromkeys((*first.written, written)))
            found[contestant.hash] = replace(first, written=every, cells={**cells, **first.cells})
    return list(found.values())


def _good(cell: SuiteCell, plan_hash: str, of_task: Mapping[str, list[Record]]) -> list[list[Record]] | None:
    """The records of a plan for each task of a column; None where a task has none."""
    found = [whole(of_task.get(str(asked), ()), plan_hash) for asked in cell.tasks]
    return found if all(found) else None


def _column(
    board: Leaderboard, label: str, cell: SuiteCell, of_task: Mapping[str, list[Record]], full_hash: str
) -> RankedColumn:
    name = cell.measure.removeprefix("paired.")
    records = _good(cell, full_hash, of_task)
    values = [value for each in records or [] for record in each for value in record.values.get(name, ())]
    told = (KINDS[cell.tasks[0].kind].metrics or ()) if cell.tasks[0].kind in KINDS else ()
    higher = any(metric.mean_of == name and metric.higher_is_better for metric in told)
    hits = name in SHARES and all(0 <= value <= 1 for value in values)
    shown = RankedColumn(label=label, name=name, hits=hits, higher=higher, full=None)
    if not values:
        return replace(shown, silent="'full' was not measured in it.")
    if not hits:
        return replace(shown, full=Estimate(fmean(values), None, None, len(values)))
    right, silent = share(values), None
    if right.value < board.least_right:
        assert right.low is not None and right.high is not None
        silent = (
            f"It says nothing here: 'full' itself is right in {100 * right.value:.0f} % of {right.count} "
            f"({100 * right.low:.0f} to {100 * right.high:.0f}), and {100 * board.least_right:.0f} % are asked for."
        )
    return replace(shown, full=right, silent=silent)


def _measured(
    board: Leaderboard,
    place: Place,
    columns: Sequence[RankedColumn],
    of_task: Mapping[str, list[Record]],
    timed: Sequence[Record],
    full_hash: str,
) -> Place:
    scores, shares = {}, []
    for column in columns:
        if column.label not in place.cells:
            continue
        ours, theirs = (_good(place.cells[column.label], each, of_task) for each in (place.plan_hash, full_hash))
        for record in (record for each in ours or [] for record in each):
            if record.bytes_held and record.bytes_full:
                shares.append(record.bytes_held / record.bytes_full)
        score = _score(column, ours, theirs)
        if score is not None:
            scores[column.label] = score
    most = max(shares, default=None)
    errors = (r.error for each in of_task.values() for r in each if r.plan_hash == place.plan_hash and r.error)
    return replace(
        place,
        share=most,
        budget=None if most is None or place.plan_hash == full_hash else board.budget_of(most),
        scores=scores,
        times=_times(place, timed, full_hash),
        missing=place.missing or next(errors, None),
    )


def _score(
    column: RankedColumn, ours: list[list[Record]] | None, theirs: list[list[Record]] | None
) -> RankedScore | None:
    """None where it was not measured on all that 'full' was measured on."""
    if ours is None or theirs is None or _points(ours) != _points(theirs):
        return None
    samples = paired_samples(column.name, ours, theirs)
    if samples is None:
        return None
    keys = tuple(record.key for each in ours for record in each)
    found = _difference(column, samples, ours)
    return RankedScore(mean=fmean(samples[0]), difference=found, standing=None, keys=keys)


def difference(
    column: RankedColumn, ours: RankedScore, theirs: RankedScore, records: Mapping[str, Record]
) -> Estimate | None:
    """The first plan less the second on the same samples, with its 95 % interval; None where these are not the same.

    Args:
        column: of both scores.
        ours, theirs: of the two plans.
        records: by key, those behind the scores among them.
    """
    mine, other = ([[records[key] for key in score.keys]] for score in (ours, theirs))
    samples = paired_samples(column.name, mine, other)
    return None if samples is None else _difference(column, samples, mine)


def _difference(
    column: RankedColumn, samples: tuple[list[float], list[float]], ours: Sequence[Sequence[Record]]
) -> Estimate:
    return share_difference(*samples) if column.hits else mean_difference(*samples, documents=documents_of(ours))


def _points(tasks: Sequence[Sequence[Record]]) -> list[set[tuple[str | None, str]]]:
    return [{(record.text_hash, point_of(record)) for record in records} for records in tasks]


def _times(place: Place, timed: Sequence[Record], full_hash: str) -> dict[str, float]:
    """Ratios to 'full', of the latest run that timed both."""
    found: dict[str, float] = {}
    for label, cell in place.cells.items():
        name = cell.measure.removeprefix("timings.")
        if name == cell.measure:
            continue
        asked = {str(each) for each in cell.tasks}
        for record in (r for r in timed if r.plan_hash == place.plan_hash and str(r.asked) in asked):
            other = next(
                (
                    r
                    for r in timed
                    if r.plan_hash == full_hash
                    and r.run == record.run
                    and r.asked == record.asked
                    and point_of(r) == point_of(record)
                ),
                None,
            )
            ours, theirs = (
                None if each is None else each.timings.get(name, {}).get("median") for each in (record, other)
            )
            if ours and theirs:
                found[label] = ours / theirs
    return found


def _standing(
    board: Leaderboard, places: Sequence[Place], columns: Sequence[RankedColumn], of_task: Mapping[str, list[Record]]
) -> list[Place]:
    """The places with the standing of each score."""
    found = {place.plan_hash: place for place in places}
    for budget in board.budgets:
        for column in (column for column in columns if column.silent is None):
            here = [each for each in places if each.budget == budget and column.label in each.scores]
            sign = -1 if column.higher else 1
            leader = min(here, key=lambda each: (sign * each.scores[column.label].mean, each.share or 0), default=None)
            if leader is None or (column.hits and not leader.scores[column.label].mean):
                # No plan is right at all, so none leads.
                continue
            error = ERROR / max(1, len(here) * (len(here) - 1))
            for each in here:
                standing = LEADS if each is leader else _against(column, each, leader, of_task, error)
                known = found[each.plan_hash]
                scores = {**known.scores, column.label: replace(known.scores[column.label], standing=standing)}
                found[each.plan_hash] = replace(known, scores=scores)
    return list(found.values())


def _against(
    column: RankedColumn, place: Place, leader: Place, of_task: Mapping[str, list[Record]], error: float
) -> str:
    ours, theirs = (_good(each.cells[column.label], each.plan_hash, of_task) or [] for each in (place, leader))
    samples = paired_samples(column.name, ours, theirs)
    if samples is None:
        return LEVEL
    losses = losses_of(
        *samples,
        lower_is_better=not column.higher,
        documents=documents_of(ours),
        top=1.0 if column.hits else None,
    )
    if not outcome(losses, 0.0, error).above:
        return LEVEL
    return FEWER if (place.share or 0) < _FEWER_BYTES * (leader.share or 0) else WORSE
