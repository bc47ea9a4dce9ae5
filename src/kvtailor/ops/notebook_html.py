"""Small tables as HTML, for what a notebook shows of a plan, a cache or a result (`_repr_html_`).

No script, no style sheet and no colour of our own: the notebook's theme decides, light or dark. Every text is escaped,
so that a plan's name or a file's name can never become HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Share", "Shown", "Strong", "html_block", "html_table"]

_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"
# A bar that keeps the colour of the text around it.
_BAR = "display:inline-block;height:.6em;margin-left:6px;background:currentColor;opacity:.45"
_WIDEST = 120  # pixels


@dataclass(frozen=True)
class Strong:
    """A cell in bold type."""

    text: str


@dataclass(frozen=True)
class Share:
    """A cell with a bar behind its text.

    Attributes:
        text: what is written.
        share: of the longest bar, 0 to 1; what is above 1 is drawn as 1.
    """

    text: str
    share: float


Shown = str | Strong | Share | None
"""What a cell of a table holds; None: not known, shown as a dash."""


def html_table(rows: Iterable[Sequence[Shown]], heads: Sequence[str] = ()) -> str:
    """Return a table; None is a dash, line breaks stay.

    Args:
        rows: of cells.
        heads: of the columns; none: no line of heads.
    """
    top = "".join(f'<th scope="col" style="{_CELL}">{_lines(head)}</th>' for head in heads)
    body = "".join(f"<tr>{''.join(_cell(each) for each in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>"


def html_block(title: str, *parts: str, lead: str = "", notes: Sequence[str] = ()) -> str:
    """Return a title in code type, a sentence in bold type, parts that are HTML already, and notes behind a line that
    opens.
    """
    small = "".join(f"<li>{_lines(note)}</li>" for note in notes)
    words = f"{len(notes)} note{'s' if len(notes) != 1 else ''}"
    more = f"<details><summary>{words}</summary><ul>{small}</ul></details>" if notes else ""
    first = f"<p><strong>{_lines(lead)}</strong></p>" if lead else ""
    return f"<div><p><code>{_lines(title)}</code></p>{first}{''.join(parts)}{more}</div>"


def _cell(shown: Shown) -> str:
    if isinstance(shown, Strong):
        inner = f"<strong>{_lines(shown.text)}</strong>"
    elif isinstance(shown, Share):
        width = round(_WIDEST * min(1.0, max(0.0, shown.share)))
        inner = f'{_lines(shown.text)}<span style="{_BAR};width:{width}px"></span>'
    else:
        inner = "–" if shown is None else _lines(shown)
    return f'<td style="{_CELL}">{inner}</td>'


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
