"""The leaderboard of a suite: its page, and all of it as one table, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtailor.bench.report.page import (
    DASH,
    Block,
    Facts,
    Front,
    Page,
    Part,
    Plan,
    Point,
    Table,
    Text,
    Texts,
    colour,
    question,
    render,
)
from kvtailor.bench.report.suite.ranking import FEWER, LEADS, LEVEL, WORSE, Place, RankedColumn, RankedScore, Ranking
from kvtailor.bench.report.tables.grid import Cell, Grid, interval
from kvtailor.bench.schema import Record

__all__ = ["board_grid", "leaderboard_page"]

_SMALL_MODEL = 10**9
_WORDS = {LEADS: "leads", LEVEL: "level", WORSE: "worse", FEWER: "behind with fewer bytes"}
_NOTE = (
    "Each point is a plan: the share of the uncompressed bytes that it holds, and what it lost to 'full' there, with "
    "the 95 % interval. The line joins the front: no other plan has fewer bytes and loses less by its mean."
)
_LEADS = (
    "By its mean. Below the name: of the other plans of that budget, how many are level with it, and how many are "
    "worse."
)
_SIZE = "Of the whole cache, as long as it was here: such as 300KiB, 2GiB or 25%. Longer contexts take more."


def leaderboard_page(ranking: Ranking, line: str, records: Sequence[Record]) -> str:
    """Return the page as text.

    Args:
        ranking: from `rank`.
        line: which model, when, where and with what, from `provenance`.
        records: those that the plans were ranked by among them, for their bytes.
    """
    budgets = [each for each in ranking.board.budgets if ranking.at(each)]
    plans = _plans(ranking)
    asked = list(_questions(ranking, plans, {record.key: record for record in records}))
    parts = [
        *([Part("front", "Bytes against loss", [Front(note=_NOTE, size=_SIZE)])] if asked else []),
        Part("leaders", "Who leads", list(_leaders(ranking, budgets)), note=_LEADS),
        *(
            Part(f"at-{_slug(each)}", f"{_percent(each)} of the bytes", blocks=[_table(ranking, each)])
            for each in budgets
        ),
        Part("rest", "Plans", list(_rest(ranking))),
    ]
    title = f"{ranking.board.title}: {ranking.last.model}"
    return render(Page(title=title, about=line, rules=list(_rules(ranking)), parts=parts, plans=plans, questions=asked))


def board_grid(ranking: Ranking) -> Grid:
    """All plans at their budgets as one table, for CSV; `full` comes first."""
    heads = ("plan", "family", "named", "budget", "bytes, %", *(each.label for each in ranking.columns), *ranking.timed)
    rows, plans = [], []
    for place in (ranking.full, *ranking.places):
        budget = Cell() if place.budget is None else _number(100 * place.budget, 2)
        rows.append(
            (
                _text(place.plan),
                _text(place.family),
                _text(place.label),
                budget,
                _bytes(place),
                *(_score_cell(column, place) for column in ranking.columns),
                *(_time(place, label) for label in ranking.timed),
            )
        )
        plans.append(place.plan_hash)
    return Grid(name="leaderboard", title=ranking.board.title, heads=heads, rows=tuple(rows), plans=tuple(plans))


def _rules(ranking: Ranking) -> Iterator[str]:
    board = ranking.board
    yield (
        "A plan stands at the smallest budget that its measured bytes fit, at most "
        f"{100 * board.tolerance:g} % above it. Losses are paired with 'full' on the same samples; intervals "
        "are of 95 %. A dash is what was not measured."
    )
    yield (
        "In each column the plan that loses least by its mean leads its budget. Another one is worse where a paired "
        "test on the same samples shows that it loses more than the leader, at 5 % for all pairs of that budget and "
        "column together; it is level where the test does not, which is no proof that both are equal. A plan with 5 % "
        "fewer bytes than the leader, or less still, is not called worse: bytes that it does not use may be what it "
        "lacks."
    )
    if ranking.last.parameters and ranking.last.parameters < _SMALL_MODEL:
        yield (
            f"This model has {ranking.last.parameters / 1e6:.1f} million parameters. What holds here need not hold on "
            "a model of billions, and the other way round."
        )


def _plans(ranking: Ranking) -> dict[str, Plan]:
    """The plans in the order in which the budgets have them, 'full' first, and those that stand at none last."""
    placed = [place for budget in ranking.board.budgets for place in ranking.at(budget)]
    places = [ranking.full, *placed, *(place for place in ranking.places if place.budget is None)]
    order = {place.plan_hash: place for place in places}
    return {
        plan: Plan(
            number=str(number),
            label=place.label,
            plan=place.plan,
            kind="pf" if place is ranking.full else colour(number - 2),
            whole=place is ranking.full,
        )
        for number, (plan, place) in enumerate(order.items(), 1)
    }


def _questions(
    ranking: Ranking, plans: Mapping[str, Plan], records: Mapping[str, Record]
) -> Iterator[dict[str, object]]:
    """What each plan held and lost in each column that says something."""
    whole = plans[ranking.full.plan_hash].number
    for column in (each for each in ranking.columns if each.full is not None and each.silent is None):
        sign, scale = -1 if column.higher else 1, 100 if column.hits else 1
        points, full, tokens = [], 0, None
        for place in ranking.places:
            score = place.scores.get(column.label)
            held = [records[key] for key in score.keys if key in records] if score is not None else []
            heaviest = max(held, key=lambda record: record.bytes_full or 0, default=None)
            if score is None or heaviest is None or not heaviest.bytes_held or not heaviest.bytes_full:
                continue
            if heaviest.bytes_full > full:
                full, tokens = heaviest.bytes_full, heaviest.tokens_seen
            low, high = (None if e is None else sign * scale * e for e in (score.difference.low, score.difference.high))
            low, high = (high, low) if sign < 0 else (low, high)
            share = heaviest.bytes_held / heaviest.bytes_full
            loss = sign * scale * score.difference.value
            points.append(Point(plans[place.plan_hash].number, heaviest.bytes_held, share, loss, low, high))
        if points:
            unit = "points of right answers" if column.hits else "nats per token"
            axis = f"{unit} lost" if column.hits else f"{unit} over full"
            yield question(column.label, axis, unit, full, points, whole=whole, tokens=tokens)


def _leaders(ranking: Ranking, budgets: Sequence[float]) -> Iterator[Block]:
    """Who leads at each budget, and how many are level with it."""
    columns = [each for each in ranking.columns if each.full is not None]
    yield from (Text(lead=f"{each.label}.", text=each.silent) for each in ranking.columns if each.silent)
    rows = tuple(
        (_number(100 * budget, 1, f"{_percent(budget)}"), *(_leader(ranking, budget, column) for column in columns))
        for budget in budgets
    )
    heads = ("bytes", *(each.label for each in columns))
    grid = Grid(name="leaders", title="who leads", heads=heads, rows=rows, plans=tuple(map(_percent, budgets)))
    yield Table(grid=grid, numbered=False)


def _leader(ranking: Ranking, budget: float, column: RankedColumn) -> Cell:
    if column.silent is not None:
        return Cell(text=DASH, interval="says nothing here")
    found = [(place, place.scores[column.label]) for place in ranking.at(budget) if column.label in place.scores]
    best = next((place for place, score in found if score.standing == LEADS), None)
    if best is None:
        return Cell(text=DASH, interval="no plan is right at all" if found else "not measured")
    count = {name: sum(score.standing == name for _, score in found) for name in (LEVEL, WORSE, FEWER)}
    behind = f", {count[FEWER]} behind with fewer bytes" if count[FEWER] else ""
    words = f"of {len(found) - 1}, {count[LEVEL]} level, {count[WORSE]} worse{behind}"
    return Cell(text=best.label, interval=words)


def _table(ranking: Ranking, budget: float) -> Table:
    columns = [each for each in ranking.columns if each.full is not None]
    places = [ranking.full, *ranking.at(budget)]
    grid = Grid(
        name=f"leaderboard-{_slug(budget)}",
        title=f"plans at {_percent(budget)} of the bytes",
        heads=("plan", "family", "bytes, %", *(each.label for each in columns), *ranking.timed),
        rows=tuple(
            (
                _text(place.label),
                _text(place.family),
                _bytes(place),
                *(_score_cell(column, place) for column in columns),
                *(_time(place, label) for label in ranking.timed),
            )
            for place in places
        ),
        plans=tuple(place.plan_hash for place in places),
    )
    return Table(grid=grid, classes={ranking.full.plan_hash: "full"})


def _rest(ranking: Ranking) -> Iterator[Block]:
    """The plans as they are written, and those that stand at no budget, each with the reason."""
    written = [(place.label, place.plan) for place in ranking.places if place.budget]
    yield Facts(facts=written, summary="The plans as they are written", definitions=True)
    rest = [place for place in ranking.places if place.budget is None]
    if rest:
        yield Texts(heading="At no budget", texts=[f"{each.label}, {each.plan}: {_why(each)}" for each in rest])


def _why(place: Place) -> str:
    if place.share is not None:
        return f"it holds {100 * place.share:.1f} % of the bytes, more than any budget here"
    return place.missing or "it was not measured"


def _score_cell(column: RankedColumn, place: Place) -> Cell:
    score = place.scores.get(column.label)
    if score is None:
        return Cell()
    ends = (score.difference.low, score.difference.high)
    known = (ends[0], ends[1]) if ends[0] is not None and ends[1] is not None else None
    return Cell(
        text=_mean(column, score),
        value=score.difference.value,
        interval=_small(
            column, score, whole=place.budget is None and place.share is not None and place.label == "full"
        ),
        ends=known,
        keys=score.keys,
    )


def _mean(column: RankedColumn, score: RankedScore) -> str:
    return f"{100 * score.mean:.0f} %" if column.hits else f"{score.difference.value:+.3f}"


def _small(column: RankedColumn, score: RankedScore, *, whole: bool) -> str | None:
    if whole:
        ends = (None, None) if column.full is None else (column.full.low, column.full.high)
        shown = interval([None if e is None else 100 * e for e in ends], 0) if column.hits else f"{score.mean:.3f} nats"
        return shown if shown is None or not column.hits else f"{shown} %"
    ends = (score.difference.low, score.difference.high)
    if column.hits:
        between = interval([None if e is None else 100 * e for e in ends], 0, signed=True)
        between = f"{100 * score.difference.value:+.0f} ({between})"
    else:
        between = interval(ends, 3, signed=True) or "too few samples for an interval"
    return between if score.standing is None else f"{between}; {_WORDS[score.standing]}"


def _bytes(place: Place) -> Cell:
    return Cell() if place.share is None else _number(100 * place.share, 1)


def _time(place: Place, label: str) -> Cell:
    return _number(place.times[label], 2) if label in place.times else Cell()


def _number(value: float, digits: int, text: str = "") -> Cell:
    return Cell(text=text or f"{value:.{digits}f}", value=value)


def _text(text: str) -> Cell:
    return Cell(text=text, value=text)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _slug(budget: float) -> str:
    return f"{budget:g}".replace(".", "-")
