"""CAKE: layers share the history budget by how wide their attention is spread and how much it moves.

*Idea*: a layer that looks at many tokens (entropy), or at other tokens with every query (variance over time), loses
more by eviction. The product of both is a layer's preference. It does not depend on later layers, so each layer can be
measured and cut as soon as it is done: the layers so far share the whole budget, and give up some of it to every layer
that follows.

*Paper*: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences", arXiv 2503.12491, sections 4.1 and
4.2: P = H^(1/tau1) V^(1/tau2); our `window` = S_w, and H and V are over the last S_w queries and the tokens before
them, summed over heads: H of -A ln A, V of the variance of a token's attention over the queries.

*Source*: the paper, and a reading of a public copy of its repository; nothing was taken. There the variance divides by
S_w - 1, budgets are of the history with the window on top, and tau1 and tau2 are chosen for each model and budget (1.6
and 0.4 for Llama 3.1 8B at 1024, 0.8 and 0.5 for Mistral 7B v0.3).

*Departs*: tau1 = tau2 = 1, since no other pair belongs to all models. Preferences are of each row, not summed over a
batch. Integers by largest remainder, between what must stay and what is held, where the repository corrects rounded
shares in order of layers. The paper's own score of tokens (mean and variance over the window) is not here.

*Cost*: the last `window` queries; time O(q * window * n * d), scratch float32 (g * window, n). Never more than the
budget and one layer is held, and each layer is cut again whenever one follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.attention.observed import window_attention
from kvtailor.ops.lanes.apportion import even_shares
from kvtailor.types import Held, Needs

__all__ = ["Cake"]


@dataclass(frozen=True, kw_only=True)
class Cake(Allocator):
    """Layers by preference, equal for the heads of a layer.

    Attributes:
        window: newest queries whose attention is measured.
        tau1: temperature of the entropy; large: it counts for little.
        tau2: temperature of the variance.
    """

    window: int = 32
    tau1: float = 1.0
    tau2: float = 1.0
    scope: ClassVar[str] = "progressive"
    even_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"cake: window must be at least 2 queries to have a variance, found {self.window}")
        if not (self.tau1 > 0 and self.tau2 > 0):
            raise ValueError(f"cake: tau1 and tau2 must be above 0, found {self.tau1} and {self.tau2}; 1 is neutral")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def measure(self, held: Held) -> Tensor:
        """(b,) float64 on the CPU: preference; 0 where there are no two queries, or no token before them."""
        rows, heads = held.keys.shape[:2]
        spread = torch.zeros(rows, dtype=torch.float32, device=held.keys.device)
        shift = spread.clone()
        for row in range(rows):
            for head in range(heads):
                given, older = window_attention(held, row, head)
                # Where the window is held it is the end of the head's tokens, so what is older is the rest.
                known = held.holds_window and held.query_span is not None
                before = slice(0, given.shape[-1] - len(held.query_span or ())) if known else older
                for one in given:
                    history = one[:, before]
                    spread[row] += torch.special.entr(history).sum()
                    if history.shape[0] > 1 and history.numel():
                        shift[row] += history.var(0).sum()
        spread, shift = held.share.sum(torch.stack([spread, shift])).cpu().double().unbind()
        return spread ** (1 / self.tau1) * shift ** (1 / self.tau2)

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU: the layers so far share the whole budget.

        Raises:
            ValueError: a layer before the last present one is absent, or none was measured.
        """
        weights, free = request.numbers("cake"), request.capacity - request.floor
        so_far = tuple(range(len(request.layers)))
        return request.floor + even_shares(weights, request.history, torch.zeros_like(free), free, so_far)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """g w n (2 d + 9): for each query and token 2 d for the logit, 4 for the softmax, 2 for p ln p, 3 for the
        variance.
        """
        return group * min(self.window, tokens) * tokens * (2 * size + 9)
