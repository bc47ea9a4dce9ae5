"""The command line under torchrun: every process runs it, and the first one speaks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["mute_others", "refusal", "under_torchrun"]

# Verbs that share a model among processes, and those that run alike in each and need no other.
_SHARING, _ALIKE = ("run", "bench"), ("ls", "show")


def under_torchrun() -> bool:
    """Return whether torchrun started this program in several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def refusal(words: Sequence[str]) -> str | None:
    """Why a verb cannot run in several processes, a sentence; None: it can, or there is one process.

    Args:
        words: of the command line, the verb first.
    """
    verb = words[0]
    if not under_torchrun() or verb in (*_SHARING, *_ALIKE) or verb.startswith("-"):
        return None
    return (
        f"{verb} runs in one process, and torchrun started {os.environ['WORLD_SIZE']}: call `kvtailor {verb}` without "
        f"torchrun. {' and '.join(_SHARING)} share a model among processes"
    )


def mute_others() -> None:
    """Let the first process alone print. Errors that nobody expected are still printed by all."""
    if not under_torchrun() or os.environ.get("RANK", "0") == "0":
        return
    nothing, errors = open(os.devnull, "w", encoding="utf-8"), sys.stderr  # noqa: SIM115
    hook = sys.excepthook

    def told(kind: Any, error: Any, trace: Any) -> None:
        sys.stderr = errors
        hook(kind, error, trace)

    sys.stdout = sys.stderr = nothing
    sys.excepthook = told
