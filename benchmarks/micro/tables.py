"""What a micro bench gives: cells, each of which measures one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.micro.timer import Measured
from kvtailor.bench.measure.statistics import spread

__all__ = ["Advance", "Bench", "Cell", "Table", "compared"]

# Called with the name of what was timed, after each sample.
Advance = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one cell found.

    Attributes:
        lines: as a reader sees it, the title first.
        rows: the same as JSON values, by the name under which a bench's JSON has them. Several where one measurement
            answers several questions.
    """

    lines: Sequence[str]
    rows: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One table that is still to be measured.

    Attributes:
        name: what a progress line shows.
        samples: how many times `measure` calls its argument.
        measure: takes the samples.
    """

    name: str
    samples: int
    measure: Callable[[Advance], Table]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A micro bench with its settings: what it runs on, and its cells.

    Attributes:
        about: what is measured, and against what a user would run instead; a few lines.
        machine: what it runs on, one line.
        cells: the tables, in order; made when they are reached, so that one cell's memory is free before the next.
        found: what else its JSON holds.
    """

    about: str
    machine: str
    cells: Sequence[Cell]
    found: dict[str, Any] = field(default_factory=dict)


def compared(
    title: str,
    results: Sequence[Measured],
    base: str,
    *,
    bandwidth: float | None = None,
    notes: Iterable[str] = (),
    layers: int | None = None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return a table as lines and as JSON values; ratios are of medians, to `base`.

    Args:
        title: of the table.
        results: of all sides.
        base: the name of the side that the others are divided by.
        bandwidth: bytes per second of a plain read, for the floor beside each time: the bytes that the side must read
            over it. A floor above the time that was measured is none (the bytes came from a cache) and is left out.
        notes: lines between the title and the times.
        layers: of the model, where each time is shown as microseconds of a layer above the base, too.
    """
    lines, rows = ["", title, *notes], []
    width = max([34, *(len(measured.name) for measured in results)])
    reference = next((m for m in results if m.name == base), None)
    middle = None if reference is None else spread(reference.seconds).median
    for measured in results:
        s = spread(measured.seconds)
        row: dict[str, Any] = {"name": measured.name, "median_ms": None, "ratio": None, "disturbed": measured.disturbed}
        rows.append(row)
        if s.median is None or s.q1 is None or s.q3 is None:
            lines.append(f"  {measured.name:{width}s} no undisturbed sample ({measured.disturbed} left out)")
            continue
        floor = None if bandwidth is None or measured.bytes_read is None else measured.bytes_read / bandwidth
        floor = None if floor is not None and floor > s.median else floor
        ratio = None if not middle else s.median / middle
        above = None if middle is None or layers is None else (s.median - middle) / layers * 1e6
        lines.append(
            f"  {measured.name:{width}s} {s.median * 1e3:9.2f} ms  [{s.q1 * 1e3:.2f}, {s.q3 * 1e3:.2f}]"
            f"  {'    –' if ratio is None else f'{ratio:5.2f}'} of {base}"
            f"{'' if above is None else f' {above:+6.0f} us a layer'}"
            f"  {'' if floor is None else f'floor {floor * 1e3:.2f} ms '}"
            f"({len(measured.seconds)} samples, {measured.disturbed} disturbed)"
        )
        row |= {
            "median_ms": s.median * 1e3,
            "q1_ms": s.q1 * 1e3,
            "q3_ms": s.q3 * 1e3,
            "ratio": ratio,
            "floor_ms": None if floor is None else floor * 1e3,
            "samples": len(measured.seconds),
            "cache_bytes": measured.cache_bytes,
            **({} if layers is None else {"above_us_a_layer": above}),
        }
    return lines, rows
