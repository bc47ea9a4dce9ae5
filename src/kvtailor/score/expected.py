"""Expected Attention: the tokens that queries still to come are expected to look at.

*Idea*: the queries of a head, before their rotation, are taken as normally distributed. Their mean and covariance over
the prompt, turned by the mean rotation of the positions to come, give the expected unnormalised attention of each key
in closed form. Times the length of its value, that is what a token is expected to add to the output.

*Paper*: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution", arXiv
2510.00636, section 3; our `future` = its number of future positions, 512. With `static` the statistics are those of a
file, measured on texts, as kvpress has it beside the paper's.

*Source*: the paper's formulas and a description of its implementation in kvpress (Apache-2.0).

*Departs*: the paper also shares a layer's budget among its heads by their scores: that is the preset
`expected_attention`, and `expected` is its score alone. The model's own factor stands for 1 / sqrt(d). The statistics
go on while decoding, where tokens are evicted again; the paper's are those of the prompt. Each head of a group is
weighed alone, without the sinks, then averaged, as in its implementation; a learned sink of the model's is one more
expected weight of its head. Under a cap on logits the expectation has no closed form, and the method is refused.

*Cost*: mean and covariance, 4 d (d + 1) bytes for each query head; O(q n d^2) time, and float32 scratch (n, d) for one
head at a time. With `static` a file of as many bytes for each query head of each layer, and nothing is observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.method import Serves
from kvtailor.ops.lanes.rotate import turn_on_average
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs, Rotation

__all__ = ["Expected"]


@dataclass(frozen=True, kw_only=True)
class Expected(CalibratedMethod, Scorer):
    """Expected attention of future queries, times the norm of the value.

    Attributes:
        future: positions to come over which the rotation is averaged.
        sinks: first tokens of each row that always score highest and are no part of the statistics.
        covariance: use the second moments too; without them a key is weighed by the mean query alone.
        value_norm: multiply by the Euclidean norm of the value.
        epsilon: added to each expected attention before that.
        static: take mean and covariance of a calibration and not those of the prompt.
        file: of `kvtailor calibrate expected`, with `static`.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    static: bool = False
    calibrates: ClassVar[str] = "expected"
    per_head: ClassVar[tuple[str, ...]] = ("query_mean", "query_spread")
    examples: ClassVar[tuple[str, ...]] = ("expected", "expected(static=true)")
    sees_attention: ClassVar[bool] = True  # that of queries which are to come
    serves: ClassVar[Serves] = Serves(
        latents="it turns whole keys by their positions, "
        "and of a latent layer's keys only the last channels are turned",
        softcap=False,
    )

    def __post_init__(self) -> None:
        if self.file is not None and not self.static:
            raise ValueError("expected: a file is named, but statistics are to be the prompt's: write static=true too")
        super().__post_init__()
        if self.future < 1:
            raise ValueError(f"expected: future must be at least 1 position, found {self.future}; the paper uses 512")
        if self.sinks < 0:
            raise ValueError(f"expected: sinks must be 0 or more tokens, found {self.sinks}; the paper uses 4")
        if not self.epsilon >= 0:
            raise ValueError(f"expected: epsilon must be 0 or more, found {self.epsilon}; the paper uses 0")

    @property
    def wants_calibration(self) -> bool:
        return self.static

    @property
    def needs(self) -> Needs:
        if self.static:
            return Needs(rotation=True)
        return Needs(moments=True, moments_skip=self.sinks, rotation=True)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: a probability times a norm; the sinks lie above all others of their head.

        Raises:
            ValueError: no moments, or no calibration where `static`, or no rotation were given.
        """
        mean, spread = self._to_come(held)
        heads = held.keys.shape[1]
        sink = held.valid & (held.positions < held.first[:, None, None] + self.sinks)
        weighed = held.valid & ~sink
        scores = torch.stack([self._head(held, weighed, head, mean, spread) for head in range(heads)], 1)
        if self.value_norm:
            scores = (scores + self.epsilon) * _norms(held.values)
        scores = scores.masked_fill(~held.valid, 0.0)
        return torch.where(sink, scores.amax(-1, keepdim=True) + 1.0, scores)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Mean (layers, heads, group, d) and covariance (layers, heads, group, d, d) of random queries."""
        queries = torch.randn(layers, heads, group, 2 * size, size, generator=generator, dtype=torch.float32)
        apart = queries - queries.mean(-2, keepdim=True)
        return {"query_mean": queries.mean(-2), "query_spread": apart.mT @ apart / (2 * size)}

    def attention_scale(self, held: Held, *, group: int) -> Tensor | None:
        """(b,) ones without `value_norm`; with it a score is a probability times a length, and this is None."""
        return None if self.value_norm else torch.ones_like(held.first, dtype=torch.float32)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g n (2 d + 4) for the mean, g n (2 d^2 + 2 d + 2) more with the covariance, n (2 d + 2) for the values."""
        each = group * (2 * size + 4)
        if self.covariance:
            each += group * (2 * size * size + 2 * size + 2)
        return tokens * (each + (2 * size + 2 if self.value_norm else 0))

    def _to_come(self, held: Held) -> tuple[Tensor, Tensor | None]:
        """(b, q, d) mean and (b, q, d, d) covariance of the queries to come, turned; None without `covariance`."""
        if held.rotation is None or (held.moments is None and not self.static):
            raise ValueError(
                "expected scores by the moments of unturned queries, but none were gathered; observe with "
                "Needs(moments=True, rotation=True)"
            )
        ahead = held.to_come(self.future)
        if not self.static:
            assert held.moments is not None
            means = held.moments.mean
            spreads = held.moments.covariance() if self.covariance else held.moments.spread
        elif held.calibration is None or not set(self.per_head) <= set(held.calibration):
            raise ValueError("expected(static=true) needs calibrated statistics; see `kvtailor calibrate expected`")
        else:
            # Of queries turned back by their own positions, where the prompt's are turned back by columns: a row's
            # padding is no position.
            ahead = torch.arange(self.future, device=held.keys.device) + (held.seen - held.first)[:, None]
            of_file = (held.calibration[name].to(held.keys.device, torch.float32) for name in self.per_head)
            means, spreads = (each.flatten(0, 1).expand(len(ahead), *[-1] * (each.ndim - 1)) for each in of_file)
        rows = [
            _turned(mean, spread if self.covariance else None, at, held.rotation)
            for mean, spread, at in zip(means, spreads, ahead, strict=True)
        ]
        covariances = [each for _, each in rows if each is not None]
        return torch.stack([each for each, _ in rows]), torch.stack(covariances) if covariances else None

    def _head(self, held: Held, weighed: Tensor, head: int, mean: Tensor, spread: Tensor | None) -> Tensor:
        """(b, n) float32 expected attention of a kv head among its `weighed` tokens, averaged over its query heads."""
        group = mean.shape[1] // held.keys.shape[1]
        keys = held.keys[:, head].float()
        total = torch.zeros(keys.shape[:2], device=keys.device, dtype=torch.float32)
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


def _turned(mean: Tensor, spread: Tensor | None, positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor | None]:
    """Mean (..., d) and covariance (..., d, d) turned by the mean rotation of some positions."""
    if spread is not None:
        # R S R^T: the rows of S are turned, then those of what comes out, transposed.
        for _ in range(2):
            spread = turn_on_average(spread, positions, rotation).transpose(-1, -2)
    return turn_on_average(mean, positions, rotation), spread


def _norms(values: Tensor) -> Tensor:
    return torch.stack([values[:, head].float().norm(dim=-1) for head in range(values.shape[1])], 1)
