"""One round, and what a run counts: a draft proposes, a reader reads all of it at once, and the rule judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtailor.speculate.contract import Proposal, Reader, Rule

__all__ = ["Level", "Statistics", "Round", "joined", "next_token", "verified"]


@dataclass(kw_only=True)
class Level:
    """Counts of one draft and of what verifies it, summed over rows.

    Attributes:
        proposed: drafted tokens that were judged: up to and including the first rejection of each round.
        accepted: how many of these were accepted.
        verifications: forwards of the verifying cache that judged a draft.
        emitted: tokens that they gave, the replacement or the one more that ends each of them included.
    """

    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
    emitted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Return the share of proposed tokens that were accepted; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def emitted_per_verification(self) -> float | None:
        """Return a mean between 1 and k + 1; None without a verification."""
        return self.emitted / self.verifications if self.verifications else None


@dataclass(kw_only=True)
class Statistics:
    """Counts of a run, first token and prompt left out.

    Attributes:
        levels: the target and what drafts for it first; in a hierarchy then what drafts inside. Empty without a draft.
        tokens: emitted by each row.
        plain_tokens: of these, by plain decoding.
        seconds: for all of them.
        plain_seconds: a token of plain decoding in the same run, the median; None where none was timed.
    """

    levels: tuple[Level, ...] = field(default_factory=tuple)
    tokens: int = 0
    plain_tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float | None = None

    @property
    def acceptance(self) -> float | None:
        """Return the share of drafted tokens that the target accepted; None where it judged none."""
        return self.levels[0].acceptance if self.levels else None

    @property
    def emitted_per_verification(self) -> float | None:
        """Return how many tokens a verification of the target gave; None without one."""
        return self.levels[0].emitted_per_verification if self.levels else None

    @property
    def speed_up(self) -> float | None:
        """Measured: the time that so many plain tokens would have taken over the time that was taken.

        None where no plain token was timed in the run: `min_gain=None`, or a run that was over too soon.
        """
        if self.plain_seconds is None or not self.seconds:
            return None
        return self.tokens * self.plain_seconds / self.seconds


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


def verified(
    reader: Reader,
    rule: Rule,
    ids: Tensor,
    proposal: Proposal,
    live: Tensor | None,
    level: Level,
    *,
    over: Tensor | None = None,
    pad: int = 0,
) -> Round:
    """Judge a proposal and count it; the caller retracts reader and draft.

    Args:
        reader: of the target.
        rule: which also drew the proposal.
        ids: (b, n) columns so far.
        proposal: k tokens.
        live: (b,) bool: rows that still go on, the only ones that count; None: all.
        level: where it is counted.
        over: (b, k) bool: proposed tokens behind the end of a row's text. The reader reads `pad` in their place, which
            is what the text has there, and they count for nothing; None: there are none.
        pad: see `over`.
    """
    count = proposal.tokens.shape[1]
    over = torch.zeros_like(proposal.tokens, dtype=torch.bool) if over is None else over
    block = torch.cat([ids[:, reader.seen :], proposal.tokens.masked_fill(over, pad)], 1)
    prediction = rule.prediction(reader.read(block, count + 1))
    judged = rule.judge(prediction, proposal)
    own = count - over.sum(1)
    # A row that has ended holds no other row back.
    accepted_runs = torch.where(judged.accepted < own, judged.accepted, count)
    alone = torch.ones_like(judged.accepted, dtype=torch.bool) if live is None else live
    shortest = int(accepted_runs[alone].min())
    following = judged.following
    if shortest < count:
        following = torch.where(accepted_runs > shortest, proposal.tokens[:, shortest], following)
    runs = list(zip(torch.minimum(judged.accepted, own)[alone].tolist(), own[alone].tolist(), strict=True))
    accepted, tried = sum(run for run, _ in runs), sum(min(run + 1, most) for run, most in runs)
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
    """Return the one token (b, 1) that follows the columns `ids` (b, n), and the reader's prediction for it."""
    prediction = rule.prediction(reader.read(ids[:, reader.seen :], 1)[:, 0])
    return Proposal(tokens=rule.pick(prediction)[:, None], prediction=prediction[:, None])


def joined(proposals: list[Proposal]) -> Proposal:
    """Return proposals that follow each other as one."""
    return Proposal(
        tokens=torch.cat([each.tokens for each in proposals], 1),
        prediction=torch.cat([each.prediction for each in proposals], 1),
    )
