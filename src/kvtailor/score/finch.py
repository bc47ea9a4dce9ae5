"""Finch: the tokens that the question at the end of the prompt looks at.

*Idea*: a prompt is a text and a question behind it. What all tokens of the question attend to is what the answer needs.
A later query spreads its attention over more tokens, so each one's probabilities are multiplied by how many tokens it
sees before all are averaged. The question itself stays.

*Paper*: "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models", TACL 2024, arXiv 2408.00167; our
`window` = the tokens of its prompt.

*Source*: the paper's abstract and a reading of kvpress (Apache-2.0); nothing was taken.

*Departs*: the paper reads the text in chunks, the question behind each; here a prompt is cut once, as in kvpress by
default. kvpress finds the question by a delimiter token, here its length is given. Keys are turned to their new places
by the attention `rolling`, and not here. When tokens are evicted again, a query counts the tokens before it that are
still held.

*Cost*: the last `window` queries; time and scratch O(q * window * n), one kv head at a time, so the scratch is float32
(b, g * window, n).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.ops.attention.observed import observed_queries
from kvtailor.ops.attention.votes import head_votes
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["Finch"]


@dataclass(frozen=True, kw_only=True)
class Finch(Scorer):
    """Mean attention of a question.

    Attributes:
        window: tokens of the question: newest queries that vote, and newest tokens that always stay.
        normalise: multiply each query's probabilities by the number of tokens before it.
    """

    window: int
    normalise: bool = True
    examples: ClassVar[tuple[str, ...]] = ("finch(window=24)",)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"finch: window must be at least 1 token, found {self.window}; give the question's length")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, not negative; what it gives to the window is of no account, since that stays anyway.

        Raises:
            ValueError: no queries were gathered.
        """
        _, columns = observed_queries(held, "finch scores by", self.window)
        voters = held.held_by_first().float()
        scores = []
        for head in range(held.keys.shape[1]):
            weights = voters
            if self.normalise:
                weights = voters * _before(held.positions[:, head], held.valid[:, head], columns)
            votes = head_votes(held, head, weights)
            scores.append(votes.mean(1) / voters.sum(-1, keepdim=True).clamp(min=1))
        return torch.stack(scores, 1)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g w n (2 d + 6) + n (g + 1), w queries.

        For each query and token: 2 d for the logit, 4 for its softmax, 2 for the weighed sum, which without
        `normalise` it is too. For each token: the mean over the group, and over the queries.
        """
        return group * min(self.window, tokens) * tokens * (2 * size + 6) + tokens * (group + 1)


def _before(positions: Tensor, valid: Tensor, columns: Tensor) -> Tensor:
    """(b, w) float32: how many held tokens (b, n) come before each of the columns (w,)."""
    # Invalid slots lie past all columns, so that each row ascends.
    ascending = positions.masked_fill(~valid, torch.iinfo(torch.int64).max).sort(-1).values
    return torch.searchsorted(ascending, columns.expand(positions.shape[0], -1).contiguous()).float()
