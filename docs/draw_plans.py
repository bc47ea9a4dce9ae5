"""Draws the picture of README: share of the bytes against loss, one point a plan, from records.

    python docs/draw_plans.py FOLDER_OF_RECORDS

Writes docs/pictures/plans.svg. Losses are mean paired differences to 'full' in perplexity, with 95 % intervals; plans
without one are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.transforms import Bbox

from kvtailor.bench.report import summarise
from kvtailor.bench.report.front import pareto
from kvtailor.bench.report.table import Row
from kvtailor.bench.schema import read_records

PICTURE = Path(__file__).parent / "pictures" / "plans.svg"
INK, DIM, FRONT = "#1c2126", "#68707a", "#1a7f4b"
# Losses above it would press all others together; plans that lose more are named below the chart.
MOST = 0.14
# Where a name may stand beside its point, in points; the first that covers nothing is taken.
PLACES = [(7, 3), (7, -9), (-7, 3), (-7, -9), (7, 12), (7, -18), (-7, 12), (-7, -18), (7, 21), (-7, 21)]


def main() -> None:
    """Reads, draws and writes."""
    plt.switch_backend("svg")
    # Text stays text, and the file is the same at every run.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvtailor", "font.family": "sans-serif"})
    rows = [row for row in summarise(read_records(Path(sys.argv[1]))).rows if row.loss is not None and row.ratio]
    rows = [row for row in rows if not row.is_full]
    front = {row.label for row in pareto(rows)}
    figure, axes = plt.subplots(figsize=(8.6, 4.9))
    axes.set_xscale("log")
    axes.set_xlim(12, 46)
    axes.set_ylim(-0.02, MOST)
    shown = [row for row in rows if row.loss is not None and row.loss.value <= MOST]
    for row in shown:
        assert row.loss is not None and row.ratio is not None
        colour, x = FRONT if row.label in front else DIM, 100 * row.ratio
        if row.loss.low is not None and row.loss.high is not None:
            axes.plot([x, x], [row.loss.low, row.loss.high], color=colour, linewidth=1.1, alpha=0.45, zorder=1)
        axes.plot([x], [row.loss.value], "o", color=colour, markersize=6, zorder=2)
    ticks = [12, 15, 20, 25, 30, 40]
    axes.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(0, color=DIM, linewidth=0.8)
    axes.set_xlabel("bytes held, share of the uncompressed cache (logarithmic)", color=INK)
    axes.set_ylabel("loss over the uncompressed cache, nats a token", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    worse = [row for row in rows if row not in shown]
    if worse:
        said = "; ".join(f"{_name(row)}: {row.loss.value:+.2f}" for row in worse if row.loss is not None)
        figure.text(0.99, 0.01, f"not shown: {said}", ha="right", fontsize=7.5, color=DIM)
    figure.tight_layout(rect=(0, 0.03 if worse else 0, 1, 1))
    _write_names(figure, axes, sorted(shown, key=lambda row: row.label not in front), front)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def _write_names(figure: Any, axes: Any, rows: list[Row], front: set[str]) -> None:
    """Write the names, those of the front first, each where it covers no point and no other name."""
    figure.canvas.draw()
    taken = [
        Bbox.from_bounds(x - 4, y - 4, 8, 8)
        for x, y in (
            axes.transData.transform((100 * row.ratio, row.loss.value)) for row in rows if row.ratio and row.loss
        )
    ]
    for row in rows:
        assert row.loss is not None and row.ratio is not None
        for place in PLACES:
            text = axes.annotate(
                _name(row),
                (100 * row.ratio, row.loss.value),
                xytext=place,
                textcoords="offset points",
                fontsize=8,
                ha="left" if place[0] > 0 else "right",
                color=FRONT if row.label in front else INK,
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken) and axes.bbox.contains(box.x0, box.y0):
                taken.append(box)
                break
            text.remove()


def _name(row: Row) -> str:
    """The plan without what its neighbours share."""
    name = row.label
    for long, short in (
        (", symmetric=false", ""),
        ("(kernel=21)", ""),
        ("hadamard(of=vector(bits=", "rotated vector("),
    ):
        name = name.replace(long, short)
    return name.replace("))", ")")


if __name__ == "__main__":
    main()
