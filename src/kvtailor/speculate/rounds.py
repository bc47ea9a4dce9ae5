"""One round: a draft proposes, a reader reads all of it at once, and the rule decides how far it is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.speculate.contract import Proposal, Reader, Rule
from kvtailor.speculate.statistics import Level

__all__ = ["Round", "joined", "next_token", "verified"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round gave.

    Attributes:
        tokens: (b, m + 1), m the length of the shortest accepted run among the rows.
        prediction: (b, m + 1, ...) the reader's prediction for each of them, as the rule keeps it.
        accepted, judged: over the rows, drafted tokens that were accepted, and those that were judged.
    """

    tokens: Tensor
    prediction: Tensor
    accepted: int
    judged: int


def verified(reader: Reader, rule: Rule, ids: Tensor, proposal: Proposal, live: Tensor | None, level: Level) -> Round:
    """Judges a proposal and counts it; reader and draft are left for the caller to retract.

    Args:
        reader: of the target.
        rule: which also drew the proposal.
        ids: (b, n) columns so far.
        proposal: k tokens.
        live: (b,) bool: rows that still go on, the only ones that count; None: all.
        level: where it is counted.
    """
    count = proposal.tokens.shape[1]
    block = torch.cat([ids[:, reader.seen :], proposal.tokens], 1)
    prediction = rule.prediction(reader.read(block, count + 1))
    judged = rule.judge(prediction, proposal)
    alone = torch.ones_like(judged.accepted, dtype=torch.bool) if live is None else live
    runs = judged.accepted[alone].tolist()
    shortest = min(runs)
    following = judged.following
    if shortest < count:
        following = torch.where(judged.accepted > shortest, proposal.tokens[:, shortest], following)
    accepted, tried = sum(runs), sum(min(run + 1, count) for run in runs)
    level.accepted += accepted
    level.proposed += tried
    level.verifications += len(runs)
    return Round(
        tokens=torch.cat([proposal.tokens[:, :shortest], following[:, None]], 1),
        prediction=prediction[:, : shortest + 1],
        accepted=accepted,
        judged=tried,
    )


def next_token(reader: Reader, rule: Rule, ids: Tensor) -> Proposal:
    """The one token (b, 1) that follows the columns `ids` (b, n), and the reader's prediction for it."""
    prediction = rule.prediction(reader.read(ids[:, reader.seen :], 1)[:, 0])
    return Proposal(tokens=rule.pick(prediction)[:, None], prediction=prediction[:, None])


def joined(proposals: list[Proposal]) -> Proposal:
    """Proposals that follow each other, as one."""
    return Proposal(
        tokens=torch.cat([each.tokens for each in proposals], 1),
        prediction=torch.cat([each.prediction for each in proposals], 1),
    )
