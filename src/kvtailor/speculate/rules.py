"""How tokens are chosen, and drafted ones judged: greedily, or by sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError
from kvtailor.speculate.contract import Acceptance, Proposal, Rule

__all__ = ["Greedy", "Sampling"]


@dataclass(frozen=True, kw_only=True)
class Greedy(Rule):
    """Choose the likeliest token, and accept a drafted one where it is that token.

    *Idea*: of each logit row only the place of its maximum is kept. A drafted token is accepted where it is the
    target's own choice, and the first that is not is replaced by it.
    *Paper*: Leviathan et al., arXiv 2211.17192, section 2.3, at temperature 0.
    *Source*: the paper.
    *Departs*: ties go to the lowest token, as torch's argmax and so transformers' greedy decoding has it.
    *Cost*: one maximum over the vocabulary for each token.

    A prediction is (...) int64 token ids.
    """

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


@dataclass(frozen=True, kw_only=True)
class Sampling(Rule):
    """Accept a drafted token with probability min(1, p / q), and else draw another from what q lacks of p.

    *Idea*: where the draft's distribution is q and the target's p, accepting x ~ q with min(1, p(x) / q(x)) gives
    min(p, q), and drawing from (p - q)+ otherwise gives the rest of p: together exactly p. After a run that was
    accepted whole, one more token comes from the target's own next distribution.
    *Paper*: Leviathan et al., arXiv 2211.17192, section 2.3 and appendix A.1; Chen et al., arXiv 2302.01318,
    algorithm 2.
    *Source*: the papers.
    *Departs*: nothing known. Temperature, then top-k, then top-p cut both p and q, as transformers orders them. Where
    rounding leaves nothing of (p - q)+, the token comes from p.
    *Cost*: one softmax over the vocabulary for each token, and a sort with top-p.

    A prediction is (..., v) float32 probabilities.

    Attributes:
        temperature: above 0; the logits are divided by it.
        top_k: only so many likeliest tokens; None: all.
        top_p: only the likeliest tokens that together have this probability; 1: all.
        generator: of random numbers, on the logits' device; None: torch's own.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ArgumentError(f"sampling: temperature must be above 0, found {self.temperature}; use greedy for 0")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"sampling: top_p must be above 0 and at most 1, found {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"sampling: top_k must be at least 1 token, found {self.top_k}; leave it out for all")

    def prediction(self, logits: Tensor) -> Tensor:
        """See `Rule.prediction`."""
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, -1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
            share = ordered.softmax(-1)
            before = share.cumsum(-1) - share
            # The likeliest token always stays.
            before[..., 0] = 0.0
            cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            scaled = scaled.masked_fill(cut, -torch.inf)
        return scaled.softmax(-1)

    def pick(self, prediction: Tensor) -> Tensor:
        """See `Rule.pick`. Weights need not sum to 1."""
        below = prediction.double().cumsum(-1)
        total = below[..., -1:]
        drawn = total * torch.rand(total.shape, generator=self.generator, device=prediction.device, dtype=torch.float64)
        # A product that is rounded up to the total still stops at the last token that has a probability.
        return ((below <= drawn) & (below < total)).sum(-1)

    def judge(self, target: Tensor, proposal: Proposal) -> Acceptance:
        """See `Rule.judge`."""
        tokens, draft = proposal.tokens[..., None], proposal.prediction
        p, q = target[:, :-1].gather(-1, tokens)[..., 0], draft.gather(-1, tokens)[..., 0]
        chance = torch.rand(p.shape, generator=self.generator, device=p.device, dtype=p.dtype)
        accepted = (chance * q < p).to(torch.int64).cumprod(1).sum(1)
        rows = torch.arange(target.shape[0], device=target.device)
        whole = target[rows, accepted]
        rejected = (accepted < draft.shape[1])[:, None]
        prediction = draft[rows, accepted.clamp(max=draft.shape[1] - 1)]
        lacking = (whole - prediction).clamp(min=0)
        some = lacking.sum(-1, keepdim=True) > 0
        return Acceptance(accepted=accepted, following=self.pick(torch.where(rejected & some, lacking, whole)))
