"""Blend: a dropped token's value goes into the kept one whose key is most like its own; keys stay as they are.

*Idea*: a merged key is that of no token and of no position, so only values are mixed. A dropped value counts the more
the more similar its key is, and the longer it is beside the value that it goes into.

*Paper*: none; the rule is kvpress's `MergingPress`, which names token merging (arXiv 2210.09461) and D2O
(wan2025d2o, arXiv 2406.13035) as what it follows.

*Source*: the description of that press in kvpress (Apache-2.0), by formula: with u the cosine of the keys, a dropped
value e counts u * |e| / (|e| + |v|) beside the kept value v, which counts 1; `threshold` and `fraction` are its
similarity_threshold and merge_fraction.

*Departs*: tokens that a lossy codec has encoded take nothing in, so they are no targets. Of equal similarities at the
bound of `fraction` all are taken in.

*Cost*: no evidence. n k d multiply-adds for each head that keeps k of n, in blocks of 8 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtailor.merge.contract import Merged, Merger
from kvtailor.method import Serves
from kvtailor.ops.lanes.kept import kept_first, kept_states, places_of
from kvtailor.types import Held

__all__ = ["Blend"]

_BLOCK = 1 << 21
_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Blend(Merger):
    """Averages of values by similarity of keys and length of values.

    Attributes:
        threshold: least cosine of a dropped key and the kept one that is most like it; others are dropped.
        fraction: of the dropped tokens, the most similar ones, that are taken in at most.
    """

    threshold: float = 0.0
    fraction: float = 1.0
    serves: ClassVar[Serves] = Serves(latents="it changes values apart from keys, and a latent is both at once")

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"blend: threshold must be a cosine from 0 to 1, found {self.threshold}; 0 takes most")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"blend: fraction must be above 0 and at most 1, found {self.fraction}; 1 takes all")

    def merge(self, held: Held, keep: Tensor, into: Tensor) -> Merged:
        """See the contract."""
        index, filled = kept_first(keep, held.kept)
        keys, values = kept_states(held.keys, index, filled), kept_states(held.values, index, filled)
        takes, gone = into.gather(-1, index) & filled, held.valid & ~keep
        for row in range(keep.shape[0]):
            for head in range(keep.shape[1]):
                taking, leaving = held.merging(row, head, all_take=into is keep)
                at, dropped = places_of(takes[row, head], taking), places_of(gone[row, head], leaving)
                if not at.numel() or not dropped.numel():
                    continue
                best, alike = _nearest(held.keys[row, head], dropped, keys[row, head][at])
                was, lost = values[row, head][at], held.values[row, head][dropped].float()
                lengths, kept_lengths = lost.norm(dim=-1), was.float().norm(dim=-1)[best]
                counts = alike.clamp_min(0.0).masked_fill(~self._similar(alike), 0.0)
                counts = counts * lengths / (lengths + kept_lengths + _EPSILON)
                total = torch.ones_like(was[:, 0], dtype=torch.float32).index_add_(0, best, counts)
                mixed = was.float().index_add_(0, best, lost * counts[:, None]) / total[:, None]
                # A value that takes nothing in is not rounded either.
                values[row, head, at] = torch.where(total[:, None] == 1, was, mixed.to(was.dtype))
        return Merged(keys=keys, values=values)

    def flops(self, *, tokens: int, kept: int, group: int, size: int) -> int:
        """2 d for each similarity, 3 d + 3 to normalise each key, 4 d + 6 for each dropped value, 3 d for each kept."""
        dropped = tokens - kept
        if not dropped:
            return 0
        return 2 * size * dropped * kept + (3 * size + 3) * tokens + (4 * size + 6) * dropped + 3 * size * kept

    def _similar(self, alike: Tensor) -> Tensor:
        """(e,) bool: which of the dropped tokens, by their best cosines (e,) float32, are taken in."""
        enough = alike >= self.threshold
        if self.fraction < 1:
            # Those below the threshold count among the dropped, and lie under every bound.
            enough = enough & (alike >= alike.quantile(1 - self.fraction))
        return enough


def _nearest(keys: Tensor, dropped: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the keys (n, d) at `dropped` (e,) the place of the nearest of `kept` (k, d), and its cosine."""
    targets, best, alike = normalize(kept.float(), dim=-1), [], []
    for some in dropped.split(max(1, _BLOCK // max(targets.shape))):
        highest = (normalize(keys[some].float(), dim=-1) @ targets.t()).max(-1)
        alike.append(highest.values)
        best.append(highest.indices)
    return torch.cat(best), torch.cat(alike)
