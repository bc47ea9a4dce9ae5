"""Heat maps: right answers by depth and length, and tokens held by layer and head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean

from kvtailor.bench.report.charts.charts import Drawn
from kvtailor.bench.report.charts.heat import HeatCell, heat_map
from kvtailor.bench.report.rows import Row
from kvtailor.bench.schema import Record

__all__ = ["budgets", "needles"]


def needles(drawn: Drawn) -> Iterator[str]:
    """A heat map for each plan and kind of document that was measured at several depths or lengths."""
    found = [r for r in drawn.records if r.task == "needle"]
    for kind, outside in dict.fromkeys((str(r.point["kind"]), bool(r.point.get("question_outside"))) for r in found):
        mine = [r for r in found if (str(r.point["kind"]), bool(r.point.get("question_outside"))) == (kind, outside)]
        lengths = sorted({int(str(r.point["length"])) for r in mine})
        depths = sorted({float(str(r.point["depth"])) for r in mine})
        if len(lengths) * len(depths) < 2:
            continue
        what = "recall" if any("recall" in r.values for r in mine) else "right answers"
        where = ", question outside of the compressed context" if outside else ""
        yield f"<h3>{escape(kind)}{where}: {what} in percent, by depth (down) and tokens (across)</h3>"
        yield "<div class='maps'>"
        for row in drawn.few:
            if not any(r.plan_hash == row.plan_hash for r in mine):
                continue
            grid = [[_answers(drawn, mine, row, length, depth) for length in lengths] for depth in depths]
            picture = heat_map(
                grid,
                columns=[f"{length:,}" for length in lengths],
                rows=[f"{depth:.2g}" for depth in depths],
                title=f"{kind} under {row.label}",
                told=f"{{column}} tokens, depth {{row}}: {{text}}% of {_documents(mine, row)} documents",
            )
            yield _figure(drawn, row, picture)
        yield "</div>"


def budgets(drawn: Drawn) -> Iterator[str]:
    """Tokens held by layer and head of each plan that holds fewer than it saw; flat ones are a sentence."""
    shown: list[tuple[Row, Record, tuple[tuple[float, ...], ...]]] = []
    flat = []
    for row in drawn.few:
        record = next((drawn.by_key[key] for key in row.keys("cache.bytes_held")), None)
        if record is None or not record.tokens_by_head or not record.tokens_seen:
            continue
        held = [tokens for heads in record.tokens_by_head for tokens in heads]
        if min(held) >= record.tokens_seen:
            continue
        if max(held) == min(held):
            flat.append(f"{row.label} ({held[0]:g} of {record.tokens_seen})")
        else:
            shown.append((row, record, record.tokens_by_head))
    if not shown and not flat:
        return
    if flat:
        yield f"<p>As many tokens in every layer and head: {escape('; '.join(flat))}.</p>"
    if not shown:
        return
    most = max(tokens for _, _, layers in shown for heads in layers for tokens in heads)
    yield (
        "<p class='dim'>Tokens held, layers down and kv heads across, mean over the rows of the sample that was "
        f"weighed. The same scale for all: darkest is {most:g} tokens.</p><div class='maps'>"
    )
    for row, record, layers in shown:
        heads = max(map(len, layers))
        grid = [
            [
                HeatCell(
                    share=tokens / most,
                    text=f"{tokens:.0f}",
                    hover=f"layer {layer}, head {head}: {tokens:g} of {record.tokens_seen} tokens",
                )
                for head, tokens in enumerate(by_head)
            ]
            for layer, by_head in enumerate(layers)
        ]
        picture = heat_map(
            grid,
            columns=[str(head) for head in range(heads)],
            rows=[str(layer) for layer in range(len(layers))],
            title=f"tokens by layer and head under {row.label}",
            across="kv head",
            told=f"layer {{row}}, head {{column}}: {{text}} of {record.tokens_seen} tokens",
        )
        yield _figure(drawn, row, picture)
    yield "</div>"


def _figure(drawn: Drawn, row: Row, picture: str) -> str:
    number = escape(drawn.numbers[row.plan_hash])
    title = f"<figcaption>{number} <code>{escape(row.label)}</code></figcaption>"
    return f"<figure data-n='{number}'>{title}{picture}</figure>"


def _documents(records: Sequence[Record], row: Row) -> int:
    """How many documents the first cell of a plan's map is over; mostly it is the number of all."""
    mine = next(r for r in records if r.plan_hash == row.plan_hash)
    return len(mine.values.get("recall", mine.values["hit"]))


def _answers(drawn: Drawn, records: Sequence[Record], row: Row, length: int, depth: float) -> HeatCell | None:
    mine = [
        r for r in records if r.plan_hash == row.plan_hash and (r.point["length"], r.point["depth"]) == (length, depth)
    ]
    shares = [share for r in mine for share in r.values.get("recall", r.values["hit"])]
    if not shares:
        return None
    text = f"{100 * fmean(shares):.0f}"
    hover = f"{length:,} tokens, depth {depth:.2g}: {text}% of {len(shares)} documents"
    return HeatCell(share=fmean(shares), text=text, hover=hover)
