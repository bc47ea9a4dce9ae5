"""Every error that kvtailor raises on purpose: what was asked for, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "ArgumentError",
    "CacheFileError",
    "CacheMisuse",
    "CalibrationError",
    "FileError",
    "KvtailorError",
    "MethodError",
    "ModelNotFound",
    "PlanError",
    "TierError",
    "UnknownName",
    "UnsupportedModel",
    "shown",
    "suggest",
]

_MOST_SHOWN = 1000
_MOST_TOLD = 4000
_MOST_FAULTS = 50


class KvtailorError(Exception):
    """Base of all errors raised on purpose, so that one `except` catches them and nothing else."""


class PlanError(KvtailorError, ValueError):
    """A plan that cannot be run. Holds all of its faults at once, each a whole sentence.

    The message has the first 50, and the beginning of one that is very long.

    Attributes:
        faults: the sentences, in the order in which a reader of the plan meets them.
    """

    def __init__(self, plan: str, faults: Sequence[str]):
        self.faults = tuple(faults)
        head = f"the plan {shown(plan)} has {len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}:"
        told = [
            fault if len(fault) <= _MOST_TOLD else f"{fault[:_MOST_TOLD]} ..." for fault in self.faults[:_MOST_FAULTS]
        ]
        more = [f"and {len(self.faults) - len(told)} more"] if len(self.faults) > len(told) else []
        super().__init__("\n  - ".join([head, *told, *more]))


class ArgumentError(KvtailorError, ValueError, TypeError):
    """An argument of a function that is missing, too much, of another kind, or a number that cannot be."""


class UnknownName(KvtailorError, LookupError):
    """A name that does not exist; carries the nearest names that do."""

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        self.name = name
        super().__init__(f"there is no {kind} named {shown(name)}{suggest(name, known)}")


class ModelNotFound(KvtailorError, FileNotFoundError, ConnectionError):
    """A model that is not on this disk and cannot be had, or whose files cannot be read as one; names the place."""


class UnsupportedModel(KvtailorError, ValueError):
    """A model, or a way of loading it, that kvtailor refuses before any work."""


class CalibrationError(KvtailorError, ValueError):
    """A calibration file that is not there, is of another kind, or was made for another model."""


class CacheMisuse(KvtailorError, RuntimeError):
    """A cache used in a way that would give a silently wrong answer."""


class MethodError(KvtailorError, TypeError):
    """A method that returned something else than its contract promises; names the method."""


class CacheFileError(CacheMisuse):
    """A file of a saved cache that cannot be written, is damaged, or is not of this model; names the file."""


class FileError(KvtailorError, OSError):
    """A file that cannot be read or written, is no regular file, or is not as it was written; names the file."""


class TierError(KvtailorError, RuntimeError):
    """A tier that cannot hold what it was given, or cannot give back what it holds; names the file."""


def shown(text: object) -> str:
    """A text that a user gave, in quotes; of a long one the beginning, the end, and how long it is."""
    if not isinstance(text, str):
        return shown(repr(text))[1:-1]
    if len(text) <= _MOST_SHOWN:
        return repr(text)
    return f"{text[:200]!r} ... {text[-40:]!r} ({len(text)} characters)"


def suggest(name: object, known: Iterable[str], limit: int = 3) -> str:
    """The tail of a message about an unknown name: near names if any, else all of them."""
    names = sorted(known)
    whole = isinstance(name, str) and len(name) <= _MOST_SHOWN
    lower = {each.lower(): each for each in reversed(names)}
    near = difflib.get_close_matches(str(name), names, n=limit, cutoff=0.5) if whole else []
    if whole and not near:
        near = [lower[each] for each in difflib.get_close_matches(str(name).lower(), lower, n=limit, cutoff=0.5)]
    if near:
        return "; did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "; known: " + ", ".join(names) if names else ""
