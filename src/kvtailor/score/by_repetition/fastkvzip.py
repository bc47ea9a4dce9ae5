"""Fast KVzip: a gate on each token, trained on what KVzip finds, so that the context is read once.

*Idea*: a token's own state is asked how much a later repetition will look at it. The gate is a small attention of its
own: a key made from the token stands against a few learned sinks, for a query that is made from the token too, and the
share of the softmax that the token gets is its score. Its form is that of the attention probability it has to predict.

*Paper*: "Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction", arXiv 2601.17668; 16 sinks, queries
and keys of 16 channels.

*Source*: the abstract and reviews, and the gate's form in kvpress (Apache-2.0); its official code has no licence and
was not used.

*Departs*: in a plan the word is a preset that brings the pool over all layers and heads; `+ uniform` takes it off. As
`kvzap`, it reads the token's key, turned back, and its value in its own kv head instead of the whole hidden state, so
released gates do not fit. The training's loss is ours, the cross-entropy of two probabilities. Norms have weights for
each kv head. The newest `recent` tokens stay, a fixed number, where the paper keeps 2 % of a context of less than 32
thousand tokens and 4,096 tokens of a longer one. While decoding it evicts every 128 tokens, as its buffer does.

*Cost*: a file of 4 (d + dv) 16 (g + 1) + 4 (16 * 16 + 32 + 17 g) bytes for each kv head with g query heads; as many
multiply-adds for each held token and kv head, and float32 scratch (n, d + dv) of one head at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.score.by_repetition.own_token import ReadsOwnToken, own_token
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["FastKVzip"]

_CHANNELS = 16
_SINKS = 16
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class FastKVzip(ReadsOwnToken, Scorer):
    """A gate's share of its own softmax.

    Attributes:
        file: of `kvtailor calibrate fastkvzip`.
        recent: newest tokens that always stay.
        sinks: first tokens of each row that always score highest.
    """

    recent: int = 32
    sinks: int = 4
    calibrates: ClassVar[str] = "fastkvzip"
    per_head: ClassVar[tuple[str, ...]] = (
        "gate_query",
        "gate_query_bias",
        "gate_query_norm",
        "gate_key",
        "gate_key_norm",
        "gate_sinks",
        "gate_bias",
    )
    slack: ClassVar[int | None] = 128
    without: ClassVar[str] = "fastkvzip scores by trained gates, but none were given; see `kvtailor calibrate`"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 0:
            raise ValueError(f"fastkvzip: recent must be 0 or more tokens, found {self.recent}; 0 protects none")
        if self.sinks < 0:
            raise ValueError(f"fastkvzip: sinks must be 0 or more tokens, found {self.sinks}; the paper's code has 4")

    def scores_of(self, held: Held, made: Mapping[str, Tensor], head: int) -> Tensor:
        """See `ReadsOwnToken.scores_of`: `gated`."""
        return gated(own_token(held, head), {name: tensor[head] for name, tensor in made.items()})

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n (64 d (g + 1) + 112 (g + 1) + g (34 * 16 + 50) + 5 d): queries and keys (a value taken as long as a key),
        their norms and biases; for each query head 17 products of 16 channels, 16 exponentials and differences, their
        sum, the fraction and the mean; and the turning back.
        """
        made = (group + 1) * _CHANNELS * (4 * size + 7)
        return tokens * (made + group * (2 * _CHANNELS * (_SINKS + 1) + 3 * _SINKS + 2) + 5 * size)

    @classmethod
    def example_for(
        cls, *, layers: int, heads: int, group: int, size: int, value_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Gates, each (layers, heads, ...): see `gated`."""
        read = size + value_size
        shapes = (
            (read, group, _CHANNELS),
            (group, _CHANNELS),
            (_CHANNELS,),
            (read, _CHANNELS),
            (_CHANNELS,),
            (_SINKS, _CHANNELS),
            (group,),
        )
        drawn = (torch.randn(layers, heads, *shape, generator=generator, dtype=torch.float32) * 0.3 for shape in shapes)
        return dict(zip(cls.per_head, drawn, strict=True))


def gated(tokens: Tensor, gate: Mapping[str, Tensor]) -> Tensor:
    """(..., n) from 0 to 1: the share of each token against the sinks, mean over the query heads.

    Args:
        tokens: (..., n, d + dv), see `own_token`.
        gate: gate_query (..., d + dv, g, 16) and its bias (..., g, 16), gate_key (..., d + dv, 16), the weights of
            their norms (..., 16), gate_sinks (..., s, 16), gate_bias (..., g).
    """
    made = (tokens @ gate["gate_query"].flatten(-2)).unflatten(-1, gate["gate_query"].shape[-2:])
    queries = _normed(made + gate["gate_query_bias"][..., None, :, :], gate["gate_query_norm"][..., None, None, :])
    keys = _normed(tokens @ gate["gate_key"], gate["gate_key_norm"][..., None, :])
    own = (queries * keys[..., None, :]).sum(-1) * _CHANNELS**-0.5 + gate["gate_bias"][..., None, :]
    sinks = torch.einsum("...ngc,...sc->...ngs", queries, gate["gate_sinks"]) * _CHANNELS**-0.5
    # 1 / (1 + sum of exp(sink - own)), where the sum may be beyond float32.
    share: Tensor = (own - sinks.logsumexp(-1)).sigmoid().mean(-1)
    return share


def _normed(states: Tensor, weight: Tensor) -> Tensor:
    return states * (states.square().mean(-1, keepdim=True) + _EPSILON).rsqrt() * weight
