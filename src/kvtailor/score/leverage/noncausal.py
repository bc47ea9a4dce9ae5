"""Non-causal attention: the tokens that the text around them looks at, before them or behind.

*Idea*: a text is cut into chunks, and all queries of a chunk attend to all of its keys, those that come later among
them. What a token gets is not biased towards early tokens, as a sum over a causal mask is, and costs no n x n matrix.
Times the length of its value, and smoothed over three tokens, that is its score.

*Paper*: "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores", arXiv 2507.08143;
our `chunk` = its chunk size, 256 in kvpress and 128 in the paper's own engine.

*Source*: the paper's abstract, and a reading of kvpress (Apache-2.0) and of the paper's own engine (MIT); nothing was
taken.

*Departs*: logits have no factor before the softmax, as there; `scaled` takes the model's. A last chunk that is shorter
is a softmax over its own tokens; in kvpress 0.5.5 the missing ones take part with logits of 0. At most `rows` queries,
spread evenly over the text, are looked at: all of a shorter text, and of a longer one every second, fourth ... . When
tokens are evicted again, chunks are cut from what is held, and the queries are those of tokens that are held. Scores
are not normalised over a layer, which leaves the order as it is.

*Cost*: `rows` queries, q * rows * d elements of the cache's dtype in each layer until the first token is decoded,
however short the prompt: of a prompt of 512 tokens in the embedded model twice its keys and values. O(q n chunk) time,
and float32 scratch of 8 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.ops.attention.noncausal import attention_in_runs
from kvtailor.ops.lanes.pool import pool_members
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["NonCausal"]

_KERNEL = 3


@dataclass(frozen=True, kw_only=True)
class NonCausal(Scorer):
    """Attention inside chunks, without a causal mask, times the norm of the value.

    Attributes:
        chunk: tokens of a chunk.
        rows: at most so many queries are looked at.
        scaled: logits have the model's own factor.
    """

    chunk: int = 256
    rows: int = 1024
    scaled: bool = False
    serves: ClassVar[Serves] = Serves(
        latents="it weighs by the length of values, and a latent is that of no single head", softcap=False, sinks=False
    )

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"noncausal: chunk must be at least 1 token, found {self.chunk}; kvpress uses 256")
        if self.rows < 1:
            raise ValueError(f"noncausal: rows must be at least 1 query, found {self.rows}; 1024 is the default")

    @property
    def needs(self) -> Needs:
        return Needs(rows=self.rows)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, not negative.

        Raises:
            ValueError: no queries were gathered.
        """
        if held.sampled is None or held.sampled_columns is None:
            raise ValueError(
                f"noncausal scores by queries of the whole text, but none were gathered; observe with "
                f"Needs(rows={self.rows})"
            )
        group = held.sampled.shape[1] // held.keys.shape[1]
        scores = [
            attention_in_runs(
                held.sampled[:, head * group : (head + 1) * group],
                held.sampled_columns,
                held.keys[:, head],
                held.positions[:, head],
                held.valid[:, head],
                self.chunk,
                held.scaling if self.scaled else 1.0,
                None if held.log_weight is None else held.log_weight[:, head],
            ).mul_(torch.linalg.vector_norm(held.values[:, head].float(), dim=-1))
            for head in range(held.keys.shape[1])
        ]
        return pool_members(torch.stack(scores, 1), held.valid, _KERNEL, "average")

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g m c (2 d + 6) + n (2 d + g + 5), m queries of c keys each.

        For each query and key of its chunk: 2 d for the logit, 4 for the softmax, 1 for the factor, 1 for the sum. For
        each token: the mean over the group, the norm of the value and the product, and 3 for the smoothing.
        """
        asked = group * min(self.rows, tokens) * min(self.chunk, tokens) * (2 * size + 6)
        return asked + tokens * (2 * size + group + 5)
