"""Writes the tables of `docs/synchronisations.md`: how often each plan makes the host wait for the device.

    python -m benchmarks.syncs

No GPU is needed: models run on the device of `tests/support/other_device`, which counts. The counts are the same at
every run and on every machine. Five minutes of one quiet core.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "synchronisations.md"
BEGIN, END = "<!-- counts: made by benchmarks/syncs.py -->", "<!-- /counts -->"
HEAD = (
    "| plan | a decoded token, median | mean | each further layer | a prompt of 3 layers | each further layer |\n"
    "|---|---|---|---|---|---|"
)
PLACES = 24  # functions in the second table


def measure() -> dict[str, Any]:
    """Return the counts of each plan by name."""
    counts = import_module("tests.support.other_device.counts")
    with counts.models():
        return {name: counts.counted(plan) for name, plan in counts.plans().items()}


def by_function(places: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Return the same waits without the numbers of lines, which change with every edit."""
    total: Counter[tuple[str, str]] = Counter()
    for (kind, place), count in places.items():
        path, _, function = place.partition(" ")
        total[kind, f"{path.rpartition(':')[0]}` `{function}"] += count
    return total


def written(value: float | None) -> str:
    """Return a count as the table has it; a dash is for what was not measured."""
    return "-" if value is None else f"{value:g}"


def row(name: str, counts: Any) -> str:
    """Return the line of a plan."""
    found = (counts.usual, counts.mean, counts.token_layer, counts.prompt, counts.prompt_layer)
    cells = [written(each) for each in found]
    return f"| `{name}` | {' | '.join(cells)} |"


def section(found: dict[str, Any]) -> str:
    """Return what stands between the two marks of the page."""
    lines = [BEGIN, HEAD, *(row(name, counts) for name, counts in found.items()), ""]
    total: Counter[tuple[str, str]] = Counter()
    plans: Counter[tuple[str, str]] = Counter()
    for counts in found.values():
        here = by_function(counts.places)
        total.update(here)
        plans.update(dict.fromkeys(here, 1))
    lines += ["The functions that wait most often, over all of these runs:", ""]
    lines += ["| waits | in plans | kind | where |", "|---|---|---|---|"]
    lines += [f"| {n} | {plans[key]} | {key[0]} | `{key[1]}` |" for key, n in total.most_common(PLACES)]
    return "\n".join([*lines, END])


def rows(page: str) -> dict[str, str]:
    """Return the first table's lines by plan, as the page has them."""
    inside = page.partition(BEGIN)[2].partition("\n\n")[0].splitlines()[3:]
    return {line.split("`")[1]: line for line in inside}


def main() -> None:
    """Write the page anew."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    warnings.simplefilter("ignore")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + section(measure()) + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
