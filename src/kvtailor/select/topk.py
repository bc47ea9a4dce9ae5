"""Top-k: the highest scores of each head, exactly as many as its budget.

*Idea*: keep what scores highest. Among equals the earliest stays, so the kept set is the same on every machine.

*Paper*: none; what every eviction method does last.

*Source*: our own.

*Departs*: nothing known.

*Cost*: finds the lowest score that stays without sorting: O(b * h * n) time, three boolean (b, h, n) at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtailor.ops.lanes.topk import keep_top
from kvtailor.select.contract import Selector

__all__ = ["TopK"]


@dataclass(frozen=True, kw_only=True)
class TopK(Selector):
    """Exact counts, ties to the earliest."""

    takes_best: ClassVar[bool] = True

    def select(self, scores: Tensor, budgets: Tensor) -> Tensor:
        """See the contract.

        Raises:
            CacheMisuse: a score is NaN.
            ValueError: a budget that the tokens cannot fill.
        """
        return keep_top(scores, budgets)

    def flops(self, *, tokens: int) -> int:
        """0: scores are compared, never computed with."""
        return 0
