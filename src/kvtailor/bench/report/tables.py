"""The rows of a run as Markdown, CSV and LaTeX: the same numbers as in the terminal, for papers and other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from kvtailor.bench.report.rows import OWN, Row
from kvtailor.bench.statistics import Estimate

__all__ = ["COLUMNS", "csv_text", "latex", "markdown", "measured"]


def _signed(estimate: Estimate | None, digits: int) -> str | None:
    if estimate is None:
        return None
    value = f"{estimate.value:+.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} ({estimate.low:+.{digits}f} to {estimate.high:+.{digits}f})"


def _share(estimate: Estimate | None) -> str | None:
    if estimate is None:
        return None
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.value:.0f}"
    return f"{100 * estimate.value:.0f} ({100 * estimate.low:.0f} to {100 * estimate.high:.0f})"


def _number(value: float | None, digits: int, scale: float = 1.0) -> str | None:
    return None if value is None else f"{scale * value:.{digits}f}"


COLUMNS: tuple[tuple[str, Callable[[Row], str | None]], ...] = (
    ("tokens held", lambda row: _number(row.tokens_held, 0)),
    ("bytes held", lambda row: _number(row.bytes_held, 0)),
    ("bytes, %", lambda row: _number(row.ratio, 1, 100)),
    ("nats over full", lambda row: _signed(row.loss, 4)),
    ("perplexity", lambda row: _number(row.perplexity, 3)),
    ("bits per byte", lambda row: _number(row.bits_per_byte, 4)),
    ("answers right, %", lambda row: _share(row.accuracy)),
    ("recall, %", lambda row: _share(row.recall)),
    ("nats over full per answer token", lambda row: _signed(row.answer_loss, 3)),
    ("KL", lambda row: _number(row.kl, 4)),
    ("top-1, %", lambda row: _number(row.top1, 1, 100)),
    ("TTFT over full", lambda row: _number(row.ttft_ratio, 3)),
    ("TPOT over full", lambda row: _number(row.tpot_ratio, 3)),
)
"""Heading -> the cell of a row; None where it was not measured."""


def measured(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[str, Callable[[Row], str | None]]]]:
    """The plans, and the columns in which at least one of them has a number."""
    plans = [row for row in rows if row.plan_hash != OWN]
    return plans, [(name, cell) for name, cell in COLUMNS if any(cell(row) is not None for row in plans)]


def markdown(rows: Sequence[Row]) -> str:
    """A table; what was not measured is a dash."""
    plans, columns = measured(rows)
    lines = ["| plan | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in plans:
        lines.append(f"| `{row.label}` | " + " | ".join(cell(row) or "–" for _, cell in columns) + " |")
    return "\n".join(lines)


def csv_text(rows: Sequence[Row]) -> str:
    """Plain numbers, interval ends in columns of their own; what was not measured is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    plain = ("plan_hash", "tokens_held", "tokens_seen", "bytes_held", "bytes_full", "ratio", "bytes_resident", "nll",
             "perplexity", "bits_per_byte", "hits", "answers", "kl", "top1", "ttft_seconds", "tpot_seconds",
             "ttft_ratio", "tpot_ratio", "floor_ratio")  # fmt: skip
    with_ends = ("loss", "accuracy", "recall", "answer_loss")
    writer.writerow(
        ["plan", *plain, *(f"{name}{end}" for name in with_ends for end in ("", "_low", "_high", "_samples"))]
    )
    for row in rows:
        cells: list[object] = [row.label, *(getattr(row, name) for name in plain)]
        for name in with_ends:
            found: Estimate | None = getattr(row, name)
            cells += [None] * 4 if found is None else [found.value, found.low, found.high, found.count]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


_LATEX = {"\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
          "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}  # fmt: skip


def latex(rows: Sequence[Row]) -> str:
    """A ``tabular`` with booktabs rules."""
    plans, columns = measured(rows)

    def safe(text: str) -> str:
        return "".join(_LATEX.get(letter, letter) for letter in text)

    lines = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    lines.append(" & ".join(["plan", *(safe(name) for name, _ in columns)]) + r" \\")
    lines.append(r"\midrule")
    for row in plans:
        cells = [rf"\texttt{{{safe(row.label)}}}", *(safe(cell(row) or "--") for _, cell in columns)]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
