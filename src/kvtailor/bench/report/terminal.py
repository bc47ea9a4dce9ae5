"""A run in a terminal: the answer, the table, the small print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvtailor.bench.report import Row, Summary
from kvtailor.bench.report.rows import FULL, OWN

__all__ = ["byte_text", "show"]

MISSING = "–"
_NARROW = 120
_PLAN_WIDTH = 60  # beyond which a plan's line is folded


def show(summary: Summary, console: Console) -> None:
    """Prints a summary.

    In a terminal of fewer than 120 columns plans are numbered, since a plan's line is too long for a cell, and
    intervals go to a second line of their cell.
    """
    console.print()
    console.print(Text(summary.headline, style="bold"))
    console.print()
    narrow = console.width < _NARROW
    if narrow:
        for number, row in enumerate(_plans(summary), 1):
            console.print(Text(f" {number}  {row.label}", style="bold" if row.label == FULL else ""))
        console.print()
    for table in _tables(summary, console, narrow=narrow):
        console.print(table)
        console.print()
    for note in summary.footnotes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
    machine = summary.machine
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("torch", "transformers"))
    what = f"{machine.get('processor') or 'unknown processor'}, {versions}."
    console.print(Padding(Text(what, style="dim"), (0, 0, 0, 1)))


def _plans(summary: Summary) -> list[Row]:
    return [row for row in summary.rows if row.plan_hash != OWN]


def _tables(summary: Summary, console: Console, *, narrow: bool) -> Iterator[Table]:
    """All columns, in as many tables below each other as the terminal's width asks for."""
    rows = _plans(summary)
    names = {id(row): str(number) if narrow else row.label for number, row in enumerate(rows, 1)}
    joint = "\n" if narrow else "  "
    columns: list[tuple[str, Literal["left", "right"], Callable[[Row], Text]]] = [
        ("plan", "left", lambda row: Text(names[id(row)], style="bold" if row.label == FULL else "")),
        ("held/seen", "right", _tokens),
        ("bytes", "right", _bytes),
        ("ΔNLL (95 %)", "right", lambda row: _loss(row, joint)),
        ("needle (95 %)", "right", lambda row: _accuracy(row, joint)),
        ("recall (95 %)", "right", lambda row: _recall(row, joint)),
        ("KL", "right", lambda row: _missing() if row.kl is None else Text(f"{row.kl:.3f}")),
        ("top-1", "right", lambda row: _missing() if row.top1 is None else Text(f"{100 * row.top1:.1f} %")),
        ("TTFT", "right", lambda row: _times(row.ttft_ratio)),
        ("TPOT", "right", lambda row: _times(row.tpot_ratio)),
    ]
    rendered: list[Column] = [(name, side, [render(row) for row in rows]) for name, side, render in columns]
    plan, *others = [column for column in rendered if any(str(cell) != MISSING for cell in column[2])]
    group = [plan]
    for column in others:
        if len(group) > 1 and sum(map(_width, [*group, column])) > console.width:
            yield _table_of(group)
            group = [plan]
        group.append(column)
    yield _table_of(group)


Column = tuple[str, Literal["left", "right"], list[Text]]


def _width(column: Column) -> int:
    name, _, cells = column
    if name == "plan":
        return 2 + min(_PLAN_WIDTH, max(len(name), *(cell.cell_len for cell in cells)))
    return 2 + max(len(name), *(len(line) for cell in cells for line in cell.plain.split("\n")))


def _table_of(columns: list[Column]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False, collapse_padding=False)
    table.pad_edge = True
    for name, side, _ in columns:
        least = len(name) if name == "plan" else None
        table.add_column(name, justify=side, no_wrap=name != "plan", overflow="fold", vertical="top", min_width=least)
    for cells in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def byte_text(count: float) -> str:
    """Bytes as people read them, in powers of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count / size < 999.5 else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def _tokens(row: Row) -> Text:
    if row.tokens_held is None:
        return _missing()
    return Text(f"{row.tokens_held:.0f}/{row.tokens_seen}")


def _bytes(row: Row) -> Text:
    if row.bytes_held is None or row.ratio is None:
        return _missing()
    return Text(byte_text(row.bytes_held)).append(
        f"  {100 * row.ratio:>3.0f} %", style="cyan" if row.ratio < 0.99 else ""
    )


def _loss(row: Row, joint: str) -> Text:
    if row.loss is None:
        return _missing()
    if row.label == FULL:
        return Text("0")
    text = Text(f"{row.loss.value:+.3f}", style=_colour(row))
    if row.loss.low is not None:
        text.append(f"{joint}{row.loss.low:+.3f} … {row.loss.high:+.3f}", style="dim")
    return text


def _accuracy(row: Row, joint: str) -> Text:
    if row.accuracy is None or row.accuracy.low is None or row.accuracy.high is None:
        return _missing()
    text = Text(f"{row.hits}/{row.answers}")
    return text.append(f"{joint}{100 * row.accuracy.low:.0f} … {100 * row.accuracy.high:.0f} %", style="dim")


def _recall(row: Row, joint: str) -> Text:
    if row.recall is None:
        return _missing()
    text = Text(f"{100 * row.recall.value:.0f} %")
    if row.recall.low is not None and row.recall.high is not None:
        text.append(f"{joint}{100 * row.recall.low:.0f} … {100 * row.recall.high:.0f} %", style="dim")
    return text


def _times(ratio: float | None) -> Text:
    return _missing() if ratio is None else Text(f"{ratio:.2f}×")


def _colour(row: Row) -> str:
    """Green: no loss that could be told from chance. Yellow: a loss. No colour: cannot be told."""
    if row.loss is None or row.loss.low is None:
        return ""
    return "green" if row.loss.low <= 0 else "yellow"


def _missing() -> Text:
    return Text(MISSING, style="dim")
