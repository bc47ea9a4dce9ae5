"""CaM: a dropped token's value is shared out among the kept tokens that follow it.

*Idea*: the output is a weighted sum of values, so a value that goes missing shifts it. Each dropped value is added to
those of the next kept tokens, the more certainly the more attention it had beside theirs. Keys stay as they are.

*Paper*: zhang2024cam, "CaM: Cache Merging for Memory-efficient LLMs Inference", ICML 2024, algorithm 1. The next m kept
values each get p / m of the dropped one, p the attention that the dropped token received over the mean of what those
m received, at most 1.

*Source*: the paper, and the description of CAMPress in kvpress (Apache-2.0).

*Departs*: the paper draws from a Bernoulli distribution of p; here p itself is the factor, which is the mean of
that draw, and the same on every machine. The attention is the mean over the newest `window` queries, where the paper
adds up that of all decoding steps. The paper drops one token at a step, while decoding; here all that a cut drops is
shared out at once, a prompt's tokens too. Where fewer than m kept tokens follow, those that do share the value, and
where none does it is dropped.

*Cost*: the last `window` queries; scratch (g * window, n) float32, one kv head at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.merge.contract import Merged, Merger
from kvtailor.method import Serves
from kvtailor.ops.attention.observed import observed_queries, window_attention
from kvtailor.ops.lanes.kept import kept_first, kept_states, places_of
from kvtailor.types import Held, Needs

__all__ = ["CaM"]

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CaM(Merger):
    """Shares dropped values out.

    Attributes:
        share: m, kept tokens among which a value is shared out.
        window: newest queries whose attention is looked at.
    """

    share: int = 32
    window: int = 32
    serves: ClassVar[Serves] = Serves(latents="it changes values and not keys, and a latent is both at once")

    def __post_init__(self) -> None:
        if self.share < 1:
            raise ValueError(f"cam: share must be at least 1 token, found {self.share}")
        if self.window < 1:
            raise ValueError(f"cam: window must be at least 1 query, found {self.window}")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    def merge(self, held: Held, keep: Tensor, into: Tensor) -> Merged:
        """See the contract.

        Raises:
            ValueError: no queries were gathered.
        """
        observed_queries(held, "cam looks at the attention of", self.window)
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
                added = self._shared(held, row, head, dropped, index[row, head][at])
                was = values[row, head, at]
                # A token that gets nothing is not rounded either.
                some = (added.abs().sum(-1) > 0)[:, None]
                values[row, head, at] = torch.where(some, (was.float() + added).to(values.dtype), was)
        return Merged(keys=keys, values=values)

    def flops(self, *, tokens: int, kept: int, group: int, size: int) -> int:
        """g w n (2 d + 6) for the attention, 2 d for each dropped value, and as much for each kept one's sum."""
        dropped = tokens - kept
        if not dropped:
            return 0
        window = group * min(self.window, tokens) * tokens * (2 * size + 6)
        return window + dropped * (2 * size + 6) + 3 * size * kept

    def _shared(self, held: Held, row: int, head: int, dropped: Tensor, kept: Tensor) -> Tensor:
        """(k, dv) float32: what each of the tokens `kept` (k,) gets of those `dropped` (e,), indices along n."""
        attention = torch.zeros(held.keys.shape[2], dtype=torch.float32, device=held.keys.device)
        given, _ = window_attention(held, row, head)
        if given.shape[1]:
            attention[held.there(row, head)] = given.mean((0, 1))
        # Each dropped token meets the kept ones from `first` to `end` - 1.
        first = torch.searchsorted(kept, dropped)
        end = (first + self.share).clamp(max=kept.shape[0])
        until = torch.cat([attention.new_zeros(1, dtype=torch.float64), attention[kept].double().cumsum(0)])
        theirs, count = (until[end] - until[first]).float(), end - first
        mean = theirs / count.clamp(min=1)
        certain = (attention[dropped] / mean.clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=1.0)
        factor = torch.where(count > 0, certain / count.clamp(min=1), 0.0)
        # A share from `first` to `end` is a step up and a step down; their running sum is the whole.
        steps = torch.zeros((kept.shape[0] + 1, held.values.shape[-1]), dtype=torch.float64, device=held.values.device)
        size = max(1, _BLOCK // held.values.shape[-1])
        for some, begin, stop, part in zip(
            dropped.split(size), first.split(size), end.split(size), factor.split(size), strict=True
        ):
            parts = held.values[row, head][some].double() * part[:, None].double()
            steps.index_add_(0, begin, parts)
            steps.index_add_(0, stop, -parts)
        return steps.cumsum(0)[:-1].float()
