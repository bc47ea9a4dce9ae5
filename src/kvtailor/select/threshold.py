"""Threshold: the tokens whose scores reach a bar, within the budget.

*Idea*: how many tokens matter differs from head to head and from text to text. So a token goes as soon as its score is
below a bar, and the budget is a bound that nothing exceeds.

*Paper*: "Inference-Time Hyper-Scaling with KV Cache Compression", arXiv 2506.05345 (Dynamic Memory Sparsification), of
which this is what needs no training: tokens are judged one by one and the compression follows from the text.

*Source*: the paper and a reading of kvpress (Apache-2.0), which compares any score with a number; nothing was taken.

*Departs*: the paper trains the model to decide for each new token, and evicts it when it leaves a sliding window; here
any scorer decides, at the moments when the cache is cut, and a scorer's `recent` or `window` is the sliding window.
`of="mean"` is ours.

*Cost*: a few passes over the scores, and top-k where the bar lets too many through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvtailor.ops.lanes.topk import keep_top
from kvtailor.select.contract import Selector
from kvtailor.types.late_checks import send

__all__ = ["Threshold"]

Of = Literal["mean", "score"]


@dataclass(frozen=True, kw_only=True)
class Threshold(Selector):
    """Tokens that reach a bar, at most the budget; at least one, and all that must stay.

    Under `of="mean"` the bar rises with what is left, so a cache that is cut while it decodes shrinks at every cut:
    there take `of="score"`, or `slack="never"`.

    Attributes:
        at: the bar.
        of: "mean": `at` times the mean score of that row's and head's tokens, those that must stay left out;
            "score": `at` itself, on the scale of the scorer.
    """

    at: float = 1.0
    of: Of = "mean"
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError(f"threshold: at must be a finite number, found {self.at}; 1.0 is the mean of the scores")
        if self.of not in get_args(Of):
            raise ValueError(f"threshold: of must be one of {get_args(Of)}, found {self.of!r}")

    def select(self, scores: Tensor, budgets: Tensor) -> Tensor:
        """See the contract.

        Raises:
            CacheMisuse: a score is NaN.
            ValueError: a budget that the tokens cannot fill.
        """
        bar: Tensor | float = self.at
        member = scores.isfinite()
        if self.of == "mean":
            # Counted from the lowest, so that equal scores have exactly themselves as their mean.
            low = scores.masked_fill(~member, torch.inf).amin(-1, keepdim=True)
            above = (scores - low).masked_fill(~member, 0.0).sum(-1, keepdim=True)
            bar = self.at * (low + above / member.sum(-1, keepdim=True))
        reach = (member & (scores >= bar)) | (scores == torch.inf)
        return keep_top(scores, torch.minimum(send(budgets, scores.device), reach.sum(-1).clamp(min=1)))

    def flops(self, *, tokens: int) -> int:
        """n additions for a mean; comparisons are free."""
        return tokens if self.of == "mean" else 0
