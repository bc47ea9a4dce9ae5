"""TOVA: the tokens that the newest query looks at, one set for all heads of a layer.

*Idea*: a decoder with a bounded cache is a recurrent network with that many states, and the attention of the newest
query shows which state it can spare. Its attention probabilities are averaged over all query heads of the layer, and
the lowest goes.

*Paper*: "Transformers are Multi-State RNNs", arXiv 2401.06104, the policy TOVA (Token Omission Via Attention).

*Source*: the paper, and a reading of its repository (no licence) and of kvpress (Apache-2.0); nothing was taken.

*Departs*: the paper evicts after every token; here once the cache is `slack` tokens past the budget, by the query of
that moment. The newest token always stays, which the paper leaves to its attention. An allocator may give heads
different budgets: then a head that has dropped a token counts as giving it nothing. In a row whose newest query is
padding no query votes, and the newest tokens stay.

*Cost*: one query; O(q * n * d) time, one kv head at a time, so the scratch is float32 (b, n, d), and one number for
each token seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["TOVA"]


@dataclass(frozen=True, kw_only=True)
class TOVA(Scorer):
    """Attention of the newest query, averaged over the layer."""

    slack: ClassVar[int | None] = 32

    @property
    def needs(self) -> Needs:
        return Needs(window=1)

    @property
    def recent(self) -> int:
        return 1

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32 probabilities, the same for a token in all heads that hold it.

        Raises:
            ValueError: no query was gathered.
        """
        if held.queries is None or held.query_columns is None:
            raise ValueError("tova scores by the newest query, but none was gathered; observe with Needs(window=1)")
        rows, query_heads = held.queries.shape[:2]
        heads = held.keys.shape[1]
        # Heads may hold different tokens, so probabilities are averaged by column.
        columns = held.positions.clamp(min=0)
        given = torch.zeros(rows, held.seen, dtype=torch.float32, device=held.keys.device)
        for head in range(heads):
            given.scatter_add_(1, columns[:, head], self._given(held, head))
        given = held.share.sum(given)
        score = (given / held.share.total(query_heads)).gather(1, columns.flatten(1)).view(columns.shape)
        own = held.held_by_first()[:, -1]
        first = held.first[:, None, None]
        age = (held.positions - first).float() / (held.seen - first)
        return torch.where(own[:, None, None], score, age)

    def attention_scale(self, held: Held, *, group: int) -> Tensor:
        """(b,) ones: scores are means of probabilities."""
        return torch.ones_like(held.first, dtype=torch.float32)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g n (2 d + 5): for each query head and token 2 d for the logit, 4 for its softmax (less the maximum,
        exponential, sum, division) and 1 for the mean over heads, whose one division makes up for the first addition.
        """
        return group * tokens * (2 * size + 5)

    def _given(self, held: Held, head: int) -> Tensor:
        """(b, n) float32: attention that the newest queries of one kv head's group give to its tokens, summed."""
        assert held.queries is not None and held.query_columns is not None
        group = held.queries.shape[1] // held.keys.shape[1]
        queries = held.queries[:, head * group : (head + 1) * group]
        if held.query_columns.shape[0] > 1:
            # Several are of the newest column where other layers read what this one holds: the mean of them counts.
            queries = queries[:, :, held.query_columns == held.query_columns[-1]]
        count = queries.shape[2]
        # (b, g * m, d) times (b, d, n): the m queries of each head of the group read the same keys.
        logits = (queries.float().flatten(1, 2) * held.scaling) @ held.keys[:, head].float().transpose(1, 2)
        softmax = held.softmax_of(head)
        softmax.cap_(logits)
        if held.log_weight is not None:
            logits += held.log_weight[:, head, None]
        seen = held.valid[:, head] & (held.positions[:, head] <= held.query_columns[-1])
        # A finite fill: a row that sees nothing must not turn into NaN.
        logits = logits.masked_fill_(~seen[:, None], torch.finfo(torch.float32).min)
        # (b, g, m, n): the m queries of each query head.
        return softmax.probabilities_(logits.unflatten(1, (group, count))).sum((1, 2)) / count * seen
