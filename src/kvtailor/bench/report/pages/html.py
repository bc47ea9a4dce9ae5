"""Tables as HTML: sortable, and every number a link to the records that it was computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from kvtailor.bench.report.tables.grid import Cell, Grid
from kvtailor.bench.schema import Record

__all__ = ["anchor", "come_from", "quoted", "records_table", "table"]

_FEW = 3


def quoted(text: object) -> str:
    """For an attribute."""
    return escape(str(text), quote=True)


def anchor(key: str) -> str:
    """The id of a record's line on the page."""
    return f"r-{key}"


def come_from(keys: Sequence[str], records: Mapping[str, Record]) -> str:
    """Where a number came from, for a hover text: the records' tasks, points and keys."""
    lines = []
    for key in keys[:_FEW]:
        record = records[key]
        lines.append(f"{record.task} v{record.task_version}, {_point(record) or 'no point'}: record {key}")
    if len(keys) > _FEW:
        lines.append(f"and {len(keys) - _FEW} records more")
    return "\n".join(lines)


def table(
    grid: Grid,
    records: Mapping[str, Record],
    numbers: Mapping[str, str],
    kinds: Mapping[str, str],
    *,
    tags: Mapping[str, str] | None = None,
    classes: Mapping[str, str] | None = None,
) -> str:
    """A grid as a sortable table in a box of its own that scrolls.

    Args:
        grid: what to show.
        records: by key.
        numbers: of the plans, by plan hash; without any there is no column of numbers.
        kinds: class of each plan's colour.
        tags: words beside the names of some plans.
        classes: of the lines of some plans.
    """
    heads = "".join(_head(name, left=index == 0) for index, name in enumerate(grid.heads))
    if numbers:
        heads = _head("#", left=False) + heads
    body = []
    for plan, (first, *others) in zip(grid.plans, grid.rows, strict=True):
        number = numbers.get(plan)
        swatch = f'<span class="swatch {kinds[plan]}"></span>' if plan in kinds else ""
        tag = (tags or {}).get(plan)
        shown = f'<span class="front-tag">{escape(tag)}</span>' if tag else ""
        cells = [f'<td data-value="{quoted(number or "")}">{swatch}{escape(number or "–")}</td>'] if numbers else []
        cells += [
            f'<td class="name" data-value="{quoted(first.value)}"><code>{escape(first.text or "")}</code>{shown}</td>',
            *(_cell(cell, records) for cell in others),
        ]
        body.append(f'<tr class="{(classes or {}).get(plan, "")}">{"".join(cells)}</tr>')
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{quoted(grid.title)}">'
        f'<table class="sortable" id="table-{quoted(grid.name)}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def records_table(records: Sequence[Record]) -> str:
    """One line for each record, closed at first: what every number of the page was computed from."""
    names = ("plan", "task", "point", "text", "samples", "seen", "held", "bytes", "run", "key", "error")
    heads = "".join(_head(name, left=True) for name in names)
    body = []
    for record in records:
        cells = (
            record.label, f"{record.task} v{record.task_version}", _point(record), record.text, record.samples,
            record.tokens_seen, record.tokens_held, record.bytes_held, record.run, record.key, record.error,
        )  # fmt: skip
        shown = (
            f'<td class="name" data-value="{quoted("" if cell is None else cell)}">'
            f"{'–' if cell is None else escape(f'{cell:g}' if isinstance(cell, float) else str(cell))}</td>"
            for cell in cells
        )
        body.append(f'<tr id="{anchor(record.key)}" data-key="{record.key}">{"".join(shown)}</tr>')
    return (
        f'<details id="records"><summary>{len(records)} records: where each number came from</summary>'
        '<p class="dim">A click on a number of a table above shows its records here.</p>'
        '<div class="filter"><input id="filter" type="search" placeholder="words, such as: needle snapkv 512" '
        'aria-label="filter the records"><button type="button" id="all">show all</button>'
        f'<span id="shown" class="dim" aria-live="polite">all {len(records)} records</span></div>'
        '<div class="wide" tabindex="0" role="region" aria-label="records"><table class="sortable records">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div></details>"
    )


def _head(name: str, *, left: bool) -> str:
    kind = ' class="name"' if left else ""
    return f'<th scope="col"{kind}><button type="button">{escape(name)}</button></th>'


def _cell(cell: Cell, records: Mapping[str, Record]) -> str:
    if cell.text is None:
        return '<td data-value="">–</td>'
    shown = escape(cell.text)
    known = [key for key in cell.keys if key in records]
    if known:
        shown = (
            f'<a href="#{anchor(known[0])}" data-keys="{" ".join(known)}" title="{quoted(come_from(known, records))}">'
            f"{shown}</a>"
        )
    small = f"<small>{escape(cell.interval)}</small>" if cell.interval else ""
    return f'<td data-value="{quoted("" if cell.value is None else cell.value)}">{shown}{small}</td>'


def _point(record: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.point.items() if value is not None)
