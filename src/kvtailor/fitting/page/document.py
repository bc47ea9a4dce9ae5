"""One self-contained HTML page of a fit: no other file, no request, light and dark, on paper and on a phone."""

from __future__ import annotations

from collections import Counter
from html import escape
from importlib.resources import files

from kvtailor.bench.report.pages.browser.pareto import canvas, embedded, filter_fields, form, memory_fields
from kvtailor.bench.report.pages.html import quoted
from kvtailor.bench.report.pages.style import browser_text, style
from kvtailor.bench.report.words import byte_text, milliseconds
from kvtailor.fitting.page.evidence import evidence
from kvtailor.fitting.page.plans import data, drawable, front_table, proof_table
from kvtailor.fitting.page.reads import Answer
from kvtailor.fitting.page.words import DASH, ORIGINS, badge, in_words, interval, percent, section

__all__ = ["page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser itself refuses any request that the page would make."""
_SHAPES = {
    "layers": "M1.5 7a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0z",
    "words": "M7 .5L13.5 7L7 13.5L.5 7z",
    "preset": "M7 1L13.5 12.5H.5z",
}
_SQUARE = "M2 2H12V12H2z"


def page(found: Answer) -> str:
    """Return the page of a fit.

    Args:
        found: a `fitting.result.Fit`.
    """
    title = f"{found.model}: {in_words(found)}"
    parts = [
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="dim">{escape(found.dtype)}; the uncompressed cache has {byte_text(found.full)} at this load.</p>'
        "</header>",
        _answer(found),
        _front(found),
        _proof(found),
        *evidence(found),
    ]
    scripts = [*map(browser_text, ("sorting.js", "chart.js", "choice.js")), _own_text("page.js")]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{quoted(_POLICY)}"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style('pareto.css')}{_own_text('page.css')}</style></head>\n"
        f"<body><main>{''.join(parts)}</main>"
        f"{embedded('fit-data', data(found))}"
        f"<script>{''.join(scripts)}</script></body></html>\n"
    )


def _own_text(name: str) -> str:
    return (files("kvtailor.fitting.page") / name).read_text(encoding="utf-8")


def _answer(found: Answer) -> str:
    """The verdict, its numbers, and the plan in four spellings."""
    chosen = found.chosen
    middle = (chosen.seconds or {}).get("median")
    facts = [
        ("bytes", f"{byte_text(chosen.bytes)}, {percent(chosen.bytes, found.full)}"),
        ("loss on unseen text", f"{interval(chosen.loss)} nats" if chosen.nll else DASH),
        ("right answers", f"{chosen.right} of {chosen.asked}" if chosen.asked else DASH),
        ("a decoded token", DASH if middle is None else f"{milliseconds(middle)} ms"),
    ]
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    command = f"kvtailor run --model {found.model} --plan fitted.toml"
    spellings = [
        ("plan", "The plan", found.plan),
        ("python", "Python", found.python),
        ("command", "Command line", command),
    ]
    lines = "".join(_copied(*each) for each in spellings)
    lines += f"<details><summary>TOML, as in fitted.toml</summary>{_copied('toml', 'TOML', found.toml())}</details>"
    return (
        f'<section id="answer"><p class="verdict">{escape(found.sentence)} {badge("unseen")}</p>'
        f'<dl class="facts">{shown}</dl>{lines}</section>'
    )


def _copied(name: str, title: str, text: str) -> str:
    """Text with a button that copies it."""
    return (
        f'<div class="copied"><span class="what">{escape(title)}</span>'
        f'<pre id="copy-{name}" tabindex="0" aria-label="{quoted(title)}">{escape(text)}</pre>'
        f'<button type="button" data-copy="copy-{name}" aria-label="copy: {quoted(title)}">copy</button></div>'
    )


def _front(found: Answer) -> str:
    if not found.front:
        return section("front", "Every choice", "<p>The search measured no plan at several memories.</p>")
    origins = Counter(each.origin for each in found.front)
    order = [each for each in ORIGINS if each in origins] + sorted(set(origins) - set(ORIGINS))
    boxes = "".join(
        f'<label><input type="checkbox" name="origin" value="{quoted(each)}" checked>{_key(each)}'
        f"{escape(ORIGINS.get(each, each))} ({origins[each]})</label>"
        for each in order
    )
    missing = ""
    if lacking := sum(not drawable(each) for each in found.front):
        missing = f" {lacking} plans of the table have no bytes or no finite loss, so they are not in the picture."
    if found.plan not in {each.plan for each in found.front}:
        missing += " The plan itself was measured by the proof alone, so it is not among these points."
    note = (
        "Bytes against loss, of plans that were measured on the pieces of the search; bars are 95 % intervals. The "
        "line joins the front: no other plan has fewer bytes and loses less. The search chose among these plans by "
        "these very numbers, so the proof below is what counts." + missing
    )
    size = "Of the whole cache at this load: such as 300KiB, 1.5MiB, 2GiB or 25%."
    title = "bytes against loss; arrow keys go from plan to plan"
    body = (
        form(memory_fields(size), filter_fields("snapkv kivi", boxes))
        + canvas(title, otherwise="The picture needs scripts; every number of it is in the table below.")
        + front_table(found)
    )
    return section("front", "Every choice: bytes against loss", body, kind="search", note=escape(note))


def _key(origin: str) -> str:
    """An origin's shape and colour, as in the chart."""
    path = _SHAPES.get(origin, _SQUARE)
    return f'<svg class="key o-{quoted(origin)}" viewBox="0 0 14 14" aria-hidden="true"><path d="{path}"/></svg>'


def _proof(found: Answer) -> str:
    windows = max((len(each.nll) for each in found.proof), default=0)
    note = (
        f"The best few and the best presets, on {windows} windows of text and on documents that the search never saw. "
        "All plans have the same windows, so that their losses are compared in pairs. A family of "
        "questions is 'seen' where the search had other documents of it; below its right answers are the nats per "
        "token of the answers. In 'the plan minus this one' a number below 0 "
        "means that the plan loses less; 'not told apart' means that the interval has 0 in it."
    )
    needed = ""
    if found.needed is not None:
        needed = f"<p>About {found.needed:,} windows would tell the plan from the best preset.</p>"
    return section("proof", "The proof", needed + proof_table(found), kind="unseen", note=note)
