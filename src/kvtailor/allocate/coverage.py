"""Coverage: layers, or heads, share the budget by how many tokens hold most of their attention.

*Idea*: a head that finds 95 % of what it looks at in ten tokens needs ten, and one that finds it in a thousand needs a
thousand. For each of the window's newest queries the fewest tokens are counted that together get the share `mass` of
its attention, and budgets are split by the mean of these counts.

*Paper*: none.

*Source*: our own; the question that budgets by rank or by entropy answer indirectly.

*Departs*: nothing known. What a learned sink gets is covered without a token. Counts are averaged over queries as they
are, so a query that attends to many tokens counts for more than one that attends to few. The budget that is split
includes what a scorer always keeps. When tokens are evicted again, counts are of the attention to what is held.

*Cost*: the last `window` queries, and waiting for all layers; time O(q * window * n * (d + log n)), scratch float32
(g * window, n), one row and kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.attention.observed import window_means
from kvtailor.ops.lanes.apportion import apportion, even_shares
from kvtailor.types import Held, Needs

__all__ = ["Coverage"]


@dataclass(frozen=True, kw_only=True)
class Coverage(Allocator):
    """Tokens needed for a share of the attention.

    Attributes:
        mass: share of each query's attention that is to be covered.
        window: newest queries whose attention is measured.
        per_head: each kv head gets its own budget by its own counts; else the heads of a layer get the same.
    """

    mass: float = 0.95
    window: int = 32
    per_head: bool = False
    scope: ClassVar[str] = "prompt"
    examples: ClassVar[tuple[str, ...]] = ("coverage", "coverage(per_head=true)")

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise ValueError(f"coverage: mass must be a fraction between 0 and 1, found {self.mass}; 0.95 is usual")
        if self.window < 1:
            raise ValueError(f"coverage: window must be at least 1 query, found {self.window}")

    @property
    def even_heads(self) -> bool:
        return not self.per_head

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def measure(self, held: Held) -> Tensor:
        """(b,) float32 from 1 to n: tokens needed, mean over queries and heads; with `per_head` (b, h), over groups."""
        counts = window_means(held, partial(self._counts, sinks=held.softmax.sinks is not None))
        counts = held.share.gather(counts, 1)
        return counts if self.per_head else counts.mean(-1)

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: a layer is absent, or none was measured.
        """
        weights = request.numbers("coverage", every_layer=True)
        if not self.per_head:
            return even_shares(weights, request.total, request.floor, request.capacity, request.layers)
        low, high = request.floor.flatten(1), request.capacity.flatten(1)
        return apportion(weights.flatten(1), request.total, low, high).view(request.capacity.shape)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """g w n (2 d + 5): for each query and token 2 d for the logit, 4 for the softmax, 1 for the running sum."""
        return group * min(self.window, tokens) * tokens * (2 * size + 5)

    def _counts(self, rows: Tensor, *, sinks: bool) -> Tensor:
        """(v,) float32: how many of the largest probabilities of each row (v, n) it takes to reach the mass."""
        reached = rows.sort(dim=-1, descending=True).values.cumsum(-1)
        if sinks:
            reached += (1 - rows.sum(-1, keepdim=True)).clamp_min(0.0)
        # What float32 sums to may stay below the mass of a row whose every token is needed.
        return ((reached < self.mass).sum(-1) + 1).clamp_max(rows.shape[-1]).float()
