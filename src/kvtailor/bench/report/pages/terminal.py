"""A run in a terminal: the answer, the table, the small print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvtailor.bench.measure.equivalence import Margins
from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.report import Row, Summary
from kvtailor.bench.report.machines import hardware_text, versions_text
from kvtailor.bench.report.rows import OWN
from kvtailor.bench.report.tables.quality import POINTS, Measure
from kvtailor.bench.report.tables.tables import Column as TableColumn
from kvtailor.bench.report.tables.tables import declared_columns
from kvtailor.bench.report.words import byte_text, flop_text, milliseconds, significant

__all__ = ["Column", "byte_text", "fit", "show"]

Rendering = tuple[str, Literal["left", "right"], Callable[[Row], Text]]
Column = tuple[str, Literal["left", "right"], list[Text]]
"""Name, side and cells; that of the plans has the name 'plan'."""

MISSING = "–"
_NARROW = 120
_PLAN_WIDTH = 60  # beyond which a plan's line is folded


def show(summary: Summary, console: Console) -> None:
    """Prints a summary.

    In a terminal of fewer than 120 columns plans are numbered, since a plan's line is too long for a cell, and
    intervals go to a second line of their cell.
    """
    console.print()
    advice = summary.advice
    if advice.sentence:
        console.print(Text(advice.sentence, style="bold"))
        console.print()
    console.print(Text(summary.headline, style="dim" if advice.sentence else "bold"))
    console.print()
    narrow = console.width < _NARROW
    if narrow:
        for number, row in enumerate(_plans(summary), 1):
            console.print(Text(f" {number}  {row.label}", style="bold" if row.is_full else ""))
        console.print()
    for table in _tables(summary, console, narrow=narrow):
        console.print(table)
        console.print()
    if _says_more(summary):
        console.print(
            Text("Every text and task; below each the 95 % interval of the difference to 'full'", style="bold")
        )
        console.print()
        for table in _quality(summary, console, narrow=narrow):
            console.print(table)
            console.print()
    if summary.missing:
        console.print(Text("Not in this kvtailor yet, so not measured:", style="bold yellow"))
        for plan, what in summary.missing:
            console.print(Text(f"  {plan}: {what}"))
        console.print()
    for note in summary.footnotes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
    what = ", ".join(filter(None, [hardware_text(summary.machines), versions_text(summary.machines)]))
    console.print(Padding(Text(f"{what}.", style="dim"), (0, 0, 0, 1)))
    if advice.next is not None:
        console.print()
        console.print(Text(f"Next: {advice.next}", style="bold"), soft_wrap=True)


def _plans(summary: Summary) -> list[Row]:
    return [row for row in summary.rows if row.plan_hash != OWN]


def _tables(summary: Summary, console: Console, *, narrow: bool) -> Iterator[Table]:
    """The main table's columns and those of cost."""
    rows = _plans(summary)
    yield from _split(_columns(_naming(rows, narrow), "\n" if narrow else "  ", summary.margins, rows), rows, console)


def _naming(rows: list[Row], narrow: bool) -> Rendering:
    names = {row.plan_hash: str(number) if narrow else row.label for number, row in enumerate(rows, 1)}
    return "plan", "left", lambda row: Text(names[row.plan_hash], style="bold" if row.is_full else "")


def _columns(naming: Rendering, joint: str, margins: Margins, rows: list[Row]) -> list[Rendering]:
    return [
        naming,
        ("held/seen", "right", _tokens),
        ("bytes", "right", _bytes),
        ("ΔNLL (95 %)", "right", lambda row: _loss(row, joint, margins)),
        ("needle (95 %)", "right", lambda row: _accuracy(row, joint)),
        ("recall (95 %)", "right", lambda row: _estimate(row.recall, joint, lambda x: f"{100 * x:.0f} %")),
        ("KL", "right", lambda row: _missing() if row.kl is None else Text(f"{row.kl:.3f}")),
        ("top-1", "right", lambda row: _missing() if row.top1 is None else Text(f"{100 * row.top1:.1f} %")),
        ("TTFT", "right", lambda row: _times(row.ttft_ratio)),
        ("TPOT", "right", lambda row: _times(row.tpot_ratio)),
        ("tokens/s", "right", lambda row: _plain(row.tokens_per_second, significant)),
        ("per GiB", "right", lambda row: _plain(row.tokens_per_second_per_gib, significant)),
        ("ms/token", "right", lambda row: _with_floor(row, joint)),
        ("FLOP/token", "right", lambda row: _plain(row.flops_token, lambda x: flop_text(x).removesuffix("FLOP"))),
        ("of method", "right", lambda row: _plain(row.flops_method_token, lambda x: flop_text(x).removesuffix("FLOP"))),
        ("GFLOP/s", "right", lambda row: _plain(row.achieved_gflops_token, significant)),
        ("accepted", "right", lambda row: _estimate(row.acceptance, joint, lambda x: f"{100 * x:.0f} %")),
        ("emitted", "right", lambda row: _estimate(row.emitted, joint, lambda x: f"{x:.2f}")),
        ("speed-up", "right", lambda row: _estimate(row.speed_up, joint, lambda x: f"{x:.2f}×")),
        ("peak prefill", "right", lambda row: _plain(row.bytes_peak, byte_text)),
        ("decode", "right", lambda row: _plain(row.bytes_peak_decode, byte_text)),
        ("batch fits", "right", lambda row: _fits(row.largest_batch, row.largest_batch_verified)),
        ("context fits", "right", lambda row: _fits(row.longest_context, row.longest_context_verified)),
        *((column.name, "right", partial(_declared, column)) for column in declared_columns(rows)),
    ]


def _declared(column: TableColumn, row: Row) -> Text:
    text = column.cell(row).text
    return _missing() if text is None else Text(text)


def _says_more(summary: Summary) -> bool:
    """Whether there is a text or a task that the main table does not show by itself."""
    tasks = [measure.task for measure in summary.measures]
    return tasks.count("perplexity") > 1 or tasks.count("needle") > 1 or not {"perplexity", "needle"}.issuperset(tasks)


def _quality(summary: Summary, console: Console, *, narrow: bool) -> Iterator[Table]:
    rows = _plans(summary)
    columns = [_naming(rows, narrow)]
    for measure in summary.measures:
        columns.append((measure.name.replace(", ", "\n") + f"\n{measure.unit}", "right", partial(_score, measure)))
    yield from _split(columns, rows, console)


def _score(measure: Measure, row: Row) -> Text:
    score = measure.scores.get(row.plan_hash)
    if score is None:
        return _missing()
    digits = 1 if measure.unit == "%" else 3
    text = Text(f"{score.value:.{digits}f}")
    found = score.difference
    if found is not None and found.low is not None and found.high is not None and not row.is_full:
        fine = 1 if measure.difference_unit == POINTS else 3
        text.append(f"\n{found.low:+.{fine}f} … {found.high:+.{fine}f}", style="dim")
    return text


def _split(columns: list[Rendering], rows: list[Row], console: Console) -> Iterator[Table]:
    yield from fit([(name, side, [render(row) for row in rows]) for name, side, render in columns], console)


def fit(columns: list[Column], console: Console) -> Iterator[Table]:
    """Tables that the terminal is wide enough for, with the first column in each; columns of dashes are left out."""
    plan, *others = [column for column in columns if any(str(cell) != MISSING for cell in column[2])]
    group = [plan]
    for column in others:
        if len(group) > 1 and sum(map(_width, [*group, column])) > console.width:
            yield _table_of(group)
            group = [plan]
        group.append(column)
    yield _table_of(group)


def _width(column: Column) -> int:
    name, _, cells = column
    if name == "plan":
        return 2 + min(_PLAN_WIDTH, max(len(name), *(cell.cell_len for cell in cells)))
    return 2 + max(*map(len, name.split("\n")), *(len(line) for cell in cells for line in cell.plain.split("\n")))


def _table_of(columns: list[Column]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False, collapse_padding=False)
    table.pad_edge = True
    for name, side, _ in columns:
        least = len(name) if name == "plan" else None
        table.add_column(name, justify=side, no_wrap=name != "plan", overflow="fold", vertical="top", min_width=least)
    for cells in zip(*(cells for _, _, cells in columns), strict=True):
        table.add_row(*cells)
    return table


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


def _loss(row: Row, joint: str, margins: Margins) -> Text:
    if row.loss is None:
        return _missing()
    if row.is_full:
        return Text("0")
    text = Text(f"{row.loss.value:+.3f}", style=_colour(row, margins))
    if row.loss.low is not None:
        text.append(f"{joint}{row.loss.low:+.3f} … {row.loss.high:+.3f}", style="dim")
    return text


def _accuracy(row: Row, joint: str) -> Text:
    if row.accuracy is None or row.accuracy.low is None or row.accuracy.high is None:
        return _missing()
    text = Text(f"{row.hits}/{row.answers}")
    return text.append(f"{joint}{100 * row.accuracy.low:.0f} … {100 * row.accuracy.high:.0f} %", style="dim")


def _estimate(found: Estimate | None, joint: str, show: Callable[[float], str]) -> Text:
    if found is None:
        return _missing()
    text = Text(show(found.value))
    if found.low is not None and found.high is not None:
        text.append(f"{joint}{show(found.low)} … {show(found.high)}", style="dim")
    return text


def _plain(value: float | None, show: Callable[[float], str]) -> Text:
    return _missing() if value is None else Text(show(value))


def _fits(size: float | None, verified: float | None) -> Text:
    """About so many where that size was not run."""
    return _plain(size, lambda x: f"{'~' if verified == 0 else ''}{x:,.0f}")


def _with_floor(row: Row, joint: str) -> Text:
    if row.tpot_seconds is None:
        return _missing()
    text = Text(milliseconds(row.tpot_seconds))
    if row.floor_seconds is not None:
        text.append(f"{joint}floor {milliseconds(row.floor_seconds)}", style="dim")
    return text


def _times(ratio: float | None) -> Text:
    return _missing() if ratio is None else Text(f"{ratio:.2f}×")


def _colour(row: Row, margins: Margins) -> str:
    """Green: the whole interval is below the margin. Yellow: all of it is above 0. No colour: neither."""
    if row.loss is None or row.loss.low is None or row.loss.high is None:
        return ""
    if row.loss.high < margins.nats:
        return "green"
    return "yellow" if row.loss.low > 0 else ""


def _missing() -> Text:
    return Text(MISSING, style="dim")
