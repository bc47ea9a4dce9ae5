"""One self-contained HTML page of a run: no other file, no network; light and dark; made from records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import fmean

from kvtailor.bench.report import Summary, summarise
from kvtailor.bench.report.rows import FULL, OWN, Row
from kvtailor.bench.report.svg import Mark, heat_map, scatter
from kvtailor.bench.report.tables import measured
from kvtailor.bench.schema import Record
from kvtailor.bench.statistics import Estimate

__all__ = ["page", "pareto"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --dim: #686f7a; --rule: #e3e6ea; --accent: #1f6feb;
  --warm: #b35900; --good: #1a7f37; --soft: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --dim: #98a1ad; --rule: #2c323a;
  --accent: #6ea8fe; --warm: #f0a35e; --good: #56c271; --soft: #1b1f25; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.35; margin: 0 0 .4rem; max-width: 60rem; }
h2 { font-size: 1.05rem; margin: 2.4rem 0 .6rem; }
p { margin: .3rem 0; max-width: 60rem; } .dim, footer { color: var(--dim); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; vertical-align: bottom; white-space: normal; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
th[aria-sort=ascending] button::after { content: " ↑"; } th[aria-sort=descending] button::after { content: " ↓"; }
th.name, td.name { text-align: left; } td.name { white-space: normal; min-width: 14rem; }
td small { color: var(--dim); display: block; font-size: .78rem; } tr.full td { font-weight: 600; }
tr.best td.name::after { content: "on the front"; color: var(--good); font-size: .75rem; margin-left: .5rem;
  white-space: nowrap; }
code { font: .9em ui-monospace, monospace; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem 2rem; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; } figcaption { color: var(--dim); font-size: .88rem; margin-bottom: .3rem; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: var(--ink); }
svg .tick, svg .axis { fill: var(--dim); } svg .grid { stroke: var(--rule); } svg .zero { stroke: var(--dim); }
svg .mark circle { fill: var(--accent); } svg .mark line { stroke: var(--accent); stroke-width: 1.5; }
svg .mark:hover circle { fill: var(--warm); } svg .front { fill: none; stroke: var(--good); stroke-dasharray: 4 4; }
svg .cell { fill: var(--accent); } svg .on-light { fill: #fff; } svg .on-dark { fill: var(--ink); }
details { margin: .6rem 0; } summary { cursor: pointer; }
"""
_SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const key = row => row.cells[index].dataset.value;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
"""


def page(records: Sequence[Record], *, title: str = "kvtailor bench") -> str:
    """The page as text.

    Raises:
        ValueError: no records.
    """
    summary = summarise(records)
    plans, _ = measured(summary.rows)
    numbers = {row.plan_hash: str(number) for number, row in enumerate(plans, 1)}
    front = pareto(plans)
    parts = [
        f"<h1>{escape(summary.headline)}</h1>",
        f'<p class="dim">{escape(_where(records, summary))}</p>',
        '<div class="wide">',
        _table(plans, numbers, {row.plan_hash for row in front}),
        "</div>",
        '<div class="charts">',
        *_charts(plans, numbers, front),
        "</div>",
        *_needles(records, plans),
        "<h2>What the numbers rest on</h2>",
        *(f"<p>{escape(note)}</p>" for note in summary.footnotes),
        _sources(records),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style>'
        f"<body><main>{''.join(parts)}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The plans that no other beats in bytes and in loss at once, from few bytes to many."""
    judged = sorted(
        (row for row in rows if row.ratio is not None and row.loss is not None),
        key=lambda row: (row.ratio or 0.0, row.loss.value if row.loss else 0.0),
    )
    found: list[Row] = []
    for row in judged:
        assert row.loss is not None
        if not found or (found[-1].loss is not None and row.loss.value < found[-1].loss.value):
            found.append(row)
    return found


def _where(records: Sequence[Record], summary: Summary) -> str:
    first, machine = records[0], summary.machine
    size = f", {first.parameters / 1e6:.1f} million parameters" if first.parameters else ""
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("kvtailor", "torch", "transformers"))
    commit = f", commit {_short(str(machine['commit']))}" if machine.get("commit") else ""
    days = sorted({record.started[:10] for record in records})
    return (
        f"{first.model}{size}, {first.dtype} on {first.device}; {machine.get('processor') or 'unknown processor'}, "
        f"{versions}{commit}; {' to '.join(dict.fromkeys([days[0], days[-1]]))}."
    )


def _short(commit: str) -> str:
    digest, dash, dirty = commit.partition("-")
    return digest[:12] + dash + dirty


def _table(plans: Sequence[Row], numbers: dict[str, str], front: set[str]) -> str:
    _, columns = measured(plans)
    names = ["", "plan", *(name for name, _ in columns)]
    heads = "".join(
        f'<th class="{"name" if name == "plan" else ""}"><button type="button">{escape(name) or "#"}</button></th>'
        for name in names
    )
    body = []
    for row in plans:
        kind = " ".join(name for name, on in (("full", row.label == FULL), ("best", row.plan_hash in front)) if on)
        cells = [
            f'<td data-value="{numbers[row.plan_hash]}">{numbers[row.plan_hash]}</td>',
            f'<td class="name" data-value="{escape(row.label, quote=True)}"><code>{escape(row.label)}</code></td>',
        ]
        cells += [_cell(cell(row)) for _, cell in columns]
        body.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    return f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def _cell(text: str | None) -> str:
    if text is None:
        return '<td data-value="">–</td>'
    value, _, interval = text.partition(" (")
    small = f"<small>{escape(interval.rstrip(')'))}</small>" if interval else ""
    return f'<td data-value="{escape(value, quote=True)}">{escape(value)}{small}</td>'


def _charts(plans: Sequence[Row], numbers: dict[str, str], front: Sequence[Row]) -> Iterator[str]:
    def marks(of: Callable[[Row], Estimate | float | None], scale: float = 1.0) -> list[Mark]:
        found = []
        for row in plans:
            value = of(row)
            if value is None or row.ratio is None:
                continue
            low, high = None, None
            if isinstance(value, Estimate):
                low = None if value.low is None else scale * value.low
                high = None if value.high is None else scale * value.high
                value = value.value
            hover = f"{100 * row.ratio:.1f} % of the bytes\n{scale * value:.4g}"
            if low is not None and high is not None:
                hover += f" ({low:.4g} to {high:.4g})"
            found.append(
                Mark(x=100 * row.ratio, y=scale * value, low=low, high=high, label=row.label,
                     number=numbers[row.plan_hash], hover=hover)
            )  # fmt: skip
        return found

    asked: tuple[tuple[str, str, Callable[[Row], Estimate | float | None], float], ...] = (
        (
            "Loss against bytes; dashed: no plan beats it in both",
            "nats per token over full",
            lambda r: r.loss,
            1,
        ),
        ("Right answers against bytes", "answers right, %", lambda r: r.accuracy, 100),
        ("Recall of answers with several parts against bytes", "recall, %", lambda r: r.recall, 100),
        ("KL(full || plan) against bytes", "nats per token", lambda r: r.kl, 1),
        ("Time for one token against bytes", "TPOT over full", lambda r: r.tpot_ratio, 1),
    )
    for number, (title, axis, of, scale) in enumerate(asked):
        found = marks(of, scale)
        if len(found) < 2:
            continue
        by_number = {mark.number: mark for mark in found}
        joined = [by_number[numbers[row.plan_hash]] for row in front] if number == 0 else []
        picture = scatter(found, x="bytes held, % of the full cache", y=axis, title=title, front=joined)
        yield f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def _needles(records: Sequence[Record], plans: Sequence[Row]) -> Iterator[str]:
    """A heat map for each plan and kind of document that was asked at several depths or lengths."""
    found = [r for r in records if r.task == "needle" and r.error is None and r.plan_hash != OWN]
    for kind in dict.fromkeys(str(r.point["kind"]) for r in found):
        mine = [r for r in found if r.point["kind"] == kind]
        lengths = sorted({int(str(r.point["length"])) for r in mine})
        depths = sorted({float(str(r.point["depth"])) for r in mine})
        if len(lengths) * len(depths) < 2:
            continue
        what = "recall" if any("recall" in r.values for r in mine) else "right answers"
        yield f"<h2>{escape(kind)}: {what} in percent by depth (down) and tokens (across)</h2><div class='maps'>"
        for row in plans:
            grid = [[_grid_cell(mine, row, length, depth) for length in lengths] for depth in depths]
            picture = heat_map(
                grid, columns=[f"{length:,}" for length in lengths], rows=[f"{depth:.2g}" for depth in depths],
                title=f"{kind} under {row.label}",
            )  # fmt: skip
            yield f"<figure><figcaption><code>{escape(row.label)}</code></figcaption>{picture}</figure>"
        yield "</div>"


def _grid_cell(records: Sequence[Record], row: Row, length: int, depth: float) -> tuple[float, str] | None:
    shares = [
        share
        for r in records
        if r.plan_hash == row.plan_hash and (r.point["length"], r.point["depth"]) == (length, depth)
        for share in r.values.get("recall", r.values["hit"])
    ]
    if not shares:
        return None
    return fmean(
        shares
    ), f"{row.label}\n{length:,} tokens, depth {depth:g}: {fmean(shares):.0%} of {len(shares)} documents"


def _sources(records: Sequence[Record]) -> str:
    """One line for each record: what every number above was computed from."""
    names = ("plan", "task", "point", "text", "samples", "seen", "held", "bytes", "run", "key")
    heads = "".join(f'<th class="name"><button type="button">{name}</button></th>' for name in names)
    body = []
    for record in records:
        point = ", ".join(f"{name} {value}" for name, value in record.point.items() if value is not None)
        cells = (
            record.label, f"{record.task} v{record.task_version}", point, record.text or "–", record.samples,
            record.tokens_seen, record.tokens_held, record.bytes_held, record.run, record.key,
        )  # fmt: skip
        shown = (
            f'<td class="name" data-value="{"" if cell is None else escape(str(cell), quote=True)}">'
            f"{'–' if cell is None else escape(str(cell))}</td>"
            for cell in cells
        )
        body.append(f"<tr>{''.join(shown)}</tr>")
    return (
        f"<details><summary>{len(records)} records</summary><div class='wide'><table class='sortable'>"
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div></details>"
    )
