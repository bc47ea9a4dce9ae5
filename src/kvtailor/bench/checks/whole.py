"""Every plan with nothing to drop: then it must give what 'full' gives, whatever its method is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvtailor.bench import checks
from kvtailor.bench.checks.rounding import tolerances_here
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError

__all__ = ["WholeBudgets"]


class WholeBudgets:
    """Tries plans at their whole budget on one sample, each once.

    Args:
        subject: the model; its `whole_budget` gives what a plan becomes.
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
        for whole in self._subject.at_whole_budget(contestant):
            if whole.hash not in self._notes:
                self._notes[whole.hash] = self._try(contestant, whole)
            notes += self._notes[whole.hash]
        return tuple(notes)

    def _try(self, contestant: Contestant, whole: Contestant) -> tuple[str, ...]:
        try:
            if self._reference is None:
                self._reference = self._score(self._full)
            ours = self._score(whole)
        except (KvtailorError, ValueError) as error:
            return (f"Its whole budget could not be tried as {whole.text}: {error}",)
        usual = checks.tolerances_of_another_path(self._subject.dtype)
        worst, mean = tolerances_here(self._subject, usual, ours - self._reference, self._score, tokens=self._tokens)
        checks.check_whole_budget(
            contestant.label, str(whole.text), ours.tolist(), self._reference.tolist(), worst, self._what, mean
        )
        return ()
