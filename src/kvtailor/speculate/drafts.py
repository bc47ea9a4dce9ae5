"""Where drafted tokens come from: a model over its own cache, token by token, or rounds with a still smaller one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError
from kvtailor.speculate.contract import Draft, Proposal, Reader, Rule
from kvtailor.speculate.rounds import Level, joined, next_token, verified

__all__ = ["Steps", "Hierarchy"]


class Steps(Draft):
    """Draft token by token, with a smaller model or with the target's own weights over a smaller cache.

    *Idea*: the same weights over a compressed cache predict most of the tokens that they give over the full one, and a
    small model predicts much of what a large one gives.
    *Paper*: Leviathan et al., arXiv 2211.17192 (a draft model); Sun et al., arXiv 2404.11912, section 4.1 (the same
    weights over a retrieved part of the cache).
    *Source*: the papers.
    *Departs*: any plan may hold the draft's cache. It acts when a round is over; drafted tokens wait in the tail until
    then.
    *Cost*: one forward for each drafted token.

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


class Hierarchy(Draft):
    """Draft tokens that a smaller draft proposed and a cache in the middle verified.

    *Idea*: the smallest model guesses a few tokens, the target's weights over a part of the cache verify them, and the
    tokens that they accept are the draft for the full cache, which is read least often.
    *Paper*: Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative
    Decoding", arXiv 2404.11912, section 4.2 and algorithm 1.
    *Source*: the paper; and a description of two implementations, whose inner rejections draw from p instead of
    (p - q)+, so that what they emit is not distributed as the outer test assumes.
    *Departs*: the inner draft proposes `inner` tokens at once, where the implementations propose one. The last token of
    a proposal is never drafted, since one verification gives it anyway.
    *Cost*: a forward of the middle cache for each inner round.

    Args:
        reader: of the middle cache.
        draft: proposes tokens to the middle cache.
        rule: the target's.
        inner: tokens that are proposed to the middle cache at once.
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
