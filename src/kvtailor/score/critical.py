"""CriticalKV: any score, weighed by how much a token's value can move the layer's output.

*Idea*: evicting a token changes the output by its attention times its value as the output projection maps it. The first
part of the budget goes to the tokens that rank highest by the score itself; for the rest each score is multiplied by
the L1 norm of the projected value.

*Paper*: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective", arXiv 2502.03805,
section 4; our `first` = its alpha, 0.5; our `epsilon` = what its code adds to a mean attention probability, 1e-4.

*Source*: the paper and a description of its implementation in kvpress (Apache-2.0).

*Departs*: norms are averaged over a kv head's query heads, as in that implementation. The first part is a share of the
mean budget per head, since a layer's own is not known when it is scored; the recent window counts for it. A score that
can be negative is first raised by its least value in each head: the paper's are attention weights. Where the inner
score is a sum of probabilities, `epsilon` is multiplied by the number of its terms, so it means what it means in the
paper. Where the inner score is no probability (a norm, an age, a projection), the paper has no epsilon for it: ours is
then that fraction of the sum of the raised scores that are weighed in the head, as the weights of one query sum to at
most 1.

*Cost*: that of the score, and one more output projection of all held values for each query head; float32 scratch of
`block` tokens times the model's width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.ops.lanes.topk import keep_top
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs
from kvtailor.types.checked_returns import check_scores, check_tensor
from kvtailor.types.late_checks import send

__all__ = ["Critical"]

# Elements of one block of projected values (8 MiB).
_BLOCK = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Critical(Scorer):
    """Another score times the norm of what a value becomes.

    Attributes:
        of: whose scores.
        first: fraction of the budget that goes by those scores alone.
        epsilon: added to each score before it is weighed, on the scale of a mean attention probability; of an inner
            score that is none, a fraction of the sum of the head's weighed scores.
    """

    of: Scorer
    first: float = 0.5
    epsilon: float = 1e-4
    examples: ClassVar[tuple[str, ...]] = ("critical(of=snapkv)", "critical(of=h2o)", "critical(of=position)")

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise ValueError(f"critical: first must be a fraction from 0 to 1, found {self.first}; the paper uses 0.5")
        if not self.epsilon >= 0:
            raise ValueError(f"critical: epsilon must be 0 or more, found {self.epsilon}; the paper's code uses 1e-4")

    @property
    def scope(self) -> str:
        return self.of.scope

    @property
    def slack(self) -> int | None:
        return self.of.slack

    @property
    def heads_alike(self) -> bool:
        return self.of.heads_alike

    @property
    def needs(self) -> Needs:
        # `previous` has this scorer's own scores, which are not those of the inner one.
        return replace(self.of.needs, output=True, previous=False, notes=0)

    @property
    def recent(self) -> int:
        return self.of.recent

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32; those of the first part lie above all others, in the order of the inner score.

        Raises:
            ValueError: no output projection or no budget was given, or what the inner score raises.
            MethodError: the inner score gives something else than scores.
        """
        if held.output is None or held.budget is None:
            raise ValueError(
                "critical weighs by the output projection and needs the budget, but the layer came without; observe "
                "with Needs(output=True)"
            )
        inner = check_scores(self.of, self.of.score(held), held.positions)
        lowest = inner.masked_fill(~held.valid, torch.inf).amin(-1, keepdim=True)
        inner = (inner - lowest.clamp(max=0.0)).masked_fill(~held.valid, 0.0)
        norms = torch.stack([self._norms(held, head) for head in range(held.keys.shape[1])], 1)

        lifted = inner.masked_fill(held.recent(self.of.recent), torch.inf).masked_fill(~held.valid, -torch.inf)
        share = (held.budget.double() * self.first).to(torch.int64)[:, None]
        there = send(share, inner.device), held.counts()
        chosen = keep_top(lifted, torch.minimum(*(there if held.front is None else (share, held.front))))
        weighed = (inner + self.epsilon * self._unit(held, inner, chosen)) * norms
        above = weighed.masked_fill(~held.valid, 0.0).amax(-1, keepdim=True) + 1.0
        order = inner / inner.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(chosen, above + order, weighed)

    def flops(self, *, tokens: int, group: int, size: int) -> int | None:
        """Not known: the width of the model, which each value is projected to, is no argument here."""
        return None

    def _unit(self, held: Held, inner: Tensor, chosen: Tensor) -> Tensor:
        """(b, 1, 1) or (b, h, 1) float32: what is 1 on the scale of the inner scores (b, h, n).

        Tokens that the score alone has `chosen` (b, h, n) do not count: some scores lift their sinks without measure.
        """
        assert held.output is not None
        scale = self.of.attention_scale(held, group=held.output.shape[0] // held.keys.shape[1])
        if scale is not None:
            rows = inner.shape[:1]
            return check_tensor(self.of, "attention_scale", scale, rows, torch.float32)[:, None, None].to(inner.device)
        whole = inner.masked_fill(chosen, 0.0).sum(-1, keepdim=True)
        # Scores that are all the same leave the choice to the values.
        return torch.where(whole > 0, whole, 1.0)

    def _norms(self, held: Held, head: int) -> Tensor:
        """(b, n) float32 L1 norms of the projected values of one kv head, averaged over its query heads."""
        assert held.output is not None
        heads = held.keys.shape[1]
        group = held.output.shape[0] // heads
        rows, tokens = held.values.shape[0], held.values.shape[2]
        norms = torch.zeros((rows, tokens), device=held.values.device, dtype=torch.float32)
        step = max(1, _BLOCK // (rows * held.output.shape[-1]))
        for query_head in range(head * group, (head + 1) * group):
            weight = held.output[query_head].float()
            for start in range(0, tokens, step):
                here = slice(start, start + step)
                norms[:, here] += (held.values[:, head, here].float() @ weight).abs().sum(-1)
        return norms / group
