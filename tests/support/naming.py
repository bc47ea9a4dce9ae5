"""Many small cases in one test, each with its name where it fails: a test of its own costs more than it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["named"]


@contextmanager
def named(*case: object) -> Iterator[None]:
    """What is raised inside says of which case it is."""
    try:
        yield
    except Exception as error:
        error.add_note("in the case " + ", ".join(map(str, case)))
        raise
