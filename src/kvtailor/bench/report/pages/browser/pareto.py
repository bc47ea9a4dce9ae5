"""The chart of bytes against loss with its fields, as the pages of a run and of a fit both have it."""

from __future__ import annotations

import json
import re

from kvtailor.bench.report.pages.html import quoted

__all__ = ["canvas", "embedded", "filter_fields", "form", "memory_fields", "short_name"]

_LONGEST_NAME = 30


def form(*parts: str) -> str:
    """Return the form above the chart; `choice.js` reads its fields by their ids.

    Args:
        parts: HTML of its fields, such as `memory_fields` and `filter_fields`.
    """
    return f'<form class="tools" id="tools" autocomplete="off">{"".join(parts)}</form>'


def memory_fields(note: str) -> str:
    """Return the fields of the reader's memory, and the place of the best plan in it.

    Args:
        note: what a memory is of, and in which spellings, one sentence or two.
    """
    return (
        '<div class="mine"><label for="memory">My memory is</label>'
        '<input id="memory" type="text" inputmode="text" spellcheck="false" aria-describedby="memory-note" '
        'placeholder="300KiB, 2GiB, 25%">'
        '<input id="slide" type="range" min="0" max="250" step="1" value="250" aria-label="my memory, as a slider">'
        f'</div><p id="memory-note" class="dim">{note}</p>'
        '<div id="pick" class="pick" aria-live="polite"></div>'
    )


def filter_fields(words: str, boxes: str = "") -> str:
    """Return the filter of plans.

    Args:
        words: an example of words that plans are found by.
        boxes: HTML of further boxes.
    """
    return (
        f'<div class="filter"><input id="find" type="search" placeholder="words, such as: {quoted(words)}" '
        f'aria-label="show plans with these words">{boxes}'
        '<label><input type="checkbox" id="front-only">the front alone</label>'
        '<button type="button" id="every">show all</button>'
        '<span id="count" class="dim" aria-live="polite"></span></div>'
    )


def canvas(title: str, *, drawn: str = "", otherwise: str) -> str:
    """Return the place that `chart.js` draws into.

    Args:
        title: what the chart shows.
        drawn: a picture that stands there without scripts, as SVG; empty: none.
        otherwise: what a reader without scripts must know.
    """
    picture = (
        drawn.replace("<svg ", '<svg id="chart" ', 1)
        if drawn
        else (f'<svg id="chart" role="group" aria-label="{quoted(title)}"></svg>')
    )
    return (
        f'<figure class="pareto"><div class="canvas">{picture}<div id="tip" role="status" hidden></div></div>'
        f"<noscript><p>{otherwise}</p></noscript></figure>"
    )


def embedded(name: str, data: object) -> str:
    """Return data as JSON in a script element that no browser runs.

    Args:
        name: id of the element.
        data: of values that JSON has; NaN and infinities are none.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    # No "</script>" of a plan or a label may end the script; U+2028 and U+2029 are safe in JSON that is parsed.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace("&", "\\u0026")
    return f'<script type="application/json" id="{quoted(name)}">{text}</script>'


def short_name(label: str) -> str:
    """Return a plan's methods without their settings, for where there is little space; a preset's name as it is."""
    bare = label.split(" @ ")[0]
    while (inner := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = inner
    return bare if len(bare) <= _LONGEST_NAME else bare[: _LONGEST_NAME - 1].rstrip(" +") + "…"
