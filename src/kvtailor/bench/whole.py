"""Every plan with nothing to drop: then it must give what 'full' gives, whatever its method is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvtailor.bench import tripwires
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.rounding import tolerances_here
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError
from kvtailor.plan import Plan

__all__ = ["WholeBudgets", "plans_at_whole_budget"]

_ALL_TOKENS = 2**40


def plans_at_whole_budget(text: str) -> tuple[str, ...]:
    """What a plan becomes where it may keep and read everything; nothing for a plan that keeps and reads it anyway.

    Its way to evict (score, allocate, select) is tried at keep=1.0 without its codec, which may lose something by
    itself, and without a selector that drops tokens of its own accord. A way to read that has a budget in tokens is
    tried with one that no text fills, on its own codec, which it needs for its pages; any other goes with the way to
    evict.

    Raises:
        PlanError: `text` is no plan.
    """
    plan = Plan.parse(text)
    found = []
    if plan.evicts:
        whole = Plan(score=plan.score, allocate=plan.allocate, slack=plan.slack, keep=1.0)
        whole = replace(whole, select=plan.select) if plan.select.exact else whole
        reads = plan.attend.needs_codec is None and not hasattr(plan.attend, "tokens")
        found.append(replace(whole, attend=plan.attend) if reads else whole)
    attend: Any = plan.attend
    if hasattr(attend, "tokens"):
        found.append(Plan(encode=plan.encode, attend=replace(attend, tokens=_ALL_TOKENS)))
    return tuple(str(each) for each in found)


class WholeBudgets:
    """Tries plans at their whole budget on one sample, each once.

    Args:
        subject: the model; its `whole_budget` says what a plan becomes.
        full: what they must equal.
        score: the log-probabilities (t,) of the sample's targets under a plan.
        what: name of the sample, for the sentence of a failure.
        tokens: of the sample.
    """

    def __init__(
        self, subject: Subject, full: Contestant, score: Callable[[Contestant], Tensor], what: str, tokens: int
    ):
        self._subject, self._full, self._score, self._what = subject, full, score, what
        self._tokens = tokens
        self._reference: Tensor | None = None
        self._notes: dict[str, tuple[str, ...]] = {}

    def check(self, contestant: Contestant) -> tuple[str, ...]:
        """Notes for the plan's record: what could not be tried, and why.

        Raises:
            Fraud: "whole budget", where the plan differs from 'full'.
        """
        notes: list[str] = []
        for plan in self._subject.whole_budgets(contestant):
            if plan not in self._notes:
                self._notes[plan] = self._try(contestant, plan)
            notes += self._notes[plan]
        return tuple(notes)

    def _try(self, contestant: Contestant, plan: str) -> tuple[str, ...]:
        whole = Contestant(label=f"{contestant.label} at its whole budget", plan=plan, hash=f"whole {plan}")
        try:
            if self._reference is None:
                self._reference = self._score(self._full)
            ours = self._score(whole)
        except (KvtailorError, ValueError) as error:
            return (f"Its whole budget could not be tried as {plan}: {error}",)
        usual = tripwires.tolerances_of_another_path(self._subject.dtype)
        worst, mean = tolerances_here(self._subject, usual, ours - self._reference, self._score, tokens=self._tokens)
        tripwires.check_whole_budget(
            contestant.label, plan, ours.tolist(), self._reference.tolist(), worst, self._what, mean
        )
        return ()
