"""What a suite asks of its leaderboard: the budgets at which plans are ranked, and when a task says nothing.

[leaderboard]
title = "..."
budgets = [0.5, 0.25]      # shares of the uncompressed bytes
tolerance = 0.02           # a plan fits a budget whose bytes exceed it by no more than this part of it
least_right = 0.5          # a task says nothing where 'full' itself is right less often
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvtailor.errors import suggest

__all__ = ["Leaderboard", "read_leaderboard"]


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """How the rows of a suite's tables are ranked.

    Attributes:
        title: of the page.
        budgets: shares of the uncompressed bytes, from many to few.
        tolerance: a plan fits a budget where its bytes are at most `1 + tolerance` times that share.
        least_right: share of right answers that 'full' must reach in a task, else no plan is judged by it.
    """

    title: str
    budgets: tuple[float, ...]
    tolerance: float = 0.02
    least_right: float = 0.5

    def budget_of(self, share: float) -> float | None:
        """Return the smallest budget that a share of the bytes fits; None where it fits none."""
        return min((each for each in self.budgets if share <= each * (1 + self.tolerance)), default=None)


def read_leaderboard(raw: Mapping[str, Any], faults: list[str]) -> Leaderboard | None:
    """The leaderboard as a suite writes it; None where it asks for none, or has a fault.

    Args:
        raw: the table `[leaderboard]`; empty where there is none.
        faults: what is wrong is added here, a sentence each.
    """
    if not raw:
        return None
    known = [field.name for field in fields(Leaderboard)]
    found = [f"leaderboard has the unknown key {key!r}{suggest(key, known)}" for key in raw if key not in known]
    title, budgets = raw.get("title"), raw.get("budgets")
    if not isinstance(title, str) or not title:
        found.append("leaderboard has no title: write one")
    if not _are_shares(budgets) or list(budgets or ()) != sorted(set(budgets or ()), reverse=True):
        found.append(f"leaderboard: budgets is {budgets!r}: give shares above 0 and below 1, from many to few")
    for name in ("tolerance", "least_right"):
        if name in raw and not _is_share(raw[name]):
            found.append(f"leaderboard: {name} is {raw[name]!r}: give a number from 0 to below 1")
    faults += found
    if found:
        return None
    numbers = {name: float(raw[name]) for name in ("tolerance", "least_right") if name in raw}
    return Leaderboard(title=str(title), budgets=tuple(map(float, raw["budgets"])), **numbers)


def _are_shares(budgets: object) -> bool:
    return isinstance(budgets, Sequence) and bool(budgets) and all(_is_share(each) and each > 0 for each in budgets)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
