"""The text that a check measures on where none is given, and how a text is parted.

`page.txt` has passages of eight books that were first published by 1928, public domain in the United States: Ernest
Shackleton, South!; Nellie Bly, Ten Days in a Mad-House; Ralph Waldo Emerson, Essays; Mary Austin, The Land of Little
Rain; Charles Sternberg, The Life of a Fossil Hunter; Rudyard Kipling, Kim; Charlotte Bronte, Villette; Liliuokalani,
Hawaii's Story. Nothing else in the project is measured on them: no table, no verdict, no preset was chosen by them. The
embedded models were trained on these books among others.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from kvtailor.bench.build import Text
from kvtailor.ops.files import read_text

__all__ = ["BETWEEN", "PAGE", "page", "parted"]

PAGE = "eight books in the package"
"""The name of the page in records."""
BETWEEN = "\n\n\n"
"""What stands between passages."""
_FIRST = 3 / 8


def page() -> str:
    """Return the page, its passages with two empty lines between."""
    return read_text(Path(__file__).parent / "page.txt")


def parted(text: str, source: str) -> tuple[Text, Text]:
    """Return the first three eighths of a text and the rest, cut between its passages where it has some.

    Args:
        text: passages have two empty lines between; a text without any is one.
        source: its name in records.
    """
    passages = text.split(BETWEEN)
    if len(passages) >= 5:
        cut = max(1, round(_FIRST * len(passages)))
        first, rest = passages[:cut], passages[cut:]
    else:
        at = text.find(" ", round(_FIRST * len(text)))
        at = len(text) if at < 0 else at
        first, rest = [text[:at]], [text[at:]]
    return _text(first, f"{source}, 1 of 2"), _text(rest, f"{source}, 2 of 2")


def _text(passages: list[str], source: str) -> Text:
    starts = accumulate((len(each) + len(BETWEEN) for each in passages[:-1]), initial=0)
    # One passage is no document: windows of it count as one each.
    return Text(BETWEEN.join(passages), source, None, tuple(starts) if len(passages) > 1 else ())
