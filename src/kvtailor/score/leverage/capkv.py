"""CapKV: the tokens without which the values that matter would span less.

*Idea*: what a kept set can say of the output is the volume that its values span, each weighed by how well its key fits
the queries to come: the log-determinant of A = I + sum_j w_j v_j v_j^T. To first order a token's part of it is its
weighed leverage, w_j v_j^T A^-1 v_j. The queries to come are the mean of those so far, turned by the mean rotation of
the positions to come.

*Paper*: "Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective" (CapKV), arXiv 2604.25975; our
`tau` = its temperature.

*Source*: the paper's abstract and a reading of kvpress (Apache-2.0), whose defaults these are; nothing was taken.

*Departs*: as in kvpress, the fit of a key is its cosine with the mean query, where the paper has the plain product, and
weights are relative to the highest of a head. The mean of the queries goes on while decoding, where tokens are evicted
again. A cap on logits and learned sinks have no part in it.

*Cost*: mean and covariance of the queries, 4 d (d + 1) bytes for each query head, of which the mean alone is used; for
each query head 3 n d^2 operations, float64, 2048 tokens at a time, and float32 scratch (n, d) of one kv head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtailor.method import Serves
from kvtailor.ops.lanes.leverage import gram, leverage_of
from kvtailor.ops.lanes.rotate import turn_on_average
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["CapKV"]

# What kvpress adds to a weight inside the matrix.
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class CapKV(Scorer):
    """Weighed leverage of values.

    Attributes:
        tau: how sharply keys are weighed by their cosine with the mean query.
        future: positions to come over which the rotation is averaged.
        sinks: first tokens of each row that always score highest and have no part in the matrix or the mean query.
    """

    tau: float = 5.0
    future: int = 512
    sinks: int = 4
    serves: ClassVar[Serves] = Serves(
        latents="it turns whole queries by their positions, "
        "and of a latent layer's keys only the last channels are turned",
        softcap=False,
        sinks=False,
    )

    def __post_init__(self) -> None:
        if not self.tau >= 0:
            raise ValueError(f"capkv: tau must be 0 or more, found {self.tau}; kvpress uses 5")
        if self.future < 1:
            raise ValueError(f"capkv: future must be at least 1 position, found {self.future}; kvpress uses 512")
        if self.sinks < 0:
            raise ValueError(f"capkv: sinks must be 0 or more tokens, found {self.sinks}; kvpress uses 4")

    @property
    def needs(self) -> Needs:
        return Needs(moments=True, moments_skip=self.sinks, rotation=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 from 0 to 1; 2 for the sinks.

        Raises:
            ValueError: no moments or no rotation were gathered.
        """
        if held.moments is None or held.rotation is None:
            raise ValueError(
                "capkv weighs keys by the mean of unturned queries, but none was gathered; observe with "
                "Needs(moments=True, rotation=True)"
            )
        ahead = zip(held.moments.mean, held.to_come(self.future), strict=True)
        anchor = normalize(torch.stack([turn_on_average(mean, at, held.rotation) for mean, at in ahead]), dim=-1)
        sink = held.valid & (held.positions < held.first[:, None, None] + self.sinks)
        weighed = held.valid & ~sink
        scores = torch.stack([self._head(held, weighed, head, anchor) for head in range(held.keys.shape[1])], 1)
        return scores.masked_fill(sink, 2.0)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n (3 d + g (3 d^2 + 5 d + 7)): the direction of a key, then for each query head.

        There 2 d + 3 make a weight, d + 1 weigh the value, 2 d^2 go to the matrix, d^2 to the solution, 2 d + 2 to its
        length and the sum, 1 to the mean. The factor of d^3 / 3 does not grow.
        """
        return tokens * (3 * size + group * (3 * size * size + 5 * size + 7))

    def _head(self, held: Held, weighed: Tensor, head: int, anchor: Tensor) -> Tensor:
        """(b, n) float32 of one kv head: the mean over its query heads; 0 for what is not `weighed`."""
        group = anchor.shape[1] // held.keys.shape[1]
        member, values = weighed[:, head], held.values[:, head]
        directions = normalize(held.keys[:, head].float(), dim=-1)
        total = torch.zeros(member.shape, device=values.device, dtype=torch.float32)
        for query_head in range(head * group, (head + 1) * group):
            fit = self.tau * (directions @ anchor[:, query_head, :, None])[..., 0].clamp_(-1.0, 1.0)
            # A finite fill: a row may hold nothing but sinks in this head.
            fit = fit.masked_fill(~member, torch.finfo(torch.float32).min)
            weight = (fit - fit.amax(-1, keepdim=True)).exp_().masked_fill_(~member, 0.0)
            capacity = gram(values, (weight + _EPSILON).masked_fill(~member, 0.0))
            total += weight * leverage_of(values, capacity, 1.0)
        return total / group
