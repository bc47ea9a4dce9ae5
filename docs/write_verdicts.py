"""Writes the numbers into `docs/verdicts.md`, from the records of the suite `field` alone; the prose there is by hand.

    kvtailor bench --suite field --data DATA --out FOLDER
    python docs/write_verdicts.py FOLDER

What stands between `<!-- measured: PLAN -->` and `<!-- /measured -->` is made anew: PLAN is a row's name in the suite,
at all budgets that it was measured at, or `the run` for what was measured where. A plan without records says so.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kvtailor.bench.checks import check_records  # noqa: E402
from kvtailor.bench.report.suite.ranking import FEWER, LEADS, LEVEL, WORSE, Column, Place, Ranking, rank  # noqa: E402
from kvtailor.bench.report.suite.tables import provenance  # noqa: E402
from kvtailor.bench.report.tables.grid import interval  # noqa: E402
from kvtailor.bench.schema import latest, read_records  # noqa: E402
from kvtailor.bench.suite.suite import Suite, read_suite  # noqa: E402

__all__ = ["PAGE", "RUN", "names_in", "written"]

PAGE = ROOT / "docs" / "verdicts.md"
SUITE = "field"
RUN = "the run"
_BLOCK = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- /measured -->)", re.DOTALL)
_WIDTH = 118
_WORDS = {LEADS: "leads", LEVEL: "level", WORSE: "worse", FEWER: "behind with fewer bytes"}
_IN_THE_LEADERBOARD = ("needle, points", "multi-key, points", "variables, points")
_TOGETHER = "answers together, points"
"""Which sums up those columns."""


def names_in(page: str) -> list[str]:
    """The plans that a page has numbers of."""
    return [name for _, name, _ in _BLOCK.findall(page) if name != RUN]


def written(page: str, ranking: Ranking, line: str) -> str:
    """A page with all of its numbers made anew.

    Args:
        page: as it is.
        ranking: of the records.
        line: what was measured where, from `provenance`.

    Raises:
        ValueError: a block names a plan that the suite does not have.
    """
    known = {place.label for place in ranking.places} | {ranking.full.label}
    if unknown := [name for name in names_in(page) if name not in known]:
        raise ValueError(f"the page has numbers of {', '.join(unknown)}, which the suite does not have")

    def block(hit: re.Match[str]) -> str:
        lines = _run(ranking, line) if hit[2] == RUN else _plan(ranking, hit[2])
        return f"{hit[1]}{chr(10).join(lines)}\n{hit[3]}"

    return _BLOCK.sub(block, page)


def _run(ranking: Ranking, line: str) -> Iterator[str]:
    yield from textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False)
    for column in ranking.columns:
        if column.full is None:
            yield f"- {column.label}: not measured."
            continue
        has = f"{column.full.value:.3f} nats" if not column.hits else f"{_share(column.full.value)} right"
        ends = interval([None if e is None else 100 * e for e in (column.full.low, column.full.high)], 0)
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
        yield from _bullet(f"{100 * (place.share or 0):.1f} % of the bytes: {'; '.join(cells)}.")


def _cell(column: Column, place: Place) -> str | None:
    score = place.scores.get(column.label)
    summed_up = column.label in _IN_THE_LEADERBOARD and _TOGETHER in place.scores
    if score is None or column.silent is not None or summed_up:
        return None
    ends = (score.difference.low, score.difference.high)
    standing = f", {_WORDS[score.standing]}" if score.standing else ""
    label = re.sub(r", (points|ΔNLL)$", "", column.label)
    if column.hits:
        between = interval([None if e is None else 100 * e for e in ends], 0, signed=True)
        return f"{label} {_share(score.mean)} right ({100 * score.difference.value:+.0f}: {between}){standing}"
    return f"{label} {score.difference.value:+.3f} ({interval(ends, 3, signed=True)}){standing}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _read(folder: Path) -> tuple[Suite, Ranking, str]:
    """The suite as it was run, with its own budgets."""
    suite = read_suite(folder / "suites" / f"{SUITE}.toml")
    records = latest(read_records(folder))
    check_records(records)
    ranking = rank(suite, records)
    assert ranking is not None
    return suite, ranking, provenance(suite, records)


if __name__ == "__main__":
    _, _ranking, _line = _read(Path(sys.argv[1]))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), _ranking, _line), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
