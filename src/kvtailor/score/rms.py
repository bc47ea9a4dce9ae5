"""RMS: the tokens with the highest attention over reference queries, squared before it is averaged.

*Idea*: a token that one query needs badly is worth more than one that all look at a little. So the attention that
reference queries give a token is squared, averaged and put under a root. It is the choice that goes with `matching`,
and stands by itself.

*Paper*: zweiger2026matching, "Fast KV Compaction via Attention Matching", arXiv 2602.16284, keys of highest attention:
the root of the mean over queries of softmax(q K)^2.

*Source*: its repository adamzweiger/compaction (MIT) for facts, `score_method` "rms"; nothing was taken.

*Departs*: reference queries are the newest `window`, and `spread` over the text, turned to where the next token stands;
`repeat` takes some of a repetition of the context besides, where the paper takes all of one. The queries of a kv head's
whole group are averaged. The newest `window` tokens stay, as few queries see them. The paper's budgets of heads, made
for each model beforehand, are any allocator's here; its other choice, orthogonal matching pursuit, is not here, since
it ends after as many tokens as there are queries, of which it has 50,000.

*Cost*: the queries of `window` and `spread`; g * (window + spread) logits for each token, 32 queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.ops.attention.observed import lane_attention
from kvtailor.ops.attention.references import reference_queries
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs, Repetition

__all__ = ["RMS"]

_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class RMS(Scorer):
    """Root of the mean squared attention of reference queries.

    Attributes:
        window: newest queries that count, and newest tokens that always stay.
        spread: at most so many queries spread over the text that count.
        repeat: at most so many queries of a repetition of the context that count.
    """

    window: int = 32
    spread: int = 128
    repeat: int = 0
    serves: ClassVar[Serves] = Serves(latents="it turns queries, and only a part of those that read a latent turns")

    def __post_init__(self) -> None:
        if self.window < 1 or min(self.spread, self.repeat) < 0:
            raise ValueError(
                "rms: window must be at least 1 query, spread and repeat 0 or more, found "
                f"{self.window}, {self.spread} and {self.repeat}"
            )

    @property
    def needs(self) -> Needs:
        repetition = Repetition(chunk=2048, lead=8, sinks=4, queries=self.repeat) if self.repeat else None
        return Needs(window=self.window, rows=self.spread, rotation=self.spread > 0, reconstruction=repetition)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, 0 to 1.

        Raises:
            ValueError: no queries, or no rotation to turn them, were gathered.
        """
        if held.queries is None or (self.spread and (held.sampled is None or held.rotation is None)):
            raise ValueError(
                f"rms scores by the last {self.window} queries and {self.spread} spread ones, which it turns, and did "
                f"not get all of it; observe with {self.needs}"
            )
        found = torch.zeros(held.positions.shape, dtype=torch.float32, device=held.keys.device)
        for row in range(found.shape[0]):
            for head in range(found.shape[1]):
                there, softmax = held.there(row, head), held.softmax_of(head)
                keys, positions = held.keys[row, head][there], held.positions[row, head][there]
                weight = None if held.log_weight is None else held.log_weight[row, head][there]
                queries, columns = reference_queries(held, row, head, turned=self.spread > 0)
                total = torch.zeros(keys.shape[0], dtype=torch.float32, device=keys.device)
                for some, until in zip(queries.split(_BLOCK, 1), columns.split(_BLOCK), strict=True):
                    given = lane_attention(some, until, keys, positions, held.scaling, weight, softmax)
                    total += given.square_().sum((0, 1))
                count = queries.shape[0] * (columns >= 0).sum()
                found[row, head, there] = (total / count.clamp(min=1)).sqrt_()
        return found

    def attention_scale(self, held: Held, *, group: int) -> Tensor:
        """(b,) ones: scores are means, of squares, of single probabilities."""
        return torch.ones_like(held.first, dtype=torch.float32)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g m n (2 d + 6) for m queries: 2 d for the logit, 4 for its softmax, 2 for the sum of squares."""
        return group * min(self.window + self.spread + self.repeat, 2 * tokens) * tokens * (2 * size + 6)
