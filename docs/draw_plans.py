"""Draws the picture of README: share of the bytes against loss, one point a plan, from records.

    python docs/draw_plans.py FOLDER_OF_RECORDS

Writes docs/pictures/plans.svg. Losses are mean paired differences to 'full' in perplexity, with 95 % intervals; plans
without one are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from kvtailor.bench.report import summarise
from kvtailor.bench.report.rows import Row
from kvtailor.bench.schema import read_records

PICTURE = Path(__file__).parent / "pictures" / "plans.svg"
INK, DIM, FRONT = "#1c2126", "#68707a", "#1a7f4b"


def main() -> None:
    """Reads, draws and writes."""
    plt.switch_backend("svg")
    # Text stays text, and the file is the same at every run.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvtailor", "font.family": "sans-serif"})
    rows = [row for row in summarise(read_records(Path(sys.argv[1]))).rows if row.loss is not None and row.ratio]
    figure, axes = plt.subplots(figsize=(8.6, 4.7))
    front = {row.label for row in _front(rows)}
    for row in rows:
        assert row.loss is not None and row.ratio is not None
        colour = FRONT if row.label in front else DIM
        x, y = 100 * row.ratio, row.loss.value
        if row.loss.low is not None and row.loss.high is not None:
            axes.plot([x, x], [row.loss.low, row.loss.high], color=colour, linewidth=1.1, alpha=0.6, zorder=1)
        axes.plot([x], [y], "o", color=colour, markersize=5.5, zorder=2)
        axes.annotate(row.label, (x, y), xytext=(7, 4), textcoords="offset points", fontsize=8, color=INK)
    axes.set_xscale("log")
    ticks = [8, 10, 15, 20, 25, 30, 40, 50]
    axes.set_xticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(0, color=DIM, linewidth=0.8)
    axes.set_xlabel("bytes held, share of the uncompressed cache", color=INK)
    axes.set_ylabel("loss, nats a token (95 %)", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def _front(rows: list[Row]) -> list[Row]:
    """Those of which no other has fewer bytes and loses less."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.ratio or 0, row.loss.value if row.loss else 0)):
        if not found or (row.loss and found[-1].loss and row.loss.value < found[-1].loss.value):
            found.append(row)
    return found


if __name__ == "__main__":
    main()
