"""The plans of a fit: their numbers, the table of the front, the table of the proof, and what the script reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from statistics import fmean
from typing import Any

from kvtailor.bench.report.pages.browser.pareto import short_name
from kvtailor.bench.report.pages.html import quoted
from kvtailor.bench.report.words import byte_text, milliseconds, significant
from kvtailor.fitting.page.reads import Answer, Measurement
from kvtailor.fitting.page.words import ORIGINS, cell, ends, head, interval, percent, table
from kvtailor.fitting.verdict import Family, Judged
from kvtailor.ops.sizes import bytes_of, write_bytes
from kvtailor.presets import FULL

__all__ = ["data", "drawable", "front_table", "numbers", "proof_table"]


def numbers(found: Answer) -> dict[str, int]:
    """Each plan's number on the page: the front from the fewest bytes up, then what the proof alone measured."""
    order = [each.plan for each in sorted(found.front, key=lambda each: (each.bytes, each.loss.value))]
    order += [each.plan for each in found.proof if each.origin != FULL]
    return {plan: number for number, plan in enumerate(dict.fromkeys(order), 1)}


def data(found: Answer) -> dict[str, Any]:
    """Return what the script reads.

    Numbers are those of the fit, unrounded; the words beside them are those of the tables.
    """
    order = numbers(found)
    proved = {each.plan: each for each in found.proof if each.error is None}
    asked = found.question
    memory = asked.memory or found.chosen.bytes
    return {
        "full": found.full,
        "limit": asked.memory,
        "limit_text": None if asked.memory is None else byte_text(asked.memory),
        "loss_limit": asked.loss,
        "full_text": byte_text(found.full),
        "plan": found.plan,
        "plan_number": order[found.plan],
        "plan_bytes": found.chosen.bytes,
        "memory": memory,
        "memory_text": _spelled(memory),
        "points": [
            _point(each, found.full, order[each.plan], proved.get(each.plan))
            for each in sorted(found.front, key=lambda each: order[each.plan])
            if drawable(each)
        ],
    }


def drawable(each: Measurement) -> bool:
    """Whether a point has a place on two logarithmic axes: its bytes were measured, and its loss is a number."""
    ends = (each.loss.value, each.loss.low, each.loss.high)
    return each.bytes > 0 and all(math.isfinite(end) for end in ends if end is not None)


def front_table(found: Answer) -> str:
    """Every plan that the search measured on all of its pieces."""
    order = numbers(found)
    rows = []
    for each in sorted(found.front, key=lambda each: order[each.plan]):
        tag = "on the front" if each.best else ""
        cells = [
            cell(str(order[each.plan]), order[each.plan]),
            _name(each.plan, each.label, each.origin, tag, chosen=each.plan == found.plan),
            _bytes(each.bytes, found.full),
            cell(significant(each.loss.value), each.loss.value, ends(each.loss)),
            cell(str(each.loss.count), each.loss.count),
            cell(byte_text(each.memory), each.memory),
        ]
        rows.append(_row(each.plan, each.label, each.origin, "".join(cells), best=each.best))
    heads = [
        head("#"),
        head("plan", left=True),
        head("bytes", "% of the uncompressed"),
        head("loss", "KL on text, answers on top; nats per token, 95 %"),
        head("pieces"),
        head("made for"),
    ]
    return table("front", "all plans that the search measured", heads, rows, tall=True)


def proof_table(found: Answer) -> str:
    """The best few and the best presets on text and tasks that the search never saw."""
    order, chosen = numbers(found), found.chosen
    families = {family.name: family for each in found.proof for family in each.families}
    timed = any(each.seconds for each in found.proof)
    heads = [
        head("#"),
        head("plan", left=True),
        head("bytes", "% of the uncompressed"),
        head("loss", "nats per token more than full, 95 %"),
        head("the plan minus this one", "nats per token, paired; 95 % over all pairs of plans"),
        head("the plan is"),
        *(head(name, _family_note(family)) for name, family in families.items()),
        *([head("a token", "ms, median and quartiles")] if timed else []),
    ]
    rows = []
    for each in sorted(found.proof, key=lambda each: (each.origin != FULL, each is not chosen)):
        cells = [
            cell(*((str(order[each.plan]), order[each.plan]) if each.plan in order else (None,))),
            _name(each.plan, each.label, each.origin, "", chosen=each is chosen),
            _bytes(each.bytes, found.full),
            *_losses(found, each),
            *(_right(each, name) for name in families),
            *([_time(each.seconds)] if timed else []),
        ]
        kind = "full" if each.origin == FULL else "chosen" if each is chosen else ""
        rows.append(_row(each.plan, each.label, each.origin, "".join(cells), kind=kind))
    return table("proof", "the plans of the proof", heads, rows)


def _bytes(count: int, full: int) -> str:
    """Bytes and their share; no cache has 0, so that 0 stands for what was not measured."""
    return cell(byte_text(count), count, percent(count, full)) if count else cell(None)


def _losses(found: Answer, each: Judged) -> tuple[str, str, str]:
    """The loss, its paired difference, and what that says."""
    if each.error is not None:
        return cell(None, small=None), cell(None), cell(f"not measured: {each.error}", "", kind="name")
    if each.origin == FULL:
        return cell("reference", 0.0), cell(None), cell(None)
    loss = cell(significant(each.loss.value), each.loss.value, ends(each.loss)) if each.nll else cell(None)
    if each is found.chosen:
        return loss, cell(None), cell("the plan", "")
    difference = found.against.get(each.label)
    apart = cell(None)
    if difference is not None:
        apart = cell(significant(difference.value), difference.value, ends(difference))
    return loss, apart, cell(found.told.get(each.label))


def _right(each: Judged, name: str) -> str:
    own = next((family for family in each.families if family.name == name), None)
    if own is None or not own.hits:
        return cell(None)
    answers = f"{significant(fmean(own.nll))} nats" if own.nll else None
    return cell(f"{sum(own.hits):g} of {len(own.hits)}", fmean(own.hits), answers)


def _family_note(family: Family) -> str:
    seen = "seen family" if family.seen else "unseen family"
    return f"right answers, {seen}" + ("" if family.counts else "; not counted: full fails it")


def _time(seconds: Mapping[str, float | None] | None) -> str:
    middle = (seconds or {}).get("median")
    if seconds is None or middle is None:
        return cell(None)
    low, high = seconds.get("q1"), seconds.get("q3")
    quartiles = None if low is None or high is None else f"{milliseconds(low)} to {milliseconds(high)}"
    return cell(milliseconds(middle), middle, quartiles)


def _name(plan: str, label: str, origin: str, tag: str, *, chosen: bool) -> str:
    """The cell with a plan's name, its origin, and all of its text."""
    named = f"<b>{escape(label)}</b>" if label != plan else ""
    tags = [f' <span class="front-tag">{escape(each)}</span>' for each in ("the plan" if chosen else "", tag) if each]
    text = f"<code>{escape(plan)}</code>" if plan != label or plan != FULL else f"<code>{escape(label)}</code>"
    return (
        f'<td class="name" data-value="{quoted(label)}"><span class="origin o-{quoted(origin)}">'
        f"{escape(ORIGINS.get(origin, origin))}</span>{''.join(tags)}<br>{named} {text}</td>"
    )


def _row(plan: str, label: str, origin: str, cells: str, *, best: bool | None = None, kind: str = "") -> str:
    front = "" if best is None else f' data-best="{int(best)}"'
    words = f"{label} {plan} {ORIGINS.get(origin, origin)}".lower()
    return (
        f'<tr class="{kind}" data-plan="{quoted(plan)}" data-origin="{quoted(origin)}" data-find="{quoted(words)}"'
        f"{front}>{cells}</tr>"
    )


def _spelled(memory: int) -> str:
    """A size as a reader would write it, where that is exact."""
    try:
        exact = bytes_of(byte_text(memory)) == memory
    except ValueError:
        exact = False
    return byte_text(memory) if exact else write_bytes(memory)


def _point(each: Measurement, full: int, number: int, proved: Judged | None) -> dict[str, Any]:
    told = None
    if proved is not None and proved.nll:
        told = f"In the proof it loses {interval(proved.loss)} nats per token to the full cache, on unseen text."
    return {
        "number": number,
        "plan": each.plan,
        "label": each.label,
        "name": short_name(each.label),
        "origin": each.origin,
        "origin_text": ORIGINS.get(each.origin, each.origin),
        "bytes": each.bytes,
        "bytes_text": byte_text(each.bytes),
        "share_text": percent(each.bytes, full),
        "loss": each.loss.value,
        "low": each.loss.low,
        "high": each.loss.high,
        "loss_text": interval(each.loss),
        "pieces": each.loss.count,
        "best": each.best,
        "memory_text": byte_text(each.memory),
        "python": f'cache = kvtailor.cache_for(model, "{each.plan}")',
        "proof_text": told,
    }
