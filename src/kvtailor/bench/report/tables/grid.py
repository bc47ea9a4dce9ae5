"""A table of numbers with the records that they came from, and the same table as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

__all__ = [
    "EMPTY",
    "Cell",
    "Grid",
    "as_csv",
    "as_latex",
    "as_markdown",
    "csv_cell",
    "number",
    "safe_markdown",
    "visible",
    "whole",
    "word",
]


BAR = r"\|"
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
FORMULA = "=+-@\t\r\n"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number, or one word.

    Attributes:
        text: as it is shown; None: not measured.
        value: what the cell is sorted by, and what CSV has.
        interval: what is shown small beside it, such as the ends of an interval.
        ends: of an interval that belongs to it, for CSV.
        keys: of the records that it was computed from.
        shade: how dark it is from 0.0 to 1.0 where cells are told apart by that; None: it is not.
    """

    text: str | None = None
    value: float | str | None = None
    interval: str | None = None
    ends: tuple[float, float] | None = None
    keys: tuple[str, ...] = ()
    shade: float | None = None


EMPTY = Cell()


def word(text: str | None) -> Cell:
    """Return a cell of words; None: nothing was measured."""
    return Cell(text=text, value=text)


def number(value: float, digits: int, text: str = "") -> Cell:
    """Return a cell of a number with so many digits behind the point, or with a text in their place."""
    return Cell(text=text or f"{value:.{digits}f}", value=value)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table.

    Attributes:
        name: for file names and anchors, such as "cost".
        title: what it shows, a few words.
        note: how to read it, whole sentences.
        heads: of the columns; the first is of the plans.
        rows: as many cells each as there are heads.
        plans: plan hash of each row; of a row of several plans all of them, with a blank between.
        same: names and cells of what is the same in every row, so that only the note and CSV have it.
    """

    name: str
    title: str
    note: str = ""
    heads: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    plans: tuple[str, ...]
    same: tuple[tuple[str, Cell], ...] = ()

    def lines(self) -> Iterator[tuple[str, tuple[Cell, ...]]]:
        """Return each row with its plan."""
        return zip(self.plans, self.rows, strict=True)

    def without_empty_columns(self) -> Grid:
        """The same without the columns in which nothing was measured."""
        keep = [i for i in range(len(self.heads)) if any(row[i].text is not None for row in self.rows)]
        rows = tuple(tuple(row[i] for i in keep) for row in self.rows)
        return replace(self, heads=tuple(self.heads[i] for i in keep), rows=rows)


def as_markdown(grid: Grid) -> str:
    """A table; what was not measured is a dash, and nothing in it is HTML."""
    lines = ["| " + " | ".join(map(_flat, grid.heads)) + " |", "|---" * len(grid.heads) + "|"]
    for first, *others in grid.rows:
        name = (first.text or "").replace("\n", " ")
        # Within a code span nothing can be escaped but the bar.
        shown = _flat(name) if set(name) & set("`<>&") else f"`{name.replace('|', BAR)}`"
        lines.append(f"| {shown} | " + " | ".join(_flat(whole(cell)) for cell in others) + " |")
    return "\n".join(lines)


def safe_markdown(text: str) -> str:
    """A text in which neither HTML nor a code span can begin, on one line."""
    return escape(" ".join(visible(text).split("\n")), quote=False).replace("`", r"\`")


def visible(text: str, backslash: str = "\\") -> str:
    r"""Control characters, and those that break a line or turn its direction, as Python writes them: `\x1b`, `\u2028`.

    Line feeds and tabs stay.

    Args:
        text: any.
        backslash: how the format writes one.
    """

    def written(found: re.Match[str]) -> str:
        code = ord(found[0])
        return backslash + (f"x{code:02x}" if code < 256 else f"u{code:04x}")

    return _INVISIBLE.sub(written, text)


def csv_cell(value: float | str) -> float | str:
    """A cell of a CSV file that a spreadsheet takes for what it is.

    A text that begins like a formula (=, +, -, @, tab, carriage return or line feed) gets an apostrophe before it, as
    OWASP advises against CSV injection. Numbers stay numbers.
    """
    return f"'{value}" if isinstance(value, str) and value[:1] in FORMULA and value else value


def as_csv(grid: Grid) -> str:
    """Plain values; what was not measured is empty.

    Interval ends have columns of their own, and the last column has the keys of the records behind the row.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ends = [i for i in range(len(grid.heads)) if any(row[i].ends is not None for row in grid.rows)]
    further = [f"{grid.heads[i]}, {end}" for i in ends for end in ("low", "high")]
    heads = [*grid.heads, *further, *(name for name, _ in grid.same), "plan_hash", "records"]
    writer.writerow([csv_cell(head) for head in heads])
    for plan, row in zip(grid.plans, grid.rows, strict=True):
        keys = dict.fromkeys(key for cell in row for key in cell.keys)
        values = [cell.value for cell in row] + [end for i in ends for end in row[i].ends or (None, None)]
        values += [cell.value for _, cell in grid.same]
        writer.writerow(
            ["" if value is None else csv_cell(value) for value in values] + [csv_cell(plan), " ".join(keys)]
        )
    return out.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
    "|": r"\textbar{}",
}


def as_latex(grid: Grid) -> str:
    """A ``tabular`` with booktabs rules."""
    lines = [r"\begin{tabular}{l" + "r" * (len(grid.heads) - 1) + "}", r"\toprule"]
    lines.append(" & ".join(map(_safe, grid.heads)) + r" \\")
    lines.append(r"\midrule")
    for first, *others in grid.rows:
        cells = [rf"\texttt{{{_safe(first.text or '')}}}", *(_safe(whole(cell)) for cell in others)]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def whole(cell: Cell, dash: str = "–") -> str:
    """Return a cell with what stands beside it in brackets; of what was not measured a dash."""
    if cell.text is None:
        return dash
    return cell.text if cell.interval is None else f"{cell.text} ({cell.interval})"


def _flat(text: str) -> str:
    return safe_markdown(text).replace("|", BAR)


def _safe(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
