"""D2O: each dropped token goes into the kept one whose key is most like its own.

*Idea*: a token that is not kept may still matter. It is averaged into the kept token of its head with the most similar
key, keys and values alike, and the more the more similar it is; a token that resembles none is dropped.

*Paper*: wan2025d2o, "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
Models", arXiv 2406.13035, the token-level operation. Similarity is the cosine u of the keys; a dropped token
counts exp(u) and the kept one e, over their sum; only those of at least the mean of all dropped tokens' best
similarities are taken in.

*Source*: the paper.

*Departs*: while decoding the paper drops one token at a time and moves its threshold as a running average; a merger
keeps nothing between cuts, so every cut takes the mean over the tokens that it drops, which is the paper's threshold of
a prompt. Which tokens are kept, and how many on each layer, is decided by the rest of the plan (the preset takes H2O
and equal budgets). Keys are compared and averaged as they are stored, turned by their positions.

*Cost*: no evidence. n k d multiply-adds for each head that keeps k of n, in blocks of 8 MiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.merge.contract import Merged, Merger
from kvtailor.method import Serves
from kvtailor.ops.lanes.kept import kept_first, kept_states, places_of
from kvtailor.types import Held

__all__ = ["D2O"]

_BLOCK = 1 << 21
# Cosines of equal keys differ by their rounding, and the mean of equal ones must not leave any of them out.
_EQUAL = 1e-6


@dataclass(frozen=True, kw_only=True)
class D2O(Merger):
    """Averages by similarity of keys.

    Attributes:
        all_of_them: dropped tokens below the mean similarity are taken in as well.
    """

    all_of_them: bool = False
    serves: ClassVar[Serves] = Serves(
        latents="it compares keys by their direction, and the direction of a latent is that of no head's key"
    )

    def merge(self, held: Held, keep: Tensor, into: Tensor) -> Merged:
        """See the contract."""
        index, filled = kept_first(keep, held.kept)
        keys, values = kept_states(held.keys, index, filled), kept_states(held.values, index, filled)
        takes = into.gather(-1, index) & filled
        gone = held.valid & ~keep
        for row in range(keep.shape[0]):
            for head in range(keep.shape[1]):
                taking, leaving = held.merging(row, head, all_take=into is keep)
                at, dropped = places_of(takes[row, head], taking), places_of(gone[row, head], leaving)
                if not at.numel() or not dropped.numel():
                    continue
                mine = keys[row, head][at]
                best, alike = _most_similar(held.keys[row, head], dropped, mine)
                counts = alike.exp()
                if not self.all_of_them:
                    counts = counts.masked_fill(alike < alike.mean() - _EQUAL, 0.0)
                total = torch.full_like(mine[:, 0], math.e, dtype=torch.float32).index_add_(0, best, counts)
                for states, source in ((keys, held.keys), (values, held.values)):
                    was = states[row, head][at]
                    mixed = _summed(was, source[row, head], dropped, best, counts) / total[:, None]
                    # A token that takes nothing in is not rounded either.
                    alone = total == torch.tensor(math.e, dtype=torch.float32)
                    states[row, head, at] = torch.where(alone[:, None], was, mixed.to(states.dtype))
        return Merged(keys=keys, values=values)

    def flops(self, *, tokens: int, kept: int, group: int, size: int) -> int:
        """2 d for each similarity, 3 d + 3 to normalise each key, 4 d for each token that is added, 2 d k at the end.

        Added are half of those that are dropped, as a threshold at their mean leaves them.
        """
        dropped = tokens - kept
        if not dropped:
            return 0
        added = dropped if self.all_of_them else dropped // 2
        return 2 * size * dropped * kept + (3 * size + 3) * tokens + 4 * size * added + 4 * size * kept


def _most_similar(keys: Tensor, dropped: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the keys (n, d) at `dropped` (e,) the best among `kept` (k, d), int64, and its cosine, float32."""
    targets = torch.nn.functional.normalize(kept.float(), dim=-1)
    best, alike = [], []
    for some in dropped.split(max(1, _BLOCK // max(targets.shape))):
        cosines = torch.nn.functional.normalize(keys[some].float(), dim=-1) @ targets.t()
        highest = cosines.max(-1)
        alike.append(highest.values)
        best.append(highest.indices)
    return torch.cat(best), torch.cat(alike)


def _summed(kept: Tensor, states: Tensor, dropped: Tensor, best: Tensor, counts: Tensor) -> Tensor:
    """(k, d) float32: e times each kept state, and what is taken in by its count."""
    total = kept.float() * math.e
    step = max(1, _BLOCK // states.shape[-1])
    for some, where, count in zip(dropped.split(step), best.split(step), counts.split(step), strict=True):
        total.index_add_(0, where, states[some].float() * count[:, None])
    return total
