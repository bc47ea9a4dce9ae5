"""Writes the simulations into `docs/bench.md`: how often intervals of hits cover, and how often a headline errs.

    python docs/write_coverage.py

Nothing in them is measured on a model: losses are drawn whose mean is known, and what the report would say of them is
held against that. Some ten minutes of one core.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kvtailor.bench.measure.equivalence import Losses, Margins, losses_of  # noqa: E402
from kvtailor.bench.measure.paired_hits import hit_difference  # noqa: E402
from kvtailor.bench.report.table import (  # noqa: E402
    PLAN,
    Number,
    Row,  # noqa: E402
)
from kvtailor.bench.report.tables.quality import NATS, Measure, Score  # noqa: E402
from kvtailor.bench.report.verdict.verdict import headline, judge  # noqa: E402

__all__ = ["DRAWS", "coverage", "errors", "names_a_plan", "recommended", "section", "written"]

PAGE = ROOT / "docs" / "bench.md"
BEGIN, END = "<!-- simulations: made by docs/write_coverage.py -->", "<!-- /simulations -->"
MARGIN = Margins().nats
Draw = Callable[[random.Random, float, int], tuple[list[float], list[float]]]


def _independent(draw: Callable[[random.Random, float], float]) -> Draw:
    return lambda chance, mean, count: ([draw(chance, mean) for _ in range(count)], [])


def _lognormal(sigma: float) -> Draw:
    return _independent(lambda chance, mean: mean * math.exp(chance.gauss(0, sigma) - sigma * sigma / 2))


def _rare(often: float) -> Draw:
    return _independent(lambda chance, mean: chance.gauss(0, 0.001) + (chance.random() < often) * mean / often)


def _books(chance: random.Random, mean: float, count: int) -> tuple[list[float], list[float]]:
    """Ten books; half of the variance is that of the book."""
    books = [chance.gauss(0, 0.03) for _ in range(10)]
    index = [i * 10 // count for i in range(count)]
    return [mean + books[i] + chance.gauss(0, 0.03) for i in index], [float(i) for i in index]


DRAWS: Mapping[str, Draw] = {
    "normal, as wide as the loss": _independent(lambda chance, mean: chance.gauss(mean, mean)),
    "normal, five times as wide": _independent(lambda chance, mean: chance.gauss(mean, 5 * mean)),
    "exponential": _independent(lambda chance, mean: chance.expovariate(1 / mean)),
    "gamma of shape 0.3": _independent(lambda chance, mean: chance.gammavariate(0.3, mean / 0.3)),
    "lognormal, sigma 1.5": _lognormal(1.5),
    "all of it on one window in five": _rare(0.2),
    "all of it on one window in ten": _rare(0.1),
    "windows of ten books": _books,
}
"""Distributions of a window's loss, by name: (state, mean, count) -> losses, and which document each is from."""


def recommended(losses: Mapping[str, Losses], size: Callable[[int], float] = lambda index: 0.2) -> str:
    """The headline over plans with these losses on one text.

    Args:
        losses: by plan.
        size: the share of the bytes of plan i.
    """
    shares = {"full": 1.0} | {name: size(i) for i, name in enumerate(losses)}
    rows = [_row(name, share) for name, share in shares.items()]
    zero = next(iter(losses.values()))
    every = {"full": Losses(count=zero.count, mean=0.0, deviation=0.0, freedom=zero.count - 1), **losses}
    scores = {name: Score(value=1.0, losses=each, samples=each.count, keys=()) for name, each in every.items()}
    measure = Measure(
        name="text",
        task="perplexity",
        unit="perplexity",
        difference_unit=NATS,
        lower_is_better=True,
        is_base=True,
        scores=scores,
    )
    return headline(judge(rows, [measure]))


def _row(name: str, share: float) -> Row:
    """The row of a plan that holds this share of the bytes."""
    number = Number(
        plan=name, model="", text=None, task="cache", point="{}", metric="ratio", unit="share", value=share, over=PLAN
    )
    return Row(label=name, plan=name, plan_hash=name, numbers={number.name: number})


def names_a_plan(said: str) -> bool:
    """Whether a headline names a plan as one that loses less than the margin."""
    return not said.startswith(("No verdict", "No plan is recommended", "Every plan"))


def errors(draw: Draw, *, mean: float, windows: int, plans: int, runs: int, state: int) -> float:
    """Share of runs whose headline names one of several plans that all lose `mean` in truth."""
    chance, named = random.Random(state), 0
    for _ in range(runs):
        found = {}
        for index in range(plans):
            ours, documents = draw(chance, mean, windows)
            found[f"plan {index}"] = losses_of(ours, [0.0] * windows, lower_is_better=True, documents=documents)
        named += names_a_plan(recommended(found))
    return named / runs


def coverage(count: int, loss: float, gained: float, *, runs: int, state: int) -> float:
    """Share of intervals of hits that cover a true loss.

    Args:
        count: pairs.
        loss: share of pairs that are lost in truth, less those gained.
        gained: share of pairs that are gained.
        runs: how often they are drawn.
        state: of the random numbers.
    """
    chance, covered = random.Random(state), 0
    known: dict[tuple[int, int], bool] = {}
    for _ in range(runs):
        dice = [chance.random() for _ in range(count)]
        pair = sum(x < loss + gained for x in dice), sum(loss + gained <= x < loss + 2 * gained for x in dice)
        if pair not in known:
            found = hit_difference(*pair, count)
            assert found.low is not None and found.high is not None
            known[pair] = found.low <= -loss <= found.high
        covered += known[pair]
    return covered / runs


def section() -> str:
    """Both tables as Markdown."""
    return "\n".join([*_of_hits(), "", *_of_headlines()])


def _of_hits(runs: int = 4000) -> Iterator[str]:
    losses, gains, counts = (0.0, 0.01, 0.02, 0.05, 0.1), (0.0, 0.02, 0.1), (5, 10, 20, 50, 100, 200)
    yield f"Percent of intervals of paired hits that cover the true loss, {runs:,} draws each:"
    yield ""
    yield "| lost less gained, gained (points) | " + " | ".join(f"{n} pairs" for n in counts) + " |"
    yield "|---" * (len(counts) + 1) + "|"
    for loss in losses:
        for gained in gains:
            cells = [f"{100 * coverage(n, loss, gained, runs=runs, state=n):.1f}" for n in counts]
            yield f"| {100 * loss:g}, {100 * gained:g} | " + " | ".join(cells) + " |"


def _of_headlines(runs: int = 6000, plans: int = 8) -> Iterator[str]:
    counts = (5, 10, 20, 30, 50, 100)
    yield (
        f"Percent of {runs:,} runs whose headline names one of {plans} plans, all of which lose {2 * MARGIN:g} nats "
        "per token in truth,\ntwice the margin:"
    )
    yield from _runs(counts, dict.fromkeys(DRAWS, 2 * MARGIN), runs, plans)
    yield ""
    yield f"The same where all {plans} lose 0.004 nats, so that a headline that names one is right:"
    yield from _runs((*counts, 200, 400), dict.fromkeys(DRAWS, 0.004), runs // 30, plans)


def _runs(counts: tuple[int, ...], means: Mapping[str, float], runs: int, plans: int) -> Iterator[str]:
    yield ""
    yield "| losses of a window | " + " | ".join(f"{n} windows" for n in counts) + " |"
    yield "|---" * (len(counts) + 1) + "|"
    for name, mean in means.items():
        cells = [
            f"{100 * errors(DRAWS[name], mean=mean, windows=n, plans=plans, runs=runs, state=n):.1f}" for n in counts
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def written(page: str, tables: str) -> str:
    """The page with these tables between the marks.

    Raises:
        ValueError: the page has no marks.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"asked for the tables of {PAGE}, which has no {BEGIN} and {END}: put them where they belong")
    head, rest = page.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{tables}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    tables = section()
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
