"""What "bytes" means on the page of a run: one definition, and how the other sizes of its tables differ from it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvtailor.bench.report.tables.grid import Grid

__all__ = ["sizes"]

_HELD = (
    "Bytes without another word are bytes held, in tables, charts, the verdict and the memory above: every storage of "
    "a plan's whole cache, each counted once, read when the cache was weighed. Codes, scales, indices and the tail in "
    "full precision are all in it. In percent it is over the keys and values of the same tokens without compression, "
    "so that 'full' has 100."
)
_OTHERS: tuple[tuple[str, str, str], ...] = (
    (
        "plans",
        "tokens held",
        "How many tokens still have keys and values: a plan with fewer tokens, or with fewer bits "
        "for each, has fewer bytes, and the two shares are not the same.",
    ),
    (
        "memory",
        "resident",
        "How much memory a fresh process grew for each cache that it holds, by the operating system "
        "and not by our count. It checks bytes held.",
    ),
    (
        "memory",
        "peak, prefill",
        "The highest memory of that process in one prefill, above what it held before: the "
        "cache and all that the prefill works with. A small cache may have a high peak.",
    ),
    ("memory", "peak, decode", "The same while it decodes after that prefill."),
    ("capacity", "memory", "The memory that a batch or a context was fitted into."),
    ("capacity", "one more token", "How many bytes the cache grows for one more token."),
    ("speculation", "on the device", "All caches that are at work at once, those of the drafts included."),
    ("speculation", "plain, on the device", "The same without a draft."),
)


def sizes(grids: Sequence[Grid]) -> str:
    """Return the definition as HTML, with the other sizes that these tables have.

    Args:
        grids: the tables of the page.
    """
    heads = {grid.name: grid.heads for grid in grids}
    titles = {grid.name: grid.title for grid in grids}
    found = [
        f"<div><dt>{escape(head)}, in {escape(titles[name])}</dt><dd>{escape(meaning)}</dd></div>"
        for name, head, meaning in _OTHERS
        if head in heads.get(name, ())
    ]
    others = f'<p>These are something else:</p><dl class="sizes">{"".join(found)}</dl>' if found else ""
    return f"<p>{escape(_HELD)}</p>{others}"
