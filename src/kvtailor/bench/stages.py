"""How far a work of several stages is, such as a fit or a check: what it tells whoever wants to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from kvtailor.bench.schema import Record

__all__ = ["Advance", "Progress", "Silent"]


class Advance(Protocol):
    """What is called after each step of a stage."""

    def __call__(self, label: str, skipped: int = 0) -> None:
        """Take that a step is done.

        Args:
            label: what ran.
            skipped: not a step: so many of the most that there could be are not needed.
        """


class Progress(Protocol):
    """What a fit or a check tells of how far it is."""

    def expect(self, stages: Mapping[str, int], seconds: float | None) -> None:
        """Take what comes, before the first stage: the most steps of each, in units of a plan on one piece.

        Args:
            stages: in their order; some of them may be left out later.
            seconds: that a unit takes here, as it was timed; None: not known.
        """

    def tell(self, sentence: str) -> None:
        """Take a sentence for whoever waits, such as the best plan so far."""

    def stage(self, name: str, steps: int) -> Any:
        """Return a context around a stage of at most so many steps; it gives the function to call after each."""

    def finish(self, record: Record) -> None:
        """A record is there."""


class Silent:
    """Tells nothing."""

    def expect(self, stages: Mapping[str, int], seconds: float | None) -> None:
        """Nothing."""

    def tell(self, sentence: str) -> None:
        """Nothing."""

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Advance]:
        yield lambda label, skipped=0: None

    def finish(self, record: Record) -> None:
        """Nothing."""
