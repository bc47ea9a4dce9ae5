"""Writes the numbers into `docs/verdicts.md`, from the records of the suite `field` alone; the prose there is by hand.

    kvtailor bench --suite field --data DATA --out FOLDER
    python docs/write_verdicts.py FOLDER

What stands between `<!-- measured: PLAN -->` and `<!-- /measured -->` is made anew: PLAN is a row's name in the suite,
at all budgets that it was measured at, `the run` for what was measured where, or `ONE / OTHER` for the differences of
two plans on the same samples, at each budget at which both stand. A plan without records says so.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kvtailor.bench.checks import check_records  # noqa: E402
from kvtailor.bench.measure.statistics import Estimate  # noqa: E402
from kvtailor.bench.report.suite.ranking import (  # noqa: E402
    FEWER,
    LEADS,
    LEVEL,
    WORSE,
    Place,
    RankedColumn,
    Ranking,
    difference,
    rank,
)
from kvtailor.bench.report.suite.tables import provenance  # noqa: E402
from kvtailor.bench.schema import Record, latest, read_records  # noqa: E402
from kvtailor.bench.suite.suite import read_suite  # noqa: E402

__all__ = ["PAGE", "RUN", "names_in", "written"]

PAGE = ROOT / "docs" / "verdicts.md"
SUITE = "field"
RUN = "the run"
AND = " / "
_BLOCK = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- /measured -->)", re.DOTALL)
_WIDTH = 118
_WORDS = {LEADS: "leads", LEVEL: "level", WORSE: "worse", FEWER: "behind with fewer bytes"}
_IN_THE_LEADERBOARD = ("needle, points", "multi-key, points", "variables, points")
_TOGETHER = "answers together, points"
"""Which sums up those columns."""


def names_in(page: str) -> list[str]:
    """The plans that a page has numbers of, each by itself."""
    return [name for _, name, _ in _BLOCK.findall(page) if name != RUN and AND not in name]


def written(page: str, ranking: Ranking, line: str, records: Sequence[Record]) -> str:
    """A page with all of its numbers made anew.

    Args:
        page: as it is.
        ranking: of the records.
        line: what was measured where, from `provenance`.
        records: those that are ranked, and maybe others.

    Raises:
        ValueError: a block names a plan that the suite does not have.
    """
    known = {place.label for place in ranking.places} | {ranking.full.label, RUN}
    every = [name for _, names, _ in _BLOCK.findall(page) for name in names.split(AND)]
    if unknown := [name for name in every if name not in known]:
        raise ValueError(f"the page has numbers of {', '.join(unknown)}, which the suite does not have")

    def block(hit: re.Match[str]) -> str:
        one, _, other = hit[2].partition(AND)
        lines = _run(ranking, line) if one == RUN else _plan(ranking, one)
        lines = _pair(ranking, records, one, other) if other else lines
        return f"{hit[1]}{chr(10).join(lines)}\n{hit[3]}"

    return _BLOCK.sub(block, page)


def _run(ranking: Ranking, line: str) -> Iterator[str]:
    yield from textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
    for column in ranking.columns:
        if column.full is None:
            yield f"- {column.label}: not measured."
            continue
        has = f"{column.full.value:.3f} nats" if not column.hits else f"{_share(column.full.value)} right"
        ends = column.full.interval(0, scale=100)
        told = f" ({ends})" if column.hits and ends else ""
        silent = f" {column.silent}" if column.silent else ""
        yield from _bullet(f"{column.label}: `full` has {has}{told}, {column.full.count} samples.{silent}")


def _plan(ranking: Ranking, name: str) -> Iterator[str]:
    places = [each for each in (*ranking.places, ranking.full) if each.label == name]
    there = sorted((each for each in places if each.share is not None), key=lambda each: -(each.share or 0))
    if not there:
        why = next((each.missing for each in places if each.missing), None)
        yield f"Not measured{f': {why}' if why else '.'}"
        return
    for place in there:
        cells = [text for column in ranking.columns if (text := _cell(column, place)) is not None]
        times = [f"{label.removesuffix(' over full')} {time:.2f}" for label, time in place.times.items()]
        cells += [f"{' and '.join(times)} of full's"] if times else []
        yield from _bullet(f"{100 * (place.share or 0):.1f} % of the bytes: {'; '.join(cells)}.")


def _pair(ranking: Ranking, records: Sequence[Record], one: str, other: str) -> Iterator[str]:
    by_key, found = {record.key: record for record in records}, False
    for budget in ranking.board.budgets:
        # Of several plans of one name at a budget the one with most bytes.
        mine, theirs = (
            next((p for p in ranking.at(budget) if p.label == name and p.scores), None) for name in (one, other)
        )
        if mine is None or theirs is None:
            continue
        cells = [text for column in ranking.columns if (text := _difference(column, mine, theirs, by_key)) is not None]
        if cells:
            found = True
            bytes_ = f"{100 * (mine.share or 0):.1f} and {100 * (theirs.share or 0):.1f} % of the bytes"
            yield from _bullet(f"Over {other} at {bytes_}: {'; '.join(cells)}.")
    if not found:
        yield f"Not measured beside {other}."


def _difference(column: RankedColumn, mine: Place, theirs: Place, by_key: dict[str, Record]) -> str | None:
    ours, other = (place.scores.get(column.label) for place in (mine, theirs))
    if column.silent is not None or column.label in _IN_THE_LEADERBOARD or ours is None or other is None:
        return None
    found = difference(column, ours, other, by_key)
    if found is None:
        return None
    value, between = _in_units(column, found)
    return f"{_named(column)} {value}{' points' if column.hits else ''} ({between})"


def _cell(column: RankedColumn, place: Place) -> str | None:
    score = place.scores.get(column.label)
    summed_up = column.label in _IN_THE_LEADERBOARD and _TOGETHER in place.scores
    if score is None or column.silent is not None or summed_up:
        return None
    standing = f", {_WORDS[score.standing]}" if score.standing else ""
    value, between = _in_units(column, score.difference)
    found = f"{_share(score.mean)} right ({value}: {between})" if column.hits else f"{value} ({between})"
    return f"{_named(column)} {found}{standing}"


def _named(column: RankedColumn) -> str:
    return re.sub(r", (points|ΔNLL)$", "", column.label)


def _in_units(column: RankedColumn, found: Estimate) -> tuple[str, str | None]:
    """A difference and its interval: in whole points of right answers, else in thousandths of a nat."""
    scale, digits = (100, 0) if column.hits else (1, 3)
    return f"{scale * found.value:+.{digits}f}", found.interval(digits, scale=scale, signed=True)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _read(folder: Path) -> tuple[list[Record], Ranking, str]:
    """Of the suite as it was run, with its own budgets."""
    suite = read_suite(folder / "suites" / f"{SUITE}.toml")
    records = latest(read_records(folder))
    check_records(records)
    ranking = rank(suite, records)
    assert ranking is not None
    return records, ranking, provenance(suite, records)


if __name__ == "__main__":
    _records, _ranking, _line = _read(Path(sys.argv[1]))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), _ranking, _line, _records), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
