"""KVzap: a small network predicts what KVzip+ would find, so that the context is read once.

*Idea*: how much a later repetition will need a token shows in the token's own hidden state. A network of one hidden
layer is trained on the model at hand to predict the logarithm of KVzip+'s score; it costs little, needs no queries,
and works while decoding as well. With `linear` one linear map does, found in closed form.

*Paper*: "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", arXiv 2601.07891; our `recent` = its sliding window,
128.

*Source*: reviews of the paper and of its models, and its code in kvpress (Apache-2.0): two linear maps with a GELU
between them, or one map by ridge regression; mean squared error on the logarithm.

*Departs*: the network reads what a cache still holds of the token in its own kv head, the key turned back by its
position and the value, where the paper's reads the whole hidden state and gives the scores of all heads; so nothing
besides the cache is to be remembered, heads may hold different tokens, and released KVzap files do not fit. The score
is the sigmoid of the predicted logarithm, which is `kvzip_plus`'s own scale. The paper drops what lies below a fixed
threshold; here a plan's budget decides, and `threshold` is a selector.

*Cost*: a file of 4 (m + 1) (d + dv) + 8 (m + 1) bytes for each kv head, m = 32 as `kvtailor calibrate` makes it;
m (d + dv + 1) multiply-adds for each held token and kv head, or d + dv with `linear`, and float32 scratch (n, d + dv)
of one head at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import gelu

from kvtailor.score.by_repetition.own_token import ReadsOwnToken, own_token
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["KVzap"]

_HIDDEN = 32
_NETWORK = ("zap_hidden", "zap_hidden_bias", "zap_out", "zap_out_bias")
_LINEAR = ("zap_linear", "zap_linear_bias")


@dataclass(frozen=True, kw_only=True)
class KVzap(ReadsOwnToken, Scorer):
    """Predicted KVzip+ scores.

    Attributes:
        file: of `kvtailor calibrate kvzap`.
        recent: newest tokens that always stay.
        sinks: first tokens of each row that always score highest; the paper has none.
        linear: take the linear map and not the network.
    """

    recent: int = 128
    sinks: int = 0
    linear: bool = False
    calibrates: ClassVar[str] = "kvzap"
    per_head: ClassVar[tuple[str, ...]] = (*_NETWORK, *_LINEAR)
    examples: ClassVar[tuple[str, ...]] = ("kvzap", "kvzap(linear=true)")
    slack: ClassVar[int | None] = 32
    without: ClassVar[str] = (
        "kvzap scores by a trained network, or by a linear map that files of before lack, and what it needs was not "
        "given; see `kvtailor calibrate kvzap`"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 0:
            raise ValueError(f"kvzap: recent must be 0 or more tokens, found {self.recent}; the paper uses 128")
        if self.sinks < 0:
            raise ValueError(f"kvzap: sinks must be 0 or more tokens, found {self.sinks}; the paper has none")

    @property
    def reads(self) -> tuple[str, ...]:
        return _LINEAR if self.linear else _NETWORK

    def scores_of(self, held: Held, made: Mapping[str, Tensor], head: int) -> Tensor:
        """See `ReadsOwnToken.scores_of`: the sigmoid of a predicted logarithm."""
        if self.linear:
            return (own_token(held, head) @ made["zap_linear"][head] + made["zap_linear_bias"][head]).sigmoid()
        hidden = gelu(own_token(held, head) @ made["zap_hidden"][head] + made["zap_hidden_bias"][head])
        return (hidden @ made["zap_out"][head] + made["zap_out_bias"][head]).sigmoid()

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """n (4 d m + 6 m + 5 + 5 d): the network of m = 32 (a value taken as long as a key), its biases, GELU (3) and
        sigmoid, and the turning back, 3 for each channel and its share of an angle's sine and cosine. With `linear`
        n (4 d + 5 + 5 d).
        """
        if self.linear:
            return tokens * (4 * size + 5 + 5 * size)
        return tokens * (4 * size * _HIDDEN + 6 * _HIDDEN + 5 + 5 * size)

    @classmethod
    def example_for(
        cls, *, layers: int, heads: int, group: int, size: int, value_size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Networks: hidden (layers, heads, d + dv, 32) and its bias, out (layers, heads, 32) and its bias; and maps
        (layers, heads, d + dv) with theirs.
        """
        shapes = ((size + value_size, _HIDDEN), (_HIDDEN,), (_HIDDEN,), (), (size + value_size,), ())
        drawn = (torch.randn(layers, heads, *shape, generator=generator, dtype=torch.float32) * 0.2 for shape in shapes)
        return dict(zip(cls.per_head, drawn, strict=True))
