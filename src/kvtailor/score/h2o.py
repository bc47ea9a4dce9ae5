"""H2O: the tokens that all queries so far attended to most.

*Idea*: few tokens collect most of the attention, and they go on collecting it. The sum of each token's column of the
attention matrix, kept running while the model decodes, shows which.

*Paper*: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv 2306.14048,
algorithm 1; our `mass` = its accumulated score, our `recent` = its recent budget.

*Source*: the paper and a description of its repository (no licence: nothing was taken).

*Departs*: the paper makes the recent window half of the budget; a scorer runs before a budget is known, so `recent` is
a number of tokens: the paper's setting is written out, as in `h2o(recent=128) @ tokens=256`. The paper evicts after
every token; here once the cache is `slack` tokens past the budget. Query heads of one kv head are summed (the paper has
no such groups). The plain sum favours early tokens, which more queries have seen; that is the paper's and stays the
default, `normalise` divides by the number of queries that could see the token (columns from its own on).

*Cost*: column sums of attention over all causal queries, streamed, never n x n; 4 bytes per held token and kv head
while decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["H2O"]


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """Accumulated attention mass.

    Attributes:
        recent: newest tokens that always stay.
        normalise: divide by the number of queries that could see the token.
    """

    recent: int = 32
    normalise: bool = False
    slack: ClassVar[int | None] = 32

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise ValueError(
                f"h2o: recent must be 0 or more tokens, found {self.recent}; the paper uses half the budget"
            )

    @property
    def needs(self) -> Needs:
        return Needs(mass=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 attention probability, summed over queries and the group's query heads.

        Raises:
            ValueError: no mass was gathered.
        """
        if held.mass is None:
            raise ValueError("h2o scores by attention mass, but none was gathered; observe with Needs(mass=True)")
        if not self.normalise:
            return held.mass.float().clone()
        return held.mass.float() / (held.seen - held.positions).clamp_min(1)

    def attention_scale(self, held: Held, *, group: int) -> Tensor:
        """(b,) float32: the group, times all queries of the row where the sum is not divided."""
        queries = torch.ones_like(held.first) if self.normalise else held.seen - held.first
        return group * queries.float()

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """0, or n divisions with `normalise`; the sums are evidence and counted where they are gathered."""
        return tokens if self.normalise else 0
