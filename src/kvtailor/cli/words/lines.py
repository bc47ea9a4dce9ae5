"""Lines that fit a terminal: sentences are wrapped at its width, and what cannot be parted stays whole."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

import click

__all__ = ["columns", "say", "wrapped"]

_LEAST = 40


def columns(*, err: bool = False) -> int | None:
    """Return the columns of the terminal, or what COLUMNS has; None where the output goes to a file or a program.

    Such output keeps a sentence on one line, so that it can be searched.
    """
    stream = sys.stderr if err else sys.stdout
    if not os.environ.get("COLUMNS", "").isdecimal() and not stream.isatty():
        return None
    return max(_LEAST, shutil.get_terminal_size((80, 24)).columns)


def wrapped(line: str, most: int, hang: int | None = None) -> str:
    """Return a line in as many as its width needs.

    A word that is longer than a line, such as a path, stays whole, so that it can be copied.

    Args:
        line: without a line break; its leading blanks stay.
        most: columns that a line may have.
        hang: blanks before further lines; None: two more than before the first.
    """
    if len(line) <= most:
        return line
    lead = len(line) - len(line.lstrip(" "))
    further = " " * (lead + 2 if hang is None else hang)
    return textwrap.fill(
        line.lstrip(" "), most, initial_indent=" " * lead, subsequent_indent=further, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def say(text: str, *, hang: int | None = None, bold: bool = False, err: bool = False) -> None:
    """Print lines, each wrapped at the terminal's width; see `columns` and `wrapped`."""
    most = columns(err=err)
    for line in text.split("\n"):
        click.secho(line if most is None else wrapped(line, most, hang), bold=bold or None, err=err)
