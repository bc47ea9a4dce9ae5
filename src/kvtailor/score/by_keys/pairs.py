"""Pairs: how much it costs to merge a token with the one before it.

*Idea*: of the tokens in time order, the pair of neighbours that received least attention is merged, again and again,
until one is left. A token's score is the price of the pair in which it went into the token before it, so that whatever
the budget is, the tokens that stay are those of which that many are left. It is made for the merger `asymkv`.

*Paper*: cui2025asymkv, arXiv 2506.05410. The price of a pair is (A_i + A_j) (l_i + l_j) / exp(i / gamma), A the
attention that a token received, l how many tokens are in it, i its place in the cache, gamma = 4096 / ln 512.

*Source*: the paper and a description of its repository; nothing was taken.

*Departs*: the paper merges the cheapest pairs of a cache at once, one choice for all heads of a layer, after each chunk
of 512 tokens. Here each kv head has its own, the merged pair goes on as one token with the sum of both attentions, and
all that an eviction finds is scored at once; so the place in the cache is scaled down where more tokens than the
paper's cache of 2,592 are held. Attention is that of the newest `window` queries, added up over the group. Prices only
grow as pairs merge, so all pairs that are cheaper than both of their neighbours can merge at once and give the same
tree; after 64 such rounds the pairs that are left are scored as they are.

*Cost*: the last `window` queries; time and scratch O(g * window * n), one kv head at a time. Prices are worked out on
the host, for which it waits once for each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.ops.attention.observed import observed_queries, window_attention
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs
from kvtailor.types.late_checks import send

__all__ = ["Pairs"]

_GAMMA = 4096 / math.log(512)
_CACHE = 2592
_ROUNDS = 64
Array = NDArray[np.float64]
# Above every price: of tokens that go into nothing.
_LAST = 1e30


@dataclass(frozen=True, kw_only=True)
class Pairs(Scorer):
    """Prices of merging neighbours, as logarithms.

    Attributes:
        window: newest queries whose attention counts, and newest tokens that always stay.
        sinks: a row's first tokens, which merge last.
    """

    window: int = 32
    sinks: int = 32
    serves: ClassVar[Serves] = Serves(
        latents="it prices merges that change values apart from keys, and a latent is both at once"
    )

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"pairs: window must be at least 1 query, found {self.window}")
        if self.sinks < 0:
            raise ValueError(f"pairs: sinks must not be negative, found {self.sinks}; the paper uses 32")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 logarithm of the price at which each token goes into the one before it.

        Raises:
            ValueError: no queries were gathered.
        """
        observed_queries(held, "pairs scores by", self.window)
        rows, heads = held.positions.shape[:2]
        device = held.keys.device
        received = torch.zeros(held.positions.shape, dtype=torch.float32, device=device)
        older = torch.zeros_like(held.valid)
        for row in range(rows):
            for head in range(heads):
                there = held.there(row, head)
                given, before = window_attention(held, row, head)
                received[row, head][there] = given.sum((0, 1))
                older[row, head][there] = before
        free = older & (held.positions >= held.first[:, None, None] + self.sinks)
        weights = torch.ones_like(received) if held.log_weight is None else held.log_weight.exp()
        # Rounds of merges, each as large as the one before left it: a device would wait for the host at every one.
        gathered = torch.stack([received, weights, free.float(), held.valid.float()]).cpu()
        mine, counts, can_merge, valid = gathered
        number = valid.long().cumsum(-1)
        place = (number - 1) / _GAMMA * (_CACHE / number[..., -1:]).clamp(max=1.0)
        at = can_merge.flatten().nonzero()[:, 0]
        scores = torch.full(held.positions.shape, _LAST, dtype=torch.float32)
        # All lanes at once: a round takes about as long for one as for many.
        lane = at // can_merge.shape[-1]
        scores.view(-1)[at] = _prices(mine.flatten()[at], counts.flatten()[at], place.flatten()[at], lane)
        return send(scores, device)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g w n (2 d + 6) for the attention and its sum, and 8 for each price of a pair, 3 for each token in all."""
        return group * min(self.window, tokens) * tokens * (2 * size + 6) + 24 * tokens


def _prices(received: Tensor, weights: Tensor, place: Tensor, lane: Tensor) -> Tensor:
    """(n,) float32: the logarithm of the price at which each token goes into the one before it; a lane's first, last.

    Rounds are many and small, and NumPy begins an operation several times as fast as torch does.

    Args:
        received: (n,) attention. weights: (n,) tokens that each stands for. place: (n,) how late it stands.
        lane: (n,) int64, ascending: tokens of one lane alone merge.
    """
    count = received.shape[0]
    prices = np.full(count, _LAST, dtype=np.float32)
    # A row for each quantity, all of them exact in float64, so that one operation picks the tokens that are left.
    left = np.stack([*(each.double().numpy() for each in (received, weights, place, lane)), np.arange(count)])
    for _ in range(_ROUNDS):
        price = _of_pairs(left)
        lower = price < np.inf
        if not lower.any():
            return torch.from_numpy(prices)
        lower[1:] &= price[1:] < price[:-1]
        lower[:-1] &= price[:-1] <= price[1:]
        at = lower.nonzero()[0]
        prices[left[4, at + 1].astype(np.int64)] = price[at]
        left[:2, at] += left[:2, at + 1]
        stays = np.ones(left.shape[1], dtype=bool)
        stays[at + 1] = False
        left = left[:, stays]
    prices[left[4, 1:].astype(np.int64)] = _of_pairs(left).clip(max=_LAST)
    return torch.from_numpy(prices)


def _of_pairs(tokens: Array) -> Array:
    """(n - 1,) the logarithm of each pair's price, of tokens (5, n); infinite where a lane ends and the next begins."""
    attention, counts, place, lane = tokens[:4]
    both = np.maximum(attention[:-1] + attention[1:], 1e-30)
    price: Array = np.log(both) + np.log(counts[:-1] + counts[1:]) - place[:-1]
    price[lane[:-1] != lane[1:]] = np.inf
    return price
