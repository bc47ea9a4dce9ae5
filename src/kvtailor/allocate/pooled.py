"""Pooled: all tokens of all layers and kv heads compete in one pool.

*Idea*: the same pool as AdaKV's, over the whole prompt and not one layer. It is the plainest budget that must wait for
every layer, a control for methods that decide across layers.

*Paper*: none; a control. DynamicKV (arXiv 2412.14838) pools over layers as well, in rounds and with bounds of its own.

*Source*: our own.

*Departs*: nothing known. Scores of different layers are compared as they are, so layers with flat attention lose.

*Cost*: the scores of all layers at once, so no layer can drop tokens before the last has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import apportion
from kvtailor.ops.lanes.topk import pooled_counts

__all__ = ["Pooled"]


@dataclass(frozen=True, kw_only=True)
class Pooled(Allocator):
    """One pool per row.

    Attributes:
        floor: fraction of the equal share of the history that every layer and head is sure of; 1 is uniform.
    """

    floor: float = 0.2
    scope: ClassVar[str] = "prompt"
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"pooled: floor must be a fraction from 0 to 1, found {self.floor}")

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: no scores were given, or a layer is absent.
        """
        every = request.scores_for("pooled")
        request.check_all_layers("pooled")
        low, high = request.floor.flatten(1), request.capacity.flatten(1)
        total = request.total.clamp(low.sum(-1), high.sum(-1))
        sure = ((total - low.sum(-1)).double() * self.floor).to(torch.int64) + low.sum(-1)
        least = apportion(torch.ones(low.shape[-1], dtype=torch.float32), sure, low, high)
        longest = max(scores.shape[-1] for scores in every)
        lanes = [F.pad(scores, (0, longest - scores.shape[-1]), value=-torch.inf) for scores in every]
        return pooled_counts(torch.cat(lanes, dim=1), least, total).view(request.capacity.shape)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: scores are compared, never computed with."""
        return 0
