"""Tables as HTML: sortable, and every number a link to the records that it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from kvtailor.bench.report.tables.grid import Cell, Grid
from kvtailor.bench.schema import Record

__all__ = ["behind", "numbered", "quoted", "records_table", "table"]


def quoted(text: object) -> str:
    """For an attribute."""
    return escape(str(text), quote=True)


def numbered(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of each record's line on the page, by key: the line's id is "r" and the number."""
    return {record.key: number for number, record in enumerate(records, 1)}


def behind(keys: Sequence[str], lines: Mapping[str, int]) -> str:
    """Return the attribute that leads from a number to the records behind it; empty where none is on the page.

    Neighbouring lines are written as ranges, such as "4-9 12": a page of many plans has thousands of these.

    Args:
        keys: of the records, the first one first.
        lines: from `numbered`.
    """
    runs: list[list[int]] = []
    for line in (lines[key] for key in dict.fromkeys(keys) if key in lines):
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    words = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f' data-r="{words}"' if words else ""


def table(
    grid: Grid,
    lines: Mapping[str, int],
    numbers: Mapping[str, str],
    kinds: Mapping[str, str],
    *,
    tags: Mapping[str, str] | None = None,
    classes: Mapping[str, str] | None = None,
) -> str:
    """A grid as a sortable table in a box of its own that scrolls.

    A number is a link to the records behind it. Where all numbers of a row are of the same records, the row's name is
    that link, so that a reader with a keyboard has one stop for each row and not one for each number.

    Args:
        grid: what to show.
        lines: from `numbered` the records of the page.
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
        same = _same_records(others, lines)
        swatch = f'<span class="swatch {kinds[plan]}"></span>' if plan in kinds else ""
        tag = (tags or {}).get(plan)
        shown = f'<span class="front-tag">{escape(tag)}</span>' if tag else ""
        name = f"<code>{escape(first.text or '')}</code>"
        if same:
            name = f'<a href="#r{lines[same[0]]}">{name}</a>'
        cells = [f"<td>{swatch}{escape(number or '–')}</td>"] if numbers else []
        cells += [f'<td class="name">{name}{shown}</td>', *(_cell(cell, lines, alone=not same) for cell in others)]
        kind = f' class="{each}"' if (each := (classes or {}).get(plan)) else ""
        mine = f' data-n="{escape(number)}"' if number else ""
        more = behind(same, lines) if len(same) > 1 else ""
        body.append(f"<tr{kind}{mine}{more}>{''.join(cells)}</tr>")
    tall = " tall" if len(body) > _TALL else ""
    return (
        f'<div class="wide{tall}" tabindex="0" role="region" aria-label="{quoted(grid.title)}">'
        f'<table class="sortable{" of-plans" if numbers else ""}" id="table-{quoted(grid.name)}">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


_TALL = 16
"""Rows beyond which a table scrolls in its box, so that its heads stay in sight."""


def records_table(records: Sequence[Record], numbers: Mapping[str, str]) -> str:
    """One line for each record, closed at first: what every number was computed from.

    There is a table for each task and kind of document. What is the same in all lines of a table is in its caption,
    and so is that two columns are the same. A plan is its number, in whose place report.js writes its words: with
    them, the records of sixty plans would have most of the page.

    Args:
        records: of the page.
        numbers: of the plans, by plan hash; a record of another plan has its words.
    """
    tables = []
    lines = list(enumerate(records, 1))
    for task, kind in dict.fromkeys((record.task, record.point.get("kind")) for record in records):
        mine = [each for each in lines if (each[1].task, each[1].point.get("kind")) == (task, kind)]
        tables.append(_of_task(task, mine, numbers))
    return (
        f'<details id="records"><summary>{len(records)} records: where each number came from</summary>'
        '<p class="dim">A click on a number of a table above shows its records here.'
        "<noscript> Plans are named by their numbers in the first table.</noscript></p>"
        '<div class="filter"><input id="filter" type="search" placeholder="words, such as: needle snapkv 512" '
        'aria-label="filter the records"><button type="button" id="all">show all</button>'
        f'<span id="shown" class="dim" aria-live="polite">all {len(records)} records</span></div>'
        f"{''.join(tables)}</details>"
    )


def _of_task(task: str, lines: Sequence[tuple[int, Record]], numbers: Mapping[str, str]) -> str:
    """The records of one task and kind."""
    about = " ".join(str(each) for each in (task, lines[0][1].point.get("kind")) if each is not None)
    points = list(dict.fromkeys(name for _, record in lines for name in record.point))
    columns: dict[str, list[str]] = {"plan": [numbers.get(record.plan_hash, record.label) for _, record in lines]}
    columns |= {name: [_written(record.point.get(name)) for _, record in lines] for name in points}
    columns |= {name: [_written(of(record)) for _, record in lines] for name, of in _OF_RECORD.items()}
    # Plans and keys tell lines from each other, so they stay where they happen to be the same.
    same = {
        name: values[0] for name, values in columns.items() if name not in ("plan", "key") and len(set(values)) == 1
    }
    caption = ", ".join(
        [
            f"<b>{escape(task)}</b>",
            *(f"{escape(name.replace('_', ' '))} {escape(value)}" for name, value in same.items() if value != _DASH),
        ]
    )
    shown: dict[str, list[str]] = {}
    for name, values in columns.items():
        twin = next((other for other, known in shown.items() if known == values), None)
        if name not in same and twin is None:
            shown[name] = values
        elif twin is not None:
            caption += f", {escape(name)} as {escape(twin.replace('_', ' '))}"
    heads = "".join(_head(name.replace("_", " "), left=True) for name in shown)
    body = "".join(
        f'<tr id="r{number}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for (number, _), cells in zip(lines, zip(*shown.values(), strict=True), strict=True)
    )
    return (
        f'<div class="wide tall" tabindex="0" role="region" aria-label="records of {quoted(about)}">'
        f'<table class="sortable records"><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


_DASH = "–"
_OF_RECORD: dict[str, Callable[[Record], object]] = {
    "version": lambda record: record.task_version,
    "text": lambda record: record.text,
    "samples": lambda record: record.samples,
    "seen": lambda record: record.tokens_seen,
    "held": lambda record: record.tokens_held,
    "bytes": lambda record: record.bytes_held,
    "run": lambda record: record.run,
    "key": lambda record: record.key,
    "error": lambda record: record.error,
}


def _written(value: object) -> str:
    if value is None or value == "":
        return _DASH
    return f"{value:g}" if isinstance(value, float) else str(value)


def _same_records(cells: Sequence[Cell], lines: Mapping[str, int]) -> tuple[str, ...]:
    """The records of a row where all of its numbers are of the same; else none."""
    found = {cell.keys for cell in cells if cell.text is not None and cell.keys}
    (keys,) = found if len(found) == 1 else ((),)
    return keys if keys and keys[0] in lines else ()


def _head(name: str, *, left: bool) -> str:
    kind = ' class="name"' if left else ""
    return f'<th scope="col"{kind}><button type="button">{escape(name)}</button></th>'


def _cell(cell: Cell, lines: Mapping[str, int], *, alone: bool) -> str:
    """A cell.

    Args:
        cell: what it shows.
        lines: from `numbered`.
        alone: whether it leads to records by itself; else its row does, and is sorted by what it shows.
    """
    if cell.text is None:
        return "<td>–</td>"
    shown, known = escape(cell.text), [key for key in cell.keys if key in lines]
    if alone and known:
        more = behind(known, lines) if len(known) > 1 else ""
        shown = f'<a href="#r{lines[known[0]]}"{more}>{shown}</a>'
    small = f"<small>{escape(cell.interval)}</small>" if cell.interval else ""
    sorts_itself = cell.value is None or (not alone and _is_number(cell.text)) or cell.value == cell.text
    value = "" if sorts_itself else f' data-value="{quoted(cell.value)}"'
    return f"<td{value}>{shown}{small}</td>"


def _is_number(text: str) -> bool:
    """Whether a reader's browser can sort by it."""
    number, _, unit = text.partition(" ")
    try:
        float(number.replace(",", ""))
    except ValueError:
        return False
    return unit in _UNITS


_UNITS = ("", "B", *(f"{each}iB" for each in "KMGT"), *(f"{each}FLOP" for each in ("", "k", "M", "G", "T")))
"""Those that `sorting.js` knows."""
