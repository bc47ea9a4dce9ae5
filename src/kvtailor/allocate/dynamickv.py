"""DynamicKV: every few layers the best tokens of all layers so far are counted, and layers share by that count.

*Idea*: which layers need many tokens depends on the task, and a layer's scores show it once the layer has run. A layer
that has just run keeps a generous share. Every `interval` layers, the tokens of all layers so far compete in one pool,
and each layer's part of the winners is its part of the whole budget. Layers only shrink, so nothing has to be kept for
later.

*Paper*: "DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs", arXiv 2412.14838, section 4; our
`interval` = m = 4, our `most` = r_max = 10. Window 8, kernel 7 and the pooling belong to the score: the preset
`dynamickv`.

*Source*: the paper and a description of its repository (no licence).

*Departs*: scores, counts and budgets are of kv heads, where the code repeats keys for every query head. The last layer
always updates, also where the interval does not divide the number of layers; the code then never does and keeps the
generous shares. What rounding leaves over goes to the largest remainders, not to the last layer, and what a layer does
not hold goes to the others by their parts. Scores of different layers are compared as they are, so layers with flat
attention lose. `r_min`, which the code only warns of, is not here.

*Cost*: the scores of all layers so far. At most the budget and `interval` layers of `most` times their share are held
while the prompt runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.lanes.apportion import even_shares
from kvtailor.ops.lanes.topk import keep_top, pooled_counts

__all__ = ["DynamicKV"]


@dataclass(frozen=True, kw_only=True)
class DynamicKV(Allocator):
    """Layers by their part of the best scores, equal for the heads of a layer.

    Attributes:
        interval: layers after which budgets are updated.
        most: history that a layer may keep, in multiples of the mean.
    """

    interval: int = 4
    most: float = 10.0
    scope: ClassVar[str] = "progressive"
    needs_scores: ClassVar[bool] = True
    even_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"dynamickv: interval must be at least 1 layer, found {self.interval}; the paper uses 4")
        if not self.most >= 1:
            raise ValueError(f"dynamickv: most must be at least 1, found {self.most}; the paper uses 10")

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: no scores were given, or a layer before the last present one is absent.
        """
        scores = request.scores_for("dynamickv")
        count, every = len(request.layers), request.num_layers
        if request.layers != tuple(range(count)):
            raise ValueError(
                f"dynamickv needs layers 0 to {count - 1} at once, found {request.layers}; its scope is 'progressive'"
            )
        free = request.capacity - request.floor
        mean = request.history.double() / (every * free.shape[-1])
        bounded = torch.minimum(free, (self.most * mean).to(torch.int64)[:, None, None])
        if count % self.interval and count < every:
            return request.floor + bounded
        weights = self._winners(scores, bounded, request.history * count // every)
        high = bounded
        if count == every:
            # Layers of a later eviction may hold less than their share: then no bound may keep the sum from being
            # exact.
            short = bounded.sum((1, 2)) < request.history
            high = torch.where(short[:, None, None], free, bounded)
        return request.floor + even_shares(weights, request.history, torch.zeros_like(free), high, request.layers)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """0: scores are compared, never computed with."""
        return 0

    def _winners(self, scores: Sequence[Tensor], bounded: Tensor, total: Tensor) -> Tensor:
        """(b, l) how many of the `total` (b,) best tokens are in each layer; each lane enters its `bounded` best."""
        longest, lanes = max(each.shape[-1] for each in scores), []
        for i, each in enumerate(scores):
            history = each.masked_fill(each == torch.inf, -torch.inf)
            entering = history.masked_fill(~keep_top(history, bounded[:, i]), -torch.inf)
            lanes.append(F.pad(entering, (0, longest - each.shape[-1]), value=-torch.inf))
        total = torch.minimum(total, bounded.sum((1, 2)))
        least = torch.zeros_like(bounded).flatten(1)
        return pooled_counts(torch.cat(lanes, 1), least, total).view(bounded.shape).sum(-1)
