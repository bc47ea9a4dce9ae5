"""How far a fit is: what it tells whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kvtailor.bench.schema import Record

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """What a fit tells of how far it is."""

    def stage(self, name: str, steps: int) -> Any:
        """Return a context around a stage of at most so many steps; it gives the function to call after each."""

    def finish(self, record: Record) -> None:
        """A record is there."""


class Silent:
    """Tells nothing."""

    @contextmanager
    def stage(self, name: str, steps: int) -> Iterator[Callable[[str], None]]:
        yield lambda label: None

    def finish(self, record: Record) -> None:
        """Nothing."""
