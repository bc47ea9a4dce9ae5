"""The leaderboard of a suite: one self-contained HTML page and a table as CSV, from records alone.

Without scripts every table is there, one for each budget; with them a reader chooses a budget, a task and words, and a
click on a head sorts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kvtailor.bench.report.pages.html import quoted, table
from kvtailor.bench.report.pages.style import browser_text, style
from kvtailor.bench.report.suite.ranking import FEWER, LEADS, LEVEL, WORSE, Column, Place, Ranking, Score
from kvtailor.bench.report.tables.grid import Cell, Grid, interval

__all__ = ["board_grid", "leaderboard_page"]

_SMALL_MODEL = 10**9
_WORDS = {LEADS: "leads", LEVEL: "level", WORSE: "worse", FEWER: "behind with fewer bytes"}


def leaderboard_page(ranking: Ranking, line: str) -> str:
    """The page as text.

    Args:
        ranking: from `rank`.
        line: which model, when, where and with what, from `provenance`.
    """
    title = f"{ranking.board.title}: {ranking.last.model}"
    budgets = [each for each in ranking.board.budgets if ranking.at(each)]
    parts = "".join(
        f'<section data-budget="{budget:g}" id="at-{_slug(budget)}"><h2>{_percent(budget)} of the bytes</h2>'
        f"{_table(ranking, budget)}</section>"
        for budget in budgets
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style('leaderboard.css')}</style></head>\n<body><main><header><h1>{escape(title)}</h1>"
        f'<p class="dim">{escape(line)}</p>{"".join(f"<p>{escape(each)}</p>" for each in _rules(ranking))}</header>'
        f"{_fields(ranking, budgets)}{_leaders(ranking, budgets)}{parts}{_rest(ranking)}</main>"
        f"<script>{browser_text('sorting.js')}{browser_text('leaderboard.js')}</script></body></html>\n"
    )


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


def _fields(ranking: Ranking, budgets: Sequence[float]) -> str:
    """What a reader chooses; it is shown where scripts run."""
    shares = "".join(f'<option value="{each:g}">{_percent(each)} of the bytes</option>' for each in budgets)
    tasks = "".join(
        f'<option value="{number}">{escape(each.label)}</option>'
        for number, each in enumerate(ranking.columns)
        if each.full is not None
    )
    return (
        '<form class="tools" id="tools"><label>Budget <select id="budget"><option value="">all</option>'
        f'{shares}</select></label><label>Task <select id="task"><option value="">all</option>{tasks}</select></label>'
        '<label>Words <input id="words" type="search" placeholder="such as: snapkv"></label>'
        '<span id="left" class="dim" aria-live="polite"></span></form>'
    )


def _leaders(ranking: Ranking, budgets: Sequence[float]) -> str:
    """Who leads at each budget, and how many are level with it."""
    columns = [each for each in ranking.columns if each.full is not None]
    lines = []
    for budget in budgets:
        cells = "".join(f"<td>{_leader(ranking, budget, column)}</td>" for column in columns)
        lines.append(f'<tr data-budget="{budget:g}"><th scope="row">{_percent(budget)}</th>{cells}</tr>')
    heads = "".join(
        f'<th scope="col" data-task="{ranking.columns.index(each)}">{escape(each.label)}</th>' for each in columns
    )
    silent = "".join(
        f"<p><strong>{escape(each.label)}.</strong> {escape(each.silent)}</p>"
        for each in ranking.columns
        if each.silent
    )
    box = '<div class="wide" tabindex="0" role="region" aria-label="who leads"><table class="leaders">'
    return (
        '<section id="leaders"><h2>Who leads</h2><p class="dim">By its mean. Below the name: of the other plans of '
        "that budget, how many are level with it, and how many are worse.</p>"
        f'{silent}{box}<thead><tr><th scope="col">bytes</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _leader(ranking: Ranking, budget: float, column: Column) -> str:
    if column.silent is not None:
        return "–<small>says nothing here</small>"
    found = [(place, place.scores[column.label]) for place in ranking.at(budget) if column.label in place.scores]
    best = next((place for place, score in found if score.standing == LEADS), None)
    if best is None:
        return "–<small>no plan is right at all</small>" if found else "–<small>not measured</small>"
    count = {name: sum(score.standing == name for _, score in found) for name in (LEVEL, WORSE, FEWER)}
    behind = f", {count[FEWER]} behind with fewer bytes" if count[FEWER] else ""
    return f"{escape(best.label)}<small>of {len(found) - 1}, {count[LEVEL]} level, {count[WORSE]} worse{behind}</small>"


def _table(ranking: Ranking, budget: float) -> str:
    columns = [each for each in ranking.columns if each.full is not None]
    heads = ("plan", "family", "bytes, %", *(each.label for each in columns), *ranking.timed)
    places = [ranking.full, *ranking.at(budget)]
    rows = tuple(
        (
            Cell(text=place.label, value=place.label),
            _text(place.family),
            _bytes(place),
            *(_score_cell(column, place) for column in columns),
            *(_time(place, label) for label in ranking.timed),
        )
        for place in places
    )
    grid = Grid(
        name=f"leaderboard-{_slug(budget)}",
        title=f"plans at {_percent(budget)} of the bytes",
        heads=heads,
        rows=rows,
        plans=tuple(place.plan_hash for place in places),
    )
    return table(grid, {}, {}, {}, classes={ranking.full.plan_hash: "full"})


def _rest(ranking: Ranking) -> str:
    """Plans that stand at no budget, each with the reason."""
    lines = []
    for place in (each for each in ranking.places if each.budget is None):
        if place.share is not None:
            why = f"it holds {100 * place.share:.1f} % of the bytes, more than any budget here"
        else:
            why = place.missing or "it was not measured"
        lines.append(f"<li>{escape(place.label)} <code>{escape(place.plan)}</code>: {escape(why)}</li>")
    words = "".join(
        f"<li>{escape(place.label)}: <code>{escape(place.plan)}</code></li>" for place in ranking.places if place.budget
    )
    shown = f"<details><summary>The plans as they are written</summary><ul>{words}</ul></details>"
    if not lines:
        return f'<section id="rest"><h2>Plans</h2>{shown}</section>'
    return (
        f'<section id="rest"><h2>Plans</h2>{shown}<h3>At no budget</h3><ul class="rest">{"".join(lines)}</ul></section>'
    )


def _score_cell(column: Column, place: Place) -> Cell:
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


def _mean(column: Column, score: Score) -> str:
    return f"{100 * score.mean:.0f} %" if column.hits else f"{score.difference.value:+.3f}"


def _small(column: Column, score: Score, *, whole: bool) -> str | None:
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


def _number(value: float, digits: int) -> Cell:
    return Cell(text=f"{value:.{digits}f}", value=value)


def _text(text: str) -> Cell:
    return Cell(text=text, value=text)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _slug(budget: float) -> str:
    return quoted(f"{budget:g}".replace(".", "-"))
