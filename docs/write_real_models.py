"""Writes what plans lose on real models into README.md and docs/measured.md, from the records in docs/records alone.

    python docs/write_real_models.py

What stands between `<!-- real models: NAME -->` and `<!-- /real models -->` is made anew: NAME is `start` for the plans
of README, `all` for every plan that was measured under its own name, `field` for those of the suite `field`, which cuts
each plan to the same bytes. A plan that a model has no records of is a dash there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report import summarise
from kvtailor.bench.report.rows import Row
from kvtailor.bench.report.suite.ranking import Ranking, Score, rank
from kvtailor.bench.report.tables.grid import interval
from kvtailor.bench.schema import latest, read_records
from kvtailor.bench.suite.suite import read_suite

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
MODELS = {"SmolLM2-135M": "smollm2-135m", "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b"}
"""The folder of records in docs/records of each model."""
START = {
    "half, nothing to notice": "kivi(key_bits=8, value_bits=4, recent=32)",
    "a third, slower tokens": "kvquant4",
    "a quarter, slower tokens": "kvquant3",
    "a quarter, fast": "turboquant4",
    "a fifth": "turboquant3",
    "fewer tokens, so faster new ones": "snapkv(kernel=21) + adakv @ keep=0.25",
}
"""What README recommends, by what a reader wants."""
ALSO = (
    "| an eighth | `fit`, above | 12.5 % | no plan that was measured is safe on either;"
    " `fit` was not tried on them | |",
    "| questions that come later | codes, or `kvtailor.read(model, tokenizer, text, plan=plan)` | |"
    " not measured on them: [which plans](docs/how-to/ask-later.md) | |",
    "| endless decoding | `streamingllm @ tokens=1024` | fixed | forgets the middle;"
    " [beyond memory](docs/how-to/beyond-memory.md) | |",
)
"""What README says below them."""
_BLOCK = re.compile(r"(<!-- real models: (start|all|field) -->\n).*?(<!-- /real models -->)", re.DOTALL)


def written(page: str, models: Mapping[str, Mapping[str, Row]], rankings: Mapping[str, Ranking]) -> str:
    """Return a page with all of its tables made anew.

    Args:
        page: as it is.
        models: the rows of each model, by the plan as it was asked for.
        rankings: of the suite `field` of each model.
    """

    def block(hit: re.Match[str]) -> str:
        lines = _field(rankings) if hit[2] == "field" else _start(models) if hit[2] == "start" else _all(models)
        return f"{hit[1]}{chr(10).join(lines)}\n{hit[3]}"

    return _BLOCK.sub(block, page)


def read(records: Path = ROOT / "docs" / "records") -> dict[str, dict[str, Row]]:
    """Return the rows of each model whose records are there, by plan."""
    return {
        name: {row.label: row for row in summarise(read_records(records / folder)).rows}
        for name, folder in MODELS.items()
        if (records / folder).is_dir()
    }


def read_rankings(records: Path = ROOT / "docs" / "records") -> dict[str, Ranking]:
    """Return the ranking of each model whose records of the suite `field` are there."""
    found = {}
    for name, folder in MODELS.items():
        where = records / f"{folder}-field"
        if where.is_dir():
            ranking = rank(read_suite(where / "suites" / "field.toml"), latest(read_records(where)))
            assert ranking is not None
            found[name] = ranking
    return found


def _start(models: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    yield f"| you want | start from | bytes | {' | '.join(f'lost on {name}' for name in models)} |"
    yield "|---|---|---|" + "---|" * len(models)
    for want, plan in START.items():
        rows = [rows.get(plan) for rows in models.values()]
        cells = [_lost(row, ends=False) for row in rows]
        yield f"| {want} | `{plan}` | {_bytes(rows)} | {' | '.join(cells)} |"
    yield from ALSO


def _all(models: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    yield f"| plan | bytes | {' | '.join(models)} |"
    yield "|---|---|" + "---|" * len(models)
    plans = dict.fromkeys(plan for rows in models.values() for plan, row in rows.items() if not row.is_full)
    least = {plan: min(r.ratio or 9 for rows in models.values() if (r := rows.get(plan))) for plan in plans}
    for plan in sorted(plans, key=lambda plan: -least[plan]):
        rows = [rows.get(plan) for rows in models.values()]
        yield f"| `{plan}` | {_bytes(rows)} | {' | '.join(_lost(row, ends=True) for row in rows)} |"


def _field(rankings: Mapping[str, Ranking]) -> Iterator[str]:
    budgets = (0.25, 0.125)
    heads = [f"{name}, {100 * budget:g} %" for name in rankings for budget in budgets]
    yield f"| plan | {' | '.join(heads)} |"
    yield "|---|" + "---|" * len(heads)
    scores: dict[tuple[str, float, str], Mapping[str, Score]] = {}
    for name, ranking in rankings.items():
        for budget in budgets:
            for place in ranking.at(budget):
                # Of several plans of one name at a budget the first, which has most bytes.
                scores.setdefault((name, budget, place.label), place.scores)
    for label in dict.fromkeys(label for _, _, label in scores):
        cells = [_score(scores.get((name, budget, label))) for name in rankings for budget in budgets]
        yield f"| {label} | {' | '.join(cells)} |"


def _score(scores: Mapping[str, Score] | None) -> str:
    """Nats a token of novels over 'full' with their interval, and the share of needles that were found."""
    if not scores or (loss := scores.get("novels, ΔNLL")) is None:
        return "-"
    told = _told(loss.difference)
    hits = scores.get("needle, points")
    return f"{told}; {100 * hits.mean:.0f} %" if hits else told


def _told(loss: Estimate) -> str:
    ends = interval((loss.low, loss.high), 3, signed=True)
    return f"{loss.value:+.3f}" + (f" ({ends})" if ends else "")


def _bytes(rows: list[Row | None]) -> str:
    shares = sorted({round(100 * row.ratio) for row in rows if row and row.ratio is not None})
    return f"{' to '.join(map(str, (shares[0], shares[-1])[: len(set(shares))]))} %" if shares else "-"


def _lost(row: Row | None, *, ends: bool) -> str:
    """Nats a token over 'full' with the upper end or both, and the answers that were right."""
    if row is None or row.loss is None:
        return "-"
    told, high = _told(row.loss), row.loss.high
    if not ends:
        told = f"{row.loss.value:+.3f}" + ("" if high is None else f", at most {high:.3f}")
    return f"{told}; {row.hits} of {row.answers}" if row.answers else told


if __name__ == "__main__":
    _models, _rankings = read(), read_rankings()
    for _page in PAGES:
        _page.write_text(written(_page.read_text(encoding="utf-8"), _models, _rankings), encoding="utf-8")
        print(_page.relative_to(ROOT))
