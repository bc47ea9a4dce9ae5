"""LagKV: the tokens that differ most from the partition behind them.

*Idea*: tokens are cut into partitions of `lag`. Each token is scaled by the least and the greatest number of each
channel in the next partition. A token whose scaled channels vary most carries information that later tokens do not
repeat. Each partition keeps an equal share of its tokens; no query is used.

*Paper*: "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", arXiv 2504.04704; our
`sinks` = its S, our `lag` = its L.

*Source*: the paper, and a reading of its repository (MIT) and of kvpress (Apache-2.0), whose defaults differ: 16 sinks
and a lag of 1024, 4 and 128. Nothing was taken.

*Departs*: the paper keeps a fixed fraction of each partition; here a budget is given, and ranks within the partitions
decide how it is shared. First the sinks stay, then the last full partition and what follows it, the newest first, then
the best of all other partitions; so a budget below `sinks + lag` is sinks and the recent window. The paper cuts a
partition once; here partitions run anew over what is held whenever the cache is cut, which while decoding is once it is
`slack` tokens past the budget. A channel that does not vary in the next partition counts as 0.

*Cost*: no evidence; three passes over keys and values, one kv head at a time, with a scratch of about three float32
(b, n, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.score.contract import Scorer
from kvtailor.types import Held

__all__ = ["LagKV"]

# A channel that varies by no more than this does not vary; what it would measure has no square in float32.
_FLAT = 1e-12


@dataclass(frozen=True, kw_only=True)
class LagKV(Scorer):
    """Lag-relative information of keys and values.

    Attributes:
        sinks: first tokens of each row, padding not counted, that outrank all others.
        lag: tokens of a partition.
        compete: partitions compete by their scores, and do not keep equal shares. For allocators that pool scores,
            to which all heads look alike otherwise.
    """

    sinks: int = 16
    lag: int = 128
    compete: bool = False
    slack: ClassVar[int | None] = 128
    serves: ClassVar[Serves] = Serves(
        latents="it compares keys and values channel by channel, and the channels of a latent are those of no head"
    )

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"lagkv: sinks must be 0 or more tokens, found {self.sinks}; the paper uses 16")
        if self.lag < 2:
            raise ValueError(f"lagkv: lag must be at least 2 tokens, found {self.lag}; the paper uses 128 and more")

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: 0 to 1 in all partitions but the last, 1 to 2 from there on, 2 to 3 for sinks."""
        place = held.valid.cumsum(-1) - 1
        count = held.valid.sum(-1, keepdim=True)
        full = (count - self.sinks).clamp(min=0) // self.lag
        end = self.sinks + (full - 1).clamp(min=0) * self.lag
        sink = place < self.sinks
        first = 2 + (self.sinks - place).float() / max(self.sinks, 1)
        kept = torch.where(sink, first, 1 + place.float() / count.clamp(min=1))
        most = full.max() if held.front is None else (held.front.max() - self.sinks).clamp(min=0) // self.lag
        partitions = int(most)
        if partitions < 2:
            return kept
        scored = torch.stack([self._lagging(held, head, partitions) for head in range(held.keys.shape[1])], dim=1)
        inside = (place - self.sinks).clamp(0, scored.shape[-1] - 1)
        return torch.where(sink | (place >= end), kept, scored.gather(-1, inside))

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """12 d + 11 for each token of a partition that has another behind it, and 2 d for each such partition's rulers.

        Keys and values take 6 for each channel (2 to measure it, 4 for its part in the deviation) and 5 for each token
        (the root, and the softmax less the maximum); then they are added. A rank takes none.
        """
        partitions = max((tokens - self.sinks) // self.lag - 1, 0)
        return partitions * (self.lag * (12 * size + 11) + 2 * size)

    def _lagging(self, held: Held, head: int, partitions: int) -> Tensor:
        """(b, (partitions - 1) * lag) float32 from 0 to 1: the scores of one kv head's tokens behind its sinks."""
        # Held tokens in time order, the slots that hold none behind them.
        order = torch.argsort((~held.valid[:, head]).to(torch.uint8), dim=-1, stable=True)
        order = order[:, self.sinks : self.sinks + partitions * self.lag]
        row = torch.arange(order.shape[0], device=order.device)[:, None]
        score = torch.zeros((), device=order.device, dtype=torch.float32)
        for states in (held.keys[:, head], held.values[:, head]):
            packed = states[row, order].unflatten(1, (partitions, self.lag))
            score = score + _disagreement(packed).softmax(-1) / 2
        if self.compete:
            return score.flatten(1)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return ((self.lag - 1 - rank) / self.lag).flatten(1)


def _disagreement(packed: Tensor) -> Tensor:
    """(b, p - 1, lag) float32 standard deviation over channels, on the ruler of the next partition.

    Args:
        packed: (b, p, lag, d).
    """
    low, high = packed[:, 1:].amin(2, keepdim=True).float(), packed[:, 1:].amax(2, keepdim=True).float()
    length = high - low
    unit = torch.where(length > _FLAT, 1 / length, 0.0)
    measured = (packed[:, :-1].float() - low).mul_(unit)
    # Eight times as fast as torch's own deviation.
    deviation: Tensor = torch.linalg.vector_norm(measured.sub_(measured.mean(-1, keepdim=True)), dim=-1)
    # Finite, whatever a short ruler measures.
    return deviation.div_(max(packed.shape[-1] - 1, 1) ** 0.5).nan_to_num_()
