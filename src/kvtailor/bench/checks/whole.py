"""Every plan with nothing to drop: then it must give what 'full' gives, whatever its method is."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvtailor.bench import checks
from kvtailor.bench.checks.reference import ReferenceScores, finer, reference_of
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError

__all__ = ["WholeBudgets"]

_FEW = 16
_MANY = 128
"""Targets that are fed one at a time: at first, and where those leave a doubt."""


class WholeBudgets:
    """Tries plans at their whole budget on one sample, each once.

    Args:
        subject: the model; its `whole_budget` gives what a plan becomes.
        full: what they must equal.
        score: the log-probabilities of the sample's first targets under a plan, as many as are asked for.
        what: name of the sample, for the sentence of a failure.
        tokens: of the sample's context.
        targets: that the sample has.
        finely: in half precision they are tried in a finer dtype too, which takes longer than all else here.
    """

    def __init__(
        self,
        subject: Subject,
        full: Contestant,
        score: Callable[[Contestant, int], Tensor],
        what: str,
        tokens: int,
        targets: int,
        *,
        finely: bool = True,
    ):
        self._subject, self._full, self._score, self._what = subject, full, score, what
        self._finely = finely
        self._tokens, self._few, self._many = tokens, min(_FEW, targets), min(_MANY, targets)
        self._of_full: Tensor | None = None
        self._finely_of_full: Tensor | None = None
        self._reference: ReferenceScores | None = None
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
            if self._of_full is None:
                self._of_full = self._score(self._full, self._few)
            ours = self._score(whole, self._few)
        except (KvtailorError, ValueError) as error:
            return (f"Its whole budget could not be tried as {whole.text}: {error}",)
        finely = self._finely and self._subject.cache_dtype.itemsize <= 2 and self._try_finely(contestant, whole)
        checks.check_whole_budget(
            contestant.label,
            str(whole.text),
            ours,
            self._of_full,
            self._subject.cache_dtype,
            self._what,
            lambda: (self._score(whole, self._many), self._held()),
            finely,
        )
        return ()

    def _try_finely(self, contestant: Contestant, whole: Contestant) -> bool:
        """Whether it is right in a finer dtype, since the noise of half precision hides a plan that loses some tokens.

        False where that is not to be had (of a calibration for these very weights, say): the plan is held to 'full' in
        the model's own dtype in any case.

        Raises:
            Fraud: "whole budget", where it is not right.
        """
        try:
            with finer(self._subject) as dtype:
                if self._finely_of_full is None:
                    self._finely_of_full = self._score(self._full, self._few)
                ours = self._score(whole, self._few)
        except (KvtailorError, ValueError, NotImplementedError, RuntimeError):
            return False
        sides = f"'full' and plan {contestant.label!r}, tried as {str(whole.text)!r}, which drops nothing,"
        checks.check_finely("whole budget", sides, [ours], [self._finely_of_full], dtype, self._what)
        return True

    def _held(self) -> ReferenceScores:
        """What plans that are not near enough are held to, computed once."""
        if self._reference is None:

            def score(contestant: Contestant) -> list[Tensor]:
                return [self._score(contestant, self._many)]

            self._reference = reference_of(self._subject, score, self._tokens + self._many)
        return self._reference
