"""Quality against bytes as a picture. Needs matplotlib (`pip install 'kvtailor[plots]'`)."""

from __future__ import annotations

import io
from pathlib import Path

from kvtailor.bench.report import Summary
from kvtailor.bench.report.table import OWN
from kvtailor.errors import KvtailorError
from kvtailor.ops.files import write_whole

__all__ = ["plot"]

_MARKERS = "osD^"  # colours come round after ten plans


def plot(summary: Summary, path: Path) -> Path:
    """Writes loss in nats (with intervals) against the share of bytes held.

    Raises:
        KvtailorError: matplotlib is missing, no plan has both a loss and bytes, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvtailorError("a plot needs matplotlib, which is not installed: pip install 'kvtailor[plots]'") from error
    points = [row for row in summary.rows if row.loss is not None and row.ratio is not None and row.plan_hash != OWN]
    if not points:
        raise KvtailorError(
            "a plot of loss against bytes needs plans with both, and no plan of this run has them: run perplexity"
        )
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color="0.8", linewidth=1)
    for index, row in enumerate(points):
        assert row.loss is not None and row.ratio is not None
        low, high = row.loss.low, row.loss.high
        bars = None if low is None or high is None else [[row.loss.value - low], [high - row.loss.value]]
        colour = "0.3" if row.is_full else f"C{index % 10}"
        marker = _MARKERS[index // 10 % len(_MARKERS)]
        place, loss = [100 * row.ratio], [row.loss.value]
        axes.errorbar(place, loss, yerr=bars, fmt=marker, color=colour, capsize=3, label=row.label)
    axes.set_xlabel("bytes held, % of the full cache")
    axes.set_ylabel("loss against 'full', nats per token (95 % interval)")
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:] or "png")
    write_whole(path, drawn.getvalue())
    return path
