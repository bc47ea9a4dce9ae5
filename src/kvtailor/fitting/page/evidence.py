"""The parts behind the plans: maps of layers, sums of losses, sizes, other engines, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from kvtailor.bench.report.pages.html import quoted
from kvtailor.bench.report.words import byte_text, significant
from kvtailor.encode.contract import CodecContext
from kvtailor.errors import KvtailorError
from kvtailor.fitting.layers import PLAIN, LayerMap
from kvtailor.fitting.page.reads import Answer
from kvtailor.fitting.page.words import DASH, cell, head, percent, section, table
from kvtailor.plan import Plan

__all__ = ["evidence"]

_FULLEST = 85  # percent of the accent in the darkest cell: dark text stays readable on it
_DARK_TEXT = 60


def evidence(found: Answer) -> Iterator[str]:
    """Return the parts in their order; a part without numbers is a sentence."""
    yield _sensitivity(found)
    yield _tokens(found)
    yield _additivity(found)
    yield _sizes(found)
    yield _engines(found)
    if found.regret is not None:
        note = "What a choice by text alone would have cost in right answers."
        yield section("regret", "Regret", f"<p>{escape(found.regret)}</p>", kind="unseen", note=note)
    if found.notes:
        items = "".join(f"<li>{escape(each)}</li>" for each in found.notes)
        yield section("notes", "Notes", f"<ul>{items}</ul>")
    yield _measured(found)


def _sensitivity(found: Answer) -> str:
    title = "What each layer loses by itself"
    layers = found.layers
    if layers is None:
        return section("layers", title, "<p>Stage 1 did not run, so no layer was measured by itself.</p>")
    every = [*_flat(layers.keys), *_flat(layers.values), *(value for groups in layers.kept for value in _flat(groups))]
    shade = _log_shade(every)
    widths = [f"{width} bits" for width in layers.widths[1:]]
    maps = [
        _heat(name, f"{name}: bits of an element", widths, _rows(side), shade, "layer")
        for name, side in (("keys", layers.keys), ("values", layers.values))
        if widths
    ]
    shares = [f"{100 * share:g} %" for share in layers.shares[1:]]
    if shares:
        caption = f"share of the tokens kept by {layers.score}"
        maps.append(_heat("kept", caption, shares, _kept(layers), shade, "layer"))
    note = (
        "Nats per token, KL to the full cache, where that layer alone is compressed in that way. The mean of "
        f"{layers.pieces} pieces. Darker loses more; one logarithmic scale for all maps. Layers are counted from 0 "
        f"over those that are compressed. {'Unencoded' if layers.widths[:1] == (PLAIN,) else 'The first width'} and "
        "all tokens kept lose nothing by definition, and are left out."
    )
    return section("layers", title, f'<div class="heats">{"".join(maps)}</div>', kind="search", note=escape(note))


def _kept(layers: LayerMap) -> list[tuple[str, Sequence[float]]]:
    if all(len(groups) == 1 for groups in layers.kept):
        return [(str(layer), groups[0][1:]) for layer, groups in enumerate(layers.kept)]
    return [
        (f"{layer}, head {group}", row[1:])
        for layer, groups in enumerate(layers.kept)
        for group, row in enumerate(groups)
    ]


def _rows(side: Sequence[Sequence[float]]) -> list[tuple[str, Sequence[float]]]:
    return [(str(layer), row[1:]) for layer, row in enumerate(side)]


def _flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _log_shade(values: Sequence[float]) -> Callable[[float], float]:
    """Return the function from a loss to how dark it is, 0 to 1, on a logarithmic scale over all losses."""
    above = [value for value in values if value > 0]
    low, high = (math.log(min(above)), math.log(max(above))) if above else (0.0, 0.0)

    def shade(value: float) -> float:
        if value <= 0:
            return 0.0
        return 0.05 + 0.95 * (math.log(value) - low) / (high - low) if high > low else 0.5

    return shade


def _heat(
    name: str,
    caption: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float]]],
    shade: Callable[[float], float],
    across: str,
) -> str:
    """A grid of losses as a table: the numbers stand in the cells, so that touch and print have them too."""
    heads = "".join(f'<th scope="col">{escape(each)}</th>' for each in columns)
    lines = []
    for label, row in rows:
        cells = []
        for column, value in zip(columns, row, strict=True):
            strength = round(_FULLEST * shade(value))
            kind = ' class="deep"' if strength >= _DARK_TEXT else ""
            hover = f"layer {label}, {name}, {column}: {value:.6g} nats per token"
            cells.append(f'<td{kind} style="--h:{strength}" title="{quoted(hover)}">{_brief(value)}</td>')
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(cells)}</tr>')
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="wide tall" tabindex="0" role="region" '
        f'aria-label="{quoted(caption)}"><table class="heat" id="heat-{name}"><thead><tr><th scope="col">'
        f"{escape(across)}</th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></figure>"
    )


def _brief(value: float) -> str:
    """Two figures in as little space as possible: 0.012, 3.1e-5."""
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.2g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def _tokens(found: Answer) -> str:
    """What each layer and head holds under the plan."""
    title = "What each layer got"
    held, codecs = found.tokens_by_head, _codecs(found)
    if not held:
        return section("tokens", title, "<p>How many tokens each layer and head holds was not measured.</p>")
    total = sum(sum(row) for row in held)
    most = max((sum(row) for row in held), default=0.0) or 1.0
    top = max((value for row in held for value in row), default=0.0) or 1.0
    count = max(len(row) for row in held)
    heads = [head("layer"), head("stored as", left=True), head("share of all tokens held"), head("tokens", "mean head")]
    heads += [head(f"head {number}") for number in range(count)]
    rows = []
    for layer, row in enumerate(held):
        share = sum(row) / total if total else 0.0
        bar = f'<span class="bar" style="width:{100 * sum(row) / most:.1f}%"></span>'
        cells = [
            cell(str(layer), layer),
            cell(codecs[layer] if codecs is not None and layer < len(codecs) else None, kind="name"),
            f'<td class="barred" data-value="{share!r}">{bar}<span>{100 * share:.1f} %</span></td>',
            cell(f"{sum(row) / len(row):,.1f}".removesuffix(".0") if row else None, sum(row) / max(1, len(row))),
        ]
        for value in row:
            strength = round(_FULLEST * value / top)
            deep = " deep" if strength >= _DARK_TEXT else ""
            hover = f"layer {layer}: {value:g} of {found.question.context} tokens"
            cells.append(
                f'<td class="shade{deep}" style="--h:{strength}" data-value="{value!r}" title="{quoted(hover)}">'
                f"{value:,.0f}</td>"
            )
        cells += [cell(None)] * (count - len(row))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = (
        f"Tokens that the plan held of one row's {found.question.context:,} after the prompt, by layer and kv head, as "
        "measured in the proof. Bytes are recorded for the whole cache only; what a layer's tokens are stored as is "
        "the plan's own setting."
    )
    shown = table("tokens", "tokens by layer and head", heads, rows, tall=True)
    return section("tokens", title, shown, kind="unseen", note=escape(note))


def _codecs(found: Answer) -> list[str] | None:
    """What each layer is stored as, in the plan language; None where the plan has another number of layers."""
    count = len(found.tokens_by_head)
    codec = Plan.parse(found.plan).encode
    try:
        each = [codec.for_layer(CodecContext(layer=layer, layers=count)) for layer in range(count)]
    except (KvtailorError, ValueError, IndexError):
        return None
    return ["as it is" if own.exact else str(Plan(encode=own)) for own in each]


def _additivity(found: Answer) -> str:
    title = "Do the losses of layers add up?"
    added = found.additivity
    if added is None:
        why = "stage 1 did not run" if found.layers is None else "there is no optimum of stage 1 for this question"
        return section("additivity", title, f"<p>Not measured: {why}.</p>")
    ratio = DASH if added.ratio is None else f"{significant(added.ratio)} times"
    count = "" if found.layers is None else f", the mean of {found.layers.pieces} pieces"
    body = (
        '<dl class="facts">'
        f"<div><dt>sum of its layers' losses</dt><dd>{significant(added.predicted)}</dd></div>"
        f"<div><dt>measured</dt><dd>{significant(added.measured)}</dd></div>"
        f"<div><dt>measured is</dt><dd>{ratio}</dd></div></dl>"
        f'<p class="dim">Nats per token{count}, of the optimum of stage 1: <code>{escape(added.plan)}</code></p>'
    )
    note = "Stage 1 assumes that the losses of layers, each measured alone, add up. This is how far they do."
    return section("additivity", title, body, kind="search", note=note)


def _sizes(found: Answer) -> str:
    title = "The plan at other contexts and batches"
    if not found.sizes:
        return section("sizes", title, "<p>No other sizes were computed.</p>")
    known = {(context, batch): (size, full) for context, batch, size, full in found.sizes}
    contexts, batches = sorted({each[0] for each in known}), sorted({each[1] for each in known})
    rows = []
    for context in contexts:
        cells = [cell(f"{context:,}", context)]
        for batch in batches:
            size = known.get((context, batch))
            shown = None if size is None else f"{percent(*size)} of {byte_text(size[1])}"
            cells.append(cell(None) if size is None else cell(byte_text(size[0]), size[0], shown))
        asked = "asked" if context == found.question.context else ""
        rows.append(f'<tr class="{asked}">{"".join(cells)}</tr>')
    heads = [head("tokens"), *(head(f"{batch:,} row{'s' if batch > 1 else ''}") for batch in batches)]
    note = "From closed forms, with the same plan. What it loses at another context was not measured."
    return section("sizes", title, table("sizes", title, heads, rows), kind="computed", note=note)


def _engines(found: Answer) -> str:
    rows = [
        f"<tr>{cell(each.engine, kind='name')}"
        f'<td class="name" data-value="">{_code(each.setting)}</td>'
        f"{cell(each.lacks or DASH, each.lacks, kind='name')}</tr>"
        for each in found.engines
    ]
    heads = [head("engine", left=True), head("nearest setting", left=True), head("what it lacks", left=True)]
    note = (
        "A neighbour of the plan and not the plan: nothing of what was measured here is true of it. A dash under "
        "'nearest setting': that engine has none that comes near."
    )
    shown = table("engines", "nearest settings of other engines", heads, rows)
    return section("engines", "Nearest settings of other engines", shown, kind="documented", note=note)


def _code(text: str | None) -> str:
    return DASH if text is None else f"<code>{escape(text)}</code>"


def _measured(found: Answer) -> str:
    facts = [(name, f"{count:,}") for name, count in found.counts.items()]
    facts.append(("seconds in all", DASH if found.seconds is None else f"{found.seconds:,.1f}"))
    facts += [("effort", found.effort), ("random state", str(found.state)), ("dtype", found.dtype)]
    body = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return section("measured", "What was measured", f'<dl class="facts">{body}</dl>')
