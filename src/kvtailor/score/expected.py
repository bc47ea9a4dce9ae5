"""Expected Attention: the tokens that queries still to come are expected to look at.

*Idea*: the queries of a head, before their rotation, are taken as normally distributed. Their mean and covariance over
the prompt, turned by the mean rotation of the positions to come, give the expected unnormalised attention of each key
in closed form. Times the length of its value, that is what a token is expected to add to the output.

*Paper*: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution", arXiv
2510.00636, section 3; our `future` = its number of future positions, 512.

*Source*: the paper's formulas and a description of its implementation in kvpress (Apache-2.0).

*Departs*: the model's own factor stands for 1 / sqrt(d). The statistics go on while decoding, where tokens are evicted
again; the paper's are those of the prompt. Each head of a group is weighed alone, without the sinks, then averaged, as
in its implementation; a learned sink of the model's is one more expected weight of its head. Under a cap on logits the
expectation has no closed form, and the method is refused.

*Cost*: mean and covariance, 4 d (d + 1) bytes for each query head; O(q n d^2) time, and float32 scratch (n, d) for one
head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.ops.lanes.rotate import turn_on_average
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["Expected"]


@dataclass(frozen=True, kw_only=True)
class Expected(Scorer):
    """Expected attention of future queries, times the norm of the value.

    Attributes:
        future: positions to come over which the rotation is averaged.
        sinks: first tokens of each row that always score highest and are no part of the statistics.
        covariance: use the second moments too; without them a key is weighed by the mean query alone.
        value_norm: multiply by the Euclidean norm of the value.
        epsilon: added to each expected attention before that.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    splits_heads: ClassVar[bool] = True
    latent_refusal: ClassVar[str | None] = (
        "it turns whole keys by their positions, and of a latent layer's keys only the last channels are turned"
    )
    knows_sinks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.future < 1:
            raise ValueError(f"expected: future must be at least 1 position, found {self.future}; the paper uses 512")
        if self.sinks < 0:
            raise ValueError(f"expected: sinks must be 0 or more tokens, found {self.sinks}; the paper uses 4")
        if not self.epsilon >= 0:
            raise ValueError(f"expected: epsilon must be 0 or more, found {self.epsilon}; the paper uses 0")

    @property
    def needs(self) -> Needs:
        return Needs(moments=True, moments_skip=self.sinks, rotation=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: a probability times a norm; the sinks lie above all others of their head.

        Raises:
            ValueError: no moments or no rotation were gathered.
        """
        if held.moments is None or held.rotation is None:
            raise ValueError(
                "expected scores by the moments of unturned queries, but none were gathered; observe with "
                "Needs(moments=True, rotation=True)"
            )
        positions = torch.arange(held.seen, held.seen + self.future, device=held.keys.device)
        mean = turn_on_average(held.moments.mean, positions, held.rotation)
        spread = None
        if self.covariance:
            # R S R^T: the rows of S are turned, then those of what comes out, transposed.
            spread = held.moments.covariance()
            for _ in range(2):
                spread = turn_on_average(spread, positions, held.rotation).transpose(-1, -2)
        heads = held.keys.shape[1]
        sink = held.valid & (held.positions < held.first[:, None, None] + self.sinks)
        weighed = held.valid & ~sink
        scores = torch.stack([self._head(held, weighed, head, mean, spread) for head in range(heads)], 1)
        if self.value_norm:
            scores = (scores + self.epsilon) * _norms(held.values)
        scores = scores.masked_fill(~held.valid, 0.0)
        return torch.where(sink, scores.amax(-1, keepdim=True) + 1.0, scores)

    def attention_scale(self, held: Held, *, group: int) -> Tensor | None:
        """(b,) ones without `value_norm`; with it a score is a probability times a length, and this is None."""
        return None if self.value_norm else torch.ones_like(held.first, dtype=torch.float32)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g n (2 d + 4) for the mean, g n (2 d^2 + 2 d + 2) more with the covariance, n (2 d + 2) for the values."""
        each = group * (2 * size + 4)
        if self.covariance:
            each += group * (2 * size * size + 2 * size + 2)
        return tokens * (each + (2 * size + 2 if self.value_norm else 0))

    def _head(self, held: Held, weighed: Tensor, head: int, mean: Tensor, spread: Tensor | None) -> Tensor:
        """(b, n) float32 expected attention of a kv head among its `weighed` tokens, averaged over its query heads."""
        group = mean.shape[1] // held.keys.shape[1]
        keys = held.keys[:, head].float()
        total = torch.zeros(keys.shape[:2], device=keys.device)
        for query_head in range(head * group, (head + 1) * group):
            logits = held.scaling * (keys @ mean[:, query_head, :, None])[..., 0]
            if spread is not None:
                logits += held.scaling**2 / 2 * ((keys @ spread[:, query_head]) * keys).sum(-1)
            # A finite fill: a row may hold nothing but sinks in this head.
            logits = logits.masked_fill(~weighed[:, head], torch.finfo(torch.float32).min)
            own = held.softmax.of_heads(query_head, 1)
            # (b, 1, 1, n): one query head, and its expectation in place of a query.
            total += own.probabilities_(logits[:, None, None])[:, 0, 0]
        return total / group


def _norms(values: Tensor) -> Tensor:
    return torch.stack([values[:, head].float().norm(dim=-1) for head in range(values.shape[1])], 1)
