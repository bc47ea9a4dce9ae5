"""Every error that kvtailor raises on purpose: what was asked, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "CacheFileError",
    "CacheMisuse",
    "CalibrationError",
    "KvtailorError",
    "MethodError",
    "PlanError",
    "TierError",
    "UnknownName",
    "UnsupportedModel",
    "suggest",
]


class KvtailorError(Exception):
    """Base of all errors raised on purpose, so that one `except` catches them and nothing else."""


class PlanError(KvtailorError, ValueError):
    """A plan that cannot be run. Holds all of its faults at once, each a whole sentence.

    Attributes:
        faults: the sentences, in the order in which a reader of the plan meets them.
    """

    def __init__(self, plan: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        head = f"the plan {plan!r} has {len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}:"
        super().__init__("\n  - ".join([head, *self.faults]))


class UnknownName(KvtailorError, LookupError):
    """A name that no room knows; carries the nearest names that exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        self.name = name
        super().__init__(f"there is no {kind} named {name!r}{suggest(name, known)}")


class UnsupportedModel(KvtailorError, ValueError):
    """A model, or a way of loading it, that kvtailor refuses before any work."""


class CalibrationError(KvtailorError, ValueError):
    """A calibration file that is not there, is something else than was asked for, or was made for another model."""


class CacheMisuse(KvtailorError, RuntimeError):
    """A cache used in a way that would give a silently wrong answer."""


class MethodError(KvtailorError, TypeError):
    """A method that returned something else than its contract promises; names the method."""


class CacheFileError(CacheMisuse):
    """A file of a saved cache that cannot be written, is damaged, or is not of this model; names the file."""


class TierError(KvtailorError, RuntimeError):
    """A tier that cannot hold what it was given, or cannot give back what it holds; names the file."""


def suggest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """The tail of a message about an unknown name: near names if any, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "; known: " + ", ".join(names) if names else ""
