"""SnapKV: the tokens that the last queries of the prompt look at.

*Idea*: what a prompt's last queries attend to is what the answer will attend to. Their attention probabilities are
summed for each older token and smoothed along time, so that a token stays with its neighbours; the window of those
queries itself always stays.

*Paper*: "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469, section 4; our `window` = its
observation window, our `kernel` = its pooling kernel.

*Source*: the paper and a description of its repository (Apache-2.0).

*Departs*: the pooling is 21 tokens wide by default, where the paper has 5 or 7 (`kernel=5` is the paper's). The last
queries look at where a number or a name begins, and a tokenizer of single digits writes on for longer than the two
tokens that a kernel of 5 reaches: the first digits stay and the last ones go. One kv head has one kept set, where the
official code repeats keys and keeps one per query head; votes of a group are reduced before pooling, which for
`pooling="max"` is not the same as after. Rows with padding pool over their real tokens alone. When tokens are evicted
again, the softmax runs over what is held, not over what was evicted before.

*Cost*: the last `window` queries; time and scratch O(q * window * n), one kv head at a time, so the scratch is float32
(b, g * window, n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvtailor.ops.attention.observed import observed_queries
from kvtailor.ops.attention.votes import head_votes
from kvtailor.ops.lanes.pool import pool_members
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["SnapKV"]

Pooling = Literal["average", "max"]
Reduce = Literal["mean", "sum", "max"]


@dataclass(frozen=True, kw_only=True)
class SnapKV(Scorer):
    """Pooled attention of an observation window.

    Attributes:
        window: newest queries that vote, and newest tokens that always stay.
        kernel: odd width of the pooling, in tokens; the paper has 5 or 7.
        pooling: "average" (edges padded with zeros that count) or "max".
        reduce: how the votes of a kv head's query heads become one.
    """

    window: int = 32
    kernel: int = 21
    pooling: Pooling = "average"
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"snapkv: window must be at least 1 query, found {self.window}; the paper uses 32")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"snapkv: kernel must be odd and at least 1, found {self.kernel}; the paper uses 5 or 7")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"snapkv: pooling must be one of {get_args(Pooling)}, found {self.pooling!r}")
        if self.reduce not in get_args(Reduce):
            raise ValueError(f"snapkv: reduce must be one of {get_args(Reduce)}, found {self.reduce!r}")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 pooled votes; 0 inside the window, which stays anyway.

        Raises:
            ValueError: no queries were gathered.
        """
        _, columns = observed_queries(held, "snapkv scores by", self.window)
        voters = held.held_by_first()
        votes = torch.stack([self._votes(held, head, voters) for head in range(held.keys.shape[1])], dim=1)
        history = held.valid & (held.positions < columns[0])
        return pool_members(votes, history, self.kernel, self.pooling)

    def attention_scale(self, held: Held, *, group: int) -> Tensor:
        """(b,) float32: how many queries of each row vote; times the group where its votes are summed."""
        _, columns = observed_queries(held, "snapkv scores by", self.window)
        voters = held.held_by_first().sum(-1).float().clamp_min(1)
        return voters * group if self.reduce == "sum" else voters

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g w n (2 d + 6) + the reduction of the group + the pooling.

        For each query of the window and token: 2 d for the logit, 4 for its softmax (less the maximum, exponential,
        sum, division), 2 for the sum over the window. For each token: g - 1 to add the group up and 1 to divide, and
        as much for an average of `kernel` tokens; a maximum is free.
        """
        voting = group * min(self.window, tokens) * tokens * (2 * size + 6)
        reducing = {"mean": group, "sum": group - 1, "max": 0}[self.reduce]
        pooling = self.kernel if self.pooling == "average" and self.kernel > 1 else 0
        return voting + tokens * (reducing + pooling)

    def _votes(self, held: Held, head: int, voters: Tensor) -> Tensor:
        """(b, n) float32: attention probability that the `voters` (b, w) give to the tokens of one kv head."""
        votes = head_votes(held, head, voters)
        if self.reduce == "max":
            return votes.amax(1)
        return votes.sum(1) if self.reduce == "sum" else votes.mean(1)
