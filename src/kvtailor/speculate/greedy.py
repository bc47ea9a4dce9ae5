"""Greedy: the likeliest token, and a drafted one is right if it is that.

*Idea*: of each logit row only the place of its maximum is kept. A drafted token is accepted where it is the target's
own choice, and the first that is not is replaced by it.
*Paper*: Leviathan et al., arXiv 2211.17192, section 2.3, at temperature 0.
*Source*: the paper.
*Departs*: ties go to the lowest token, as torch's argmax and so transformers' greedy decoding has it.
*Cost*: one maximum over the vocabulary for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.speculate.contract import Acceptance, Proposal, Rule

__all__ = ["Greedy"]


@dataclass(frozen=True, kw_only=True)
class Greedy(Rule):
    """Keeps (...) int64 token ids."""

    def prediction(self, logits: Tensor) -> Tensor:
        """See `Rule.prediction`."""
        return logits.argmax(-1)

    def pick(self, prediction: Tensor) -> Tensor:
        """See `Rule.pick`."""
        return prediction

    def judge(self, target: Tensor, proposal: Proposal) -> Acceptance:
        """See `Rule.judge`."""
        right = (target[:, :-1] == proposal.tokens).to(torch.int64)
        accepted = right.cumprod(1).sum(1)
        return Acceptance(accepted=accepted, following=target.gather(1, accepted[:, None])[:, 0])
