"""What Ctrl-C leaves: one sentence, and no traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtailor.cli.words.lines import say

__all__ = ["kept_in", "stopped"]

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
