"""Lines that fit a terminal: sentences are wrapped at its width, and what cannot be parted stays whole.

What Ctrl-C leaves is one of them: one sentence, and no traceback.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import kvtailor

__all__ = ["begins_in", "columns", "formatted_warning", "kept_in", "python_lines", "say", "stopped", "wrapped"]

_LEAST = 40
_PACKAGE = Path(kvtailor.__file__).parent
_PLAIN_WARNING = warnings.formatwarning


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
        line.lstrip(" "),
        most,
        initial_indent=" " * lead,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str, *, hang: int | None = None, bold: bool = False, dim: bool = False, err: bool = False) -> None:
    """Print lines, each wrapped at the terminal's width; see `columns` and `wrapped`."""
    most = columns(err=err)
    for line in text.split("\n"):
        click.secho(line if most is None else wrapped(line, most, hang), bold=bold or None, dim=dim or None, err=err)


def python_lines(plan: str, most: int) -> list[str]:
    """Return the call of Python that makes a cache of a plan, parted as one may paste it.

    Args:
        plan: its text.
        most: columns that a line may have.
    """
    whole = f'cache = kvtailor.cache_for(model, "{plan}")'
    if len(whole) <= most:
        return [whole]
    # Blanks stay at the ends of the parts, so that Python joins them to the same text.
    parts = textwrap.wrap(plan, most - 6, break_long_words=False, break_on_hyphens=False, drop_whitespace=False)
    return ["cache = kvtailor.cache_for(", "    model,", *(f'    "{part}"' for part in parts), ")"]


def formatted_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as text, in the place of `warnings.formatwarning`.

    A warning of this package is a sentence for a user, so it has no path, no line of code and no name of a class.
    Warnings of other packages stay as Python writes them.
    """
    if not Path(filename).is_relative_to(_PACKAGE):
        return _PLAIN_WARNING(message, category, filename, lineno, line)
    most = columns(err=True)
    lines = f"warning: {message}".split("\n")
    return "\n".join(each if most is None else wrapped(each, most) for each in lines) + "\n"


_BY_INTERRUPT = 130


@contextmanager
def stopped(sentence: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C within into a sentence on standard error and exit status 130.

    Args:
        sentence: says what is kept; it is called when Ctrl-C comes.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(f"Stopped. {sentence()}", err=True)
        raise SystemExit(_BY_INTERRUPT) from None


def begins_in(folder: Path | None) -> str:
    """Return what a run says of its folder before its first step: `kept_in`, and what is there of other code."""
    from kvtailor.bench.runner import of_other_code

    return kept_in(folder) if folder is None else f"{kept_in(folder)} {of_other_code(folder)}".rstrip()


def kept_in(folder: Path | None) -> str:
    """Return what becomes of records that a run has written to a folder; None: it has none."""
    from kvtailor.bench.measure import machine

    if folder is None:
        return "Nothing is kept: with --out FOLDER the same command goes on where it was."
    if str(machine.versions()["commit"]).endswith("-dirty"):
        return (
            f"What was measured stays in {folder}, but the same command measures anew: files of this checkout of "
            "kvtailor are changed and not committed."
        )
    return f"What was measured stays in {folder}, and the same command goes on there."
