"""KVCompose's score: what the repetition attends to, in a head's mean query, and what the layer's heads have in common.

*Idea*: as KVzip, the model repeats its context, and a token is worth the highest attention that it gets meanwhile: here
of each query head, averaged over the group. The mean over the layer's heads is added, which steadies the choice of a
single head. The allocator `composite` is its other half.

*Paper*: "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens", arXiv 2509.05165.

*Source*: the paper's abstract, and its code in kvpress (Apache-2.0), by its authors.

*Departs*: in a plan the word is a preset that brings composite tokens (`composite`). The repetition goes by pieces of
`chunk` tokens with an instruction, as `kvzip`'s, and the softmax of a piece is that of sinks, piece and repetition;
there the whole context is repeated at once without one. Where a context is one piece and there is no tokenizer, they
agree. Scores are divided by two, so that they are 0 to 1. A head that has dropped a token counts as giving it nothing.
A token that came after the context outranks it, as in `kvzip`.

*Cost*: that of `kvzip`, and one number for each token seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtailor.score.contract import Scorer
from kvtailor.score.kvzip import KVzip, check_pieces
from kvtailor.types import Held, Needs, Repetition

__all__ = ["KVCompose"]


@dataclass(frozen=True, kw_only=True)
class KVCompose(Scorer):
    """Highest attention of each query head during a repetition of the context, averaged over group and layer.

    Attributes:
        chunk: at most so many tokens are repeated in one pass.
        lead: tokens before a piece that introduce it.
        sinks: first tokens of each row that always stay; the paper has none.
    """

    chunk: int = 2048
    lead: int = 8
    sinks: int = 0

    def __post_init__(self) -> None:
        check_pieces(self, "kvcompose", chunk="KVzip's is 2K", lead="KVzip's is 8", sinks="the paper has none")

    @property
    def needs(self) -> Needs:
        how = Repetition(chunk=self.chunk, lead=self.lead, sinks=self.sinks, mean_group=True)
        return Needs(reconstruction=how)

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32: 0 to 1 for the context, from 2 on for what came after it, and more for sinks.

        Raises:
            ValueError: the context was not repeated.
        """
        found = held.reconstruction
        if found is not None:
            rows, heads, _ = found.shape
            # Heads may hold different tokens, so the mean is taken by column.
            columns = held.positions.clamp(min=0).flatten(1)
            total = torch.zeros(rows, held.seen, device=found.device, dtype=torch.float32)
            total.scatter_add_(1, columns, (found.clamp_min(0) * held.valid).flatten(1))
            mean = held.share.sum(total) / held.share.total(heads)
            both = (found + mean.gather(1, columns).view(found.shape)) / 2
            found = torch.where(found < 0, found, both)
        order = KVzip(chunk=self.chunk, lead=self.lead, sinks=self.sinks)
        return order.score(replace(held, reconstruction=found))

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """4 n: the mean's share of a sum and its division, the second sum and the half."""
        return 4 * tokens
