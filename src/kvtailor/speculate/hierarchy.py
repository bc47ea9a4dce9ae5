"""Hierarchy: a draft whose tokens were themselves drafted, by a smaller one, and verified by its own cache.

*Idea*: the smallest model guesses a few tokens, the target's weights over a part of the cache verify them, and the
tokens that they accept are the draft for the full cache, which is read least often.
*Paper*: Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative
Decoding", arXiv 2404.11912, section 4.2 and algorithm 1.
*Source*: the paper; and a description of two implementations, whose inner rejections draw from p instead of (p - q)+,
so that what they emit is not distributed as the outer test assumes.
*Departs*: the inner draft proposes `inner` tokens at once, where the implementations propose one. The last token of a
proposal is never drafted, since one verification gives it anyway.
*Cost*: a forward of the middle cache for each inner round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError
from kvtailor.speculate.contract import Draft, Proposal, Reader, Rule
from kvtailor.speculate.rounds import joined, next_token, verified
from kvtailor.speculate.statistics import Level

__all__ = ["Hierarchy"]


class Hierarchy(Draft):
    """Speculation as a draft.

    Args:
        reader: of the middle cache.
        draft: for it.
        rule: the target's.
        inner: tokens that are drafted at once inside.
        level: where inner rounds are counted.
    """

    def __init__(self, reader: Reader, draft: Draft, rule: Rule, inner: int, level: Level):
        if inner < 1:
            raise ArgumentError(f"inner_gamma must be at least 1 drafted token, found {inner}")
        self.reader, self.draft, self.rule, self.inner, self.level = reader, draft, rule, inner, level

    def propose(self, ids: Tensor, count: int) -> Proposal:
        """See `Draft.propose`. Each token is distributed as the middle cache predicts."""
        found: list[Proposal] = []
        missing = count
        while missing:
            inner = min(self.inner, missing - 1)
            if inner:
                before = ids.shape[1]
                given = verified(self.reader, self.rule, ids, self.draft.propose(ids, inner), None, self.level)
                right = before + given.tokens.shape[1] - 1
                self.reader.retract(right)
                self.draft.retract(right)
                self.level.emitted += given.tokens.numel()
                found.append(Proposal(tokens=given.tokens, prediction=given.prediction))
            else:
                found.append(next_token(self.reader, self.rule, ids))
            ids = torch.cat([ids, found[-1].tokens], 1)
            missing -= found[-1].tokens.shape[1]
        return joined(found)

    def retract(self, length: int) -> None:
        """See `Draft.retract`."""
        self.reader.retract(length)
        self.draft.retract(length)

    def settle(self) -> None:
        """See `Draft.settle`."""
        self.reader.settle()
        self.draft.settle()
