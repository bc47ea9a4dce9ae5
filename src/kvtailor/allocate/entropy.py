"""Entropy: layers share the budget by how many tokens their newest queries look at.

*Idea*: a query whose attention has the entropy H attends to exp(H) tokens in effect: to one if all attention is on one
token, to n if it is even. The mean of that number over the window's queries and all heads estimates how many tokens a
layer needs for the answer that is about to begin, and the budget is split by it.

*Paper*: none. The effective number exp(H) is the perplexity of a distribution. CAKE (arXiv 2503.12491) takes the
entropy H itself as one of two factors; Roy and Vetterli take the same exponential for singular values (`erank`).

*Source*: our own.

*Departs*: nothing known. A learned sink's share counts as attention to no token. exp(H) and not H, because budgets
count tokens: twice as many tokens at the same attention each are twice the number, and only a constant more entropy.
The mean is taken after the exponential, so that heads add up as their tokens do. The budget that is split includes what
a scorer always keeps. When tokens are evicted again, the entropies are of the attention to what is held.

*Cost*: the last `window` queries, and waiting for all layers; time O(q * window * n * d), scratch float32
(g * window, n), one row and kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.attention.observed import window_means
from kvtailor.ops.lanes.apportion import even_shares
from kvtailor.types import Held, Needs

__all__ = ["Entropy"]


@dataclass(frozen=True, kw_only=True)
class Entropy(Allocator):
    """Layers by the perplexity of their attention rows, equal for the heads of a layer.

    Attributes:
        window: newest queries whose attention is measured.
    """

    window: int = 32
    scope: ClassVar[str] = "prompt"
    even_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"entropy: window must be at least 1 query, found {self.window}")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def measure(self, held: Held) -> Tensor:
        """(b,) float32 from 1 to n: mean of exp(entropy) over queries and heads."""
        means = window_means(held, lambda rows: torch.special.entr(rows).sum(-1).exp())
        return held.share.gather(means, 1).mean(-1)

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: a layer is absent, or none was measured.
        """
        weights = request.numbers("entropy", every_layer=True)
        return even_shares(weights, request.total, request.floor, request.capacity, request.layers)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """g w n (2 d + 6): for each query and token 2 d for the logit, 4 for the softmax, 2 for p ln p."""
        return group * min(self.window, tokens) * tokens * (2 * size + 6)
