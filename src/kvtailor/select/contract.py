"""The stage `select`: scores + integers -> which tokens stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from kvtailor.method import Method

__all__ = ["Selector"]


class Selector(Method, ABC):
    """One way to turn scores into a kept set. A subclass is a frozen, keyword-only dataclass.

    Attributes:
        exact: as many tokens stay as the budget says. False: fewer may stay, so the method is called at every cut,
            even if all tokens fit the budget.
        takes_best: each head keeps its highest scores and nothing else decides, so that `Scorer.newest_kept` holds.
    """

    exact: ClassVar[bool] = True
    takes_best: ClassVar[bool] = False

    @property
    def same_in_heads(self) -> bool:
        """Whether all kv heads of a row keep the same tokens, which needs the same budget for all heads of a layer."""
        return False

    @abstractmethod
    def select(self, scores: Tensor, budgets: Tensor) -> Tensor:
        """Return the kept set.

        Args:
            scores: (b, h, n) float32, -inf where no token is, +inf for tokens that must stay.
            budgets: (b, h) int64 on any device, between 0 and the number of tokens above -inf.

        Returns:
            (b, h, n) bool, never where the score is -inf. Exactly `budgets` trues where `exact`; else at most as many,
            all tokens that must stay and at least one among them where the budget allows. Ties go to the earliest.
        """

    def flops(self, *, tokens: int) -> int | None:
        """Count what one call of `select` computes for one row and kv head, as `Scorer.flops`; None: not known.

        Args:
            tokens: n, tokens held.
        """
        return None
