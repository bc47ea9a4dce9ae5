"""ATSKV: the tokens that queries still to come will attend to, as a small trained network predicts.

*Idea*: what the last queries attend to is a good prediction of what the next ones will attend to, and a trained network
can improve it. For each kv head a network of one hidden layer maps a few numbers of each token to its relevance: how
much attention it is going to get, relative to an even share. Relevance is smoothed along the text, so that a token
stays with its neighbours, and averaged over evictions, so that one window of queries does not decide alone. On the
embedded model the prediction is better, but not worth its cost: `snapkv(kernel=21)`, one of the features alone, does as
well end to end. docs/calibration.md has the numbers.

*Paper*: none. ATSKV is a generated project (chchenhui/mlrbench) that was never run; "Adaptive Token-Relevance Sparse
KV-Cache" in its proposal.

*Source*: a description of the proposal and its code (no licence); nothing was taken. From there: the network of hidden
size 32 with a sigmoid, the mixing of relevance over time with `momentum` = 0.8, protected first tokens.

*Departs*: in nearly everything, since the project's own form cannot work. The network is trained on what it is for, the
attention of the tokens that follow, not on a column sum of the same text; for each kv head, not for a layer. Its
features are what a cache can compute: attention that the token got from the last `window` queries (mean and maximum,
the mean smoothed over 5, 21 and 63 tokens, and that of the 8 tokens before it), lengths of key and value beside the
head's average, place in the text. Hidden states, token types and special tokens are not seen. The kept share is exactly
the budget's, where the project's threshold has the sign of its pressure wrong. What is averaged over evictions is
relevance, where averaging the kept set freezes it. Smoothing is SnapKV's; without it digits are lost in the middle of a
number. Attention accumulated over all queries is left out: on the embedded model it adds less than half a point to the
future attention that is kept, and every attention would have to give its column sums. Reinforcement learning and a
second tier of evicted tokens are not there.

*Cost*: the last `window` queries; 8 bytes for each held token and kv head between evictions (its relevance and its
column); as SnapKV's, plus 2 * 32 * (10 + 1) operations for each token and kv head. A file: 1540 bytes for each kv head,
and its description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvtailor.calibration_file import CalibratedMethod
from kvtailor.ops.attention.observed import observed_queries, window_attention
from kvtailor.ops.lanes.pool import pool_members
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["ATSKV"]

_POOLS = (5, 21, 63)
_BEFORE = 8
_FEATURES = 7 + len(_POOLS)
_HIDDEN = 32
# An even share is 1: what is far below it is all the same.
_LEAST = 1e-2
_SINK = 2.0


@dataclass(frozen=True, kw_only=True)
class ATSKV(CalibratedMethod, Scorer):
    """Predicted relevance.

    Attributes:
        file: of `kvtailor calibrate atskv`; None: the one that is shipped for the model.
        window: newest queries that are read, and newest tokens that always stay. The shipped files were made with 32.
        sinks: first tokens of each row that always score highest.
        momentum: how much of its relevance at the eviction before a token keeps; 0: none.
        kernel: odd width of the average of relevance along the text, in tokens; 1: none.
    """

    window: int = 32
    sinks: int = 4
    momentum: float = 0.8
    kernel: int = 5
    calibrates: ClassVar[str] = "atskv"
    per_head: ClassVar[tuple[str, ...]] = ("hidden", "hidden_bias", "out", "out_bias")
    slack: ClassVar[int | None] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"atskv: window must be at least 1 query, found {self.window}; the files are made with 32")
        if self.sinks < 0:
            raise ValueError(f"atskv: sinks must be 0 or more tokens, found {self.sinks}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"atskv: momentum must be from 0 to below 1, found {self.momentum}; its proposal has 0.8")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"atskv: kernel must be odd and at least 1, found {self.kernel}; SnapKV's is 5")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, previous=self.momentum > 0)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 relevance, 0 to 1 and 1/2 at an even share; 2 for the sinks.

        Raises:
            ValueError: no queries were gathered, or no network was given.
        """
        observed_queries(held, "atskv reads", self.window)
        if held.calibration is None or not set(self.per_head) <= set(held.calibration):
            raise ValueError("atskv scores by a trained network, but none was given; see `kvtailor calibrate`")
        layer = {name: held.calibration[name].to(held.keys.device, torch.float32) for name in self.per_head}
        scores = torch.zeros(held.positions.shape, dtype=torch.float32, device=held.keys.device)
        for row in range(held.keys.shape[0]):
            for head in range(held.keys.shape[1]):
                hidden = self.features(held, row, head) @ layer["hidden"][head] + layer["hidden_bias"][head]
                logits = hidden.relu_() @ layer["out"][head] + layer["out_bias"][head]
                scores[row, head, held.there(row, head)] = self.smoothed(logits.sigmoid_())
        if held.previous is not None:
            before = torch.where(held.previous.isnan(), scores, held.previous)
            scores = self.momentum * before + (1 - self.momentum) * scores
        sink = held.valid & (held.positions < held.first[:, None, None] + self.sinks)
        return scores.masked_fill(sink, _SINK)

    def features(self, held: Held, row: int, head: int) -> Tensor:
        """(n, 10) float32: what the network reads of the n tokens of one row and kv head, neither padding nor filler.

        In this order: logarithms of mean and maximum of the window's attention, of its smoothed means and of the mean
        over the tokens before (what follows a token is often what it was looked at for), each beside an even share;
        logarithms of the lengths of key and value, less their means; the token's age as a share of the
        text's; the logarithm of its distance to the newest.
        """
        there = held.there(row, head)
        given, _ = window_attention(held, row, head)
        count = given.shape[-1]
        if count == 0:
            # A row of a padded batch of which the chunks so far have been padding alone.
            return given.new_zeros(0, _FEATURES)
        seen = given.flatten(0, 1) if given.shape[1] else given.new_zeros(1, count)
        mean, members = seen.mean(0), torch.ones(count, dtype=torch.bool, device=seen.device)
        pooled = [pool_members(mean, members, kernel, "average") for kernel in _POOLS]
        before = avg_pool1d(pad(mean, (_BEFORE, 0))[None, :-1], _BEFORE, stride=1)[0]
        shares = [(share * count + _LEAST).log() for share in (mean, seen.amax(0), *pooled, before)]
        lengths = [
            state[row, head][there].float().norm(dim=-1).clamp_min(1e-6).log() for state in (held.keys, held.values)
        ]
        age = (held.positions[row, head][there] - held.first[row]).float()
        span = (held.seen - held.first[row]).float()
        places = [age / span, (span - age).log()]
        return torch.stack([*shares, *(each - each.mean() for each in lengths), *places], -1)

    def smoothed(self, relevance: Tensor) -> Tensor:
        """Relevance (..., n), each token's mean with its neighbours; zeros stand beyond both ends."""
        return pool_members(relevance, torch.ones_like(relevance, dtype=torch.bool), self.kernel, "average")

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g w n (2 d + 5) + n (4 d + kernel + 880).

        For each query of the window and token: 2 d for the logit, 4 for its softmax, 1 for the mean. For each token:
        2 d for the length of key and of value, 97 for the smoothing, 736 for the network with its biases, 4 for the
        sigmoid, and 43 for shares, logarithms, means and momentum.
        """
        window = group * min(self.window, tokens) * tokens * (2 * size + 5)
        network = 2 * _FEATURES * _HIDDEN + 3 * _HIDDEN
        return window + tokens * (4 * size + self.kernel + sum(_POOLS) + _BEFORE + network + 4 + 43)

    @classmethod
    def example_calibration(
        cls, *, layers: int, heads: int, group: int, size: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Networks: hidden (layers, heads, 10, 32) and its bias, out (layers, heads, 32) and its bias."""
        shapes = ((_FEATURES, _HIDDEN), (_HIDDEN,), (_HIDDEN,), ())
        drawn = (torch.randn(layers, heads, *shape, generator=generator, dtype=torch.float32) * 0.3 for shape in shapes)
        return dict(zip(cls.per_head, drawn, strict=True))
