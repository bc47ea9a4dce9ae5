"""How often the host waits for the device does not rise: the page `docs/synchronisations.md` has the upper bounds."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.other_device.counts import Counts, counted, models, plans

PAGE = Path(__file__).parents[3] / "docs" / "synchronisations.md"
WRITER: dict[str, Any] = runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "syncs.py"))
ROWS: dict[str, str] = WRITER["rows"](PAGE.read_text(encoding="utf-8"))
HINT = "run `python -m benchmarks.syncs` and commit docs/synchronisations.md with the change"
# What most users run: nothing, an eviction to unequal budgets with codes, sparse reading.
DEFAULT = (
    "full",
    "snapkv + adakv + kivi(bits=4, group=8, recent=8) @ tokens=48",
    "quest(tokens=64) + indexed",
    # An eviction at every token, and keys that are turned at every token.
    "streamingllm",
    "h2o @ tokens=48",
)
# The bars of issue 21: waits of a decoded token, and of a prompt for each further layer where a plan evicts as many
# tokens of each head, and where heads keep what they need. What is above one is told of in the page, with the reason.
TOKEN, UNIFORM, RAGGED = 1, 2, 4
RAGGED_ALLOCATORS = ("adakv", "cake", "coverage", "dynamickv", "duo", "entropy", "erank", "pooled", "threshold")


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with models():
        yield


def bounds(row: str) -> list[float | None]:
    """Of a token median, mean and each further layer; of a prompt all and each further layer: as the page has them."""
    cells = row.rpartition("`")[2].split("|")[1:-1]
    return [None if cell.strip() == "-" else float(cell) for cell in cells]


def measured(counts: Counts) -> list[float | None]:
    return [counts.usual, counts.mean, counts.token_layer, counts.prompt, counts.prompt_layer]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in plans()]
)
def test_no_count_rises(name: str) -> None:
    counts = counted(plans()[name])
    for found, most in zip(measured(counts), bounds(ROWS[name]), strict=True):
        assert (found is None) == (most is None)
        assert found is None or found <= most, (
            f"{name}: {measured(counts)} waits of the host, where the page allows {bounds(ROWS[name])}. Take the new "
            f"wait out; where it has to be, {HINT}. The waits:\n"
            + "\n".join(f"{n:5} {kind} {place}" for (kind, place), n in counts.places.most_common())
        )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(plans()))
def test_a_count_that_fell_is_written_down(name: str) -> None:
    counts = counted(plans()[name])
    assert WRITER["row"](name, counts) == ROWS[name], f"the count is not that of the page any more: {HINT}"


def test_every_plan_has_a_line_and_no_other_has() -> None:
    assert list(ROWS) == list(plans()), f"{HINT}"
    assert set(DEFAULT) <= set(ROWS)


def test_what_is_above_a_bar_is_told_of_and_nothing_else() -> None:
    above = set()
    for name, row in ROWS.items():
        usual, mean, token_layer, _, prompt_layer = bounds(row)
        text = plans()[name]
        most = RAGGED if any(each in text for each in RAGGED_ALLOCATORS) else UNIFORM
        assert usual is not None and mean is not None
        if usual > TOKEN or (token_layer or 0) > 0 or (prompt_layer or 0) > most:
            above.add(name)
    told = PAGE.read_text(encoding="utf-8").partition("## What is left")[2].partition("\n## ")[0]
    assert above == {each for each in ROWS if f"`{each}`" in told}
