"""The PLAN that a verb gets: one line, as one shell word or several, or a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtailor.errors import KvtailorError

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["read_plan"]


def read_plan(words: tuple[str, ...]) -> Plan:
    """The plan.

    Raises:
        PlanError: with all faults at once.
        KvtailorError: the TOML file cannot be read.
    """
    from kvtailor.ops.files import read_toml
    from kvtailor.plan import Plan

    text = " ".join(words)
    if not text.strip().endswith(".toml"):
        return Plan.parse(text)
    try:
        return Plan.from_toml(read_toml(Path(text.strip()).expanduser()))
    except OSError as error:
        raise KvtailorError(f"the plan file {text.strip()} cannot be read: {error}") from error
