"""SimLayerKV: layers that look at sinks and newest tokens alone get no more than those.

*Idea*: in some layers nearly all attention goes to the first tokens and the newest ones, whatever the text. Such a lazy
layer is held to these tokens, and the other layers get the rest of the budget.

*Paper*: "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction", arXiv 2410.13846; our `initial` = 4 and
`recent` = 1,024 are its numbers of tokens, `threshold` its bar, which it sets for each model (0.9 for Llama 3).

*Source*: the paper's abstract and a reading of kvpress (Apache-2.0), which looks at the last query; nothing was taken.

*Departs*: a plan has a budget, where the paper's memory follows from the bar alone. Each layer is first sure of
`initial` + `recent` tokens, as far as the budget goes; then the layers that are not lazy share what is left, and only
what these cannot hold goes back to lazy ones. With a budget too small for all that the others hold, they are cut as
well. Which tokens stay is the scorer's choice: `position(sinks=4)` keeps the paper's. Each row of a batch is judged by
itself. A learned sink's share counts as attention to no token.

*Cost*: the last `window` queries, and waiting for all layers; time O(q * window * n * d), scratch float32 (window, n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.allocate.contract import Allocator, BudgetRequest
from kvtailor.ops.attention.observed import mean_attention
from kvtailor.ops.lanes.apportion import even_shares
from kvtailor.types import Held, Needs

__all__ = ["SimLayerKV"]


@dataclass(frozen=True, kw_only=True)
class SimLayerKV(Allocator):
    """Layers by whether their newest queries look at the ends of the text alone, equal for the heads of a layer.

    Attributes:
        threshold: a layer is lazy where more than this share of its attention goes to the first and newest tokens.
        initial: how many first tokens.
        recent: how many newest tokens.
        window: newest queries whose attention is measured.
    """

    threshold: float = 0.9
    initial: int = 4
    recent: int = 1024
    window: int = 1
    examples: ClassVar[tuple[str, ...]] = ("simlayerkv(recent=8)",)
    scope: ClassVar[str] = "prompt"
    even_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"simlayerkv: threshold must be a share from 0 to 1, found {self.threshold}")
        if self.initial < 0 or self.recent < 0:
            raise ValueError(
                f"simlayerkv: initial and recent must be 0 or more tokens, found {self.initial} and {self.recent}"
            )
        if self.window < 1:
            raise ValueError(f"simlayerkv: window must be at least 1 query, found {self.window}")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def measure(self, held: Held) -> Tensor:
        """(b,) float64: the share of the window's attention, mean over heads, on a row's first and newest tokens.

        Of what is held: where some of them are gone, those that are left count.
        """
        found = []
        for row in range(held.keys.shape[0]):
            given = mean_attention(held, row).double().mean(0)
            count = given.shape[0]
            ends = torch.zeros(count, dtype=torch.bool, device=given.device)
            ends[: self.initial] = True
            ends[max(0, count - self.recent) :] = True
            found.append((given * ends).sum())
        return torch.stack(found)

    def allocate(self, request: BudgetRequest) -> Tensor:
        """(b, l, h) int64 on the CPU.

        Raises:
            ValueError: a layer is absent, or none was measured.
        """
        lazy = request.numbers("simlayerkv", every_layer=True) > self.threshold
        alike, layers = torch.ones(lazy.shape, dtype=torch.float64), request.layers
        sure = torch.maximum(request.floor, request.capacity.clamp_max(self.initial + self.recent))
        low = even_shares(alike, request.total, request.floor, sure, layers)
        high = torch.where(lazy[..., None], low, request.capacity)
        low = even_shares(alike, request.total, low, high, layers)
        return even_shares(alike, request.total, low, request.capacity, layers)

    def flops(self, *, tokens: int, heads: int, group: int, size: int) -> int:
        """g w n (2 d + 6): for each query and token 2 d for the logit, 4 for the softmax, 2 for the two means."""
        return group * min(self.window, tokens) * tokens * (2 * size + 6)
