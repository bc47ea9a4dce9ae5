"""Steps: a draft that decodes token by token, from a smaller model or from the target's own over a smaller cache.

*Idea*: the same weights over a compressed cache predict most of the tokens that they give over the full one, and a
small model predicts much of what a large one gives.
*Paper*: Leviathan et al., arXiv 2211.17192 (a draft model); Sun et al., arXiv 2404.11912, section 4.1 (the same weights
over a retrieved part of the cache).
*Source*: the papers.
*Departs*: any plan may hold the draft's cache. It acts when a round is over; drafted tokens wait in the tail until
then.
*Cost*: one forward for each drafted token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.speculate.contract import Draft, Proposal, Reader, Rule
from kvtailor.speculate.rounds import joined, next_token

__all__ = ["Steps"]


class Steps(Draft):
    """One token after the other.

    Args:
        reader: of the draft's cache.
        rule: the target's, so that its probabilities are cut alike.
    """

    def __init__(self, reader: Reader, rule: Rule):
        self.reader, self.rule = reader, rule

    def propose(self, ids: Tensor, count: int) -> Proposal:
        """See `Draft.propose`."""
        found: list[Proposal] = []
        for _ in range(count):
            found.append(next_token(self.reader, self.rule, ids))
            ids = torch.cat([ids, found[-1].tokens], 1)
        return joined(found)

    def retract(self, length: int) -> None:
        """See `Draft.retract`."""
        self.reader.retract(length)

    def settle(self) -> None:
        """See `Draft.settle`."""
        self.reader.settle()
