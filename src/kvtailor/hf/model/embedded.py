"""The embedded models: their names, and where their files lie."""

from __future__ import annotations

from pathlib import Path

from kvtailor.errors import ArgumentError

__all__ = ["NAMES", "path"]

NAMES = ("demo", "demo-draft")
"""The embedded models, by the names under which they are loaded."""


def path(name: str = "demo") -> Path:
    """The folder of an embedded model: weights, tokenizer, model card.

    Raises:
        ArgumentError: ``name`` is not in `NAMES`.
    """
    if name not in NAMES:
        raise ArgumentError(f"asked for the embedded model {name!r}, but there are {', '.join(NAMES)}: use one of them")
    return Path(__file__).resolve().parents[2] / "demo" / "weights" / name
