"""What a plan becomes where it may keep and read everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtailor.plan import Plan

__all__ = ["at_whole_budget", "plans_at_whole_budget"]

_ALL_TOKENS = 2**40


def plans_at_whole_budget(text: str) -> tuple[str, ...]:
    """Return what `at_whole_budget` makes of a plan in one line, each in one line.

    Raises:
        PlanError: `text` is no plan.
    """
    return tuple(str(each) for each in at_whole_budget(Plan.parse(text)))


def at_whole_budget(plan: Plan) -> tuple[Plan, ...]:
    """Return what a plan becomes where it may keep and read everything; nothing where it does so anyway.

    Its way to evict (score, allocate, select) is tried at keep=1.0 without its codec, which may lose something by
    itself, and without a selector that drops tokens of its own accord. A way to read that has a budget in tokens is
    tried with one that no text fills, on its own codec, which it needs for its pages; any other goes with the way to
    evict.
    """
    found = []
    if plan.evicts:
        whole = Plan(score=plan.score, allocate=plan.allocate, slack=plan.slack, keep=1.0)
        whole = replace(whole, select=plan.select) if plan.select.exact else whole
        reads = plan.attend.needs_codec is None and not plan.attend.has_token_budget
        found.append(replace(whole, attend=plan.attend) if reads else whole)
    attend: Any = plan.attend
    if plan.attend.has_token_budget:
        found.append(Plan(encode=plan.encode, attend=replace(attend, tokens=_ALL_TOKENS)))
    return tuple(found)
