"""Counts the calls of Python functions of one package: the same at every run, and on Python 3.11 to 3.13.

Imports no torch, so that the count itself can be tried on any Python.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType

__all__ = ["count_calls"]

# A frame of such a function is entered again at each `yield`.
_RESUMED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


@contextmanager
def count_calls(package: str = "kvtailor") -> Iterator[Counter[str]]:
    """Within it, every call of a named function of a package is counted, by "module:function", in this thread.

    A function belongs to the package whose module has its globals, so that the `__init__` which a dataclass writes for
    itself counts as well. Not counted, since they differ between versions of Python: comprehensions (functions of their
    own before 3.12), lambdas with them, and what else a dataclass writes (3.13 compares in another way). A generator is
    counted once, however often it goes on. Garbage is not collected within it: a finaliser would be counted wherever
    the collector happens to run.
    """
    found: Counter[str] = Counter()
    begun: set[FrameType] = set()
    inside = f"{package}."

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module != package and not module.startswith(inside):
            return
        code = frame.f_code
        if code.co_name.startswith("<") or (code.co_filename.startswith("<") and code.co_name != "__init__"):
            return
        if code.co_flags & _RESUMED:
            if frame in begun:
                return
            begun.add(frame)
        found[f"{module}:{code.co_qualname}"] += 1

    before, collecting = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
