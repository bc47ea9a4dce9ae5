"""LazyEviction: the tokens that come back within the longest interval after which they came back before.

*Idea*: in a chain of thought most tokens are looked at, then left alone for a while, and looked at again. A token is
active where a query gives it at least `threshold`. Its last active step TS and the longest time MRI between two of them
are kept; at step t it scores 2 sigmoid(-(t - TS) / MRI) + 2 sigmoid(1 - MRI): high while it is not overdue, and
higher where it comes back often. Tokens are evicted only after each window of steps, so that what rests is seen to
return.

*Paper*: "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long Reasoning", arXiv
2506.15969 (ACL 2026), equations 1 and 2; our `window` = its W, which is how many newest tokens stay, steps are watched
and pass between two evictions; our `threshold` = its alpha.

*Source*: notes on the paper, and a reading of its repository (MIT) for what they leave open: the second term, which
misses where MRI is 0, and where TS and MRI begin; nothing was taken. The repository adds 1 inside of the first term's
sigmoid, which the paper does not.

*Departs*: the paper repeats keys for each query head and keeps a set for each; here a kv head has one, and a token is
active where any head of the group looks at it. Observation begins with the prompt's last `window` queries, where the
paper's begins with the first decoded token, since a prompt longer than the budget is cut here; older tokens count as
active just before. W is a share of the intervals that the paper measures on each task (27 to 175); there is no default
for all of them. Where the plan's slack is longer than `window`, steps in between are not seen. Inside of `critical`
nothing is kept between two evictions.

*Cost*: the last `window` queries, two numbers and a column (12 bytes) for each token and kv head; time O(q * window * n
* d), one row and kv head at a time, so the scratch is float32 (g, window, n).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtailor.ops.attention.observed import observed_queries, window_attention
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["LazyEviction"]

_LEAST = 1e-5


@dataclass(frozen=True, kw_only=True)
class LazyEviction(Scorer):
    """How probable it is that a token is looked at again, by the intervals at which it was.

    Attributes:
        window: newest queries that are watched, newest tokens that always stay, and steps between two evictions.
        threshold: attention probability from which on a token is active.
    """

    window: int = 32
    threshold: float = 1e-4

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"lazyeviction: window must be at least 1 query, found {self.window}; the paper has 27-175"
            )
        if not 0 < self.threshold < 1:
            raise ValueError(
                f"lazyeviction: threshold must be above 0 and below 1, found {self.threshold}; the paper has 1e-4"
            )

    @property
    def slack(self) -> int | None:
        return self.window

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window, previous=True, notes=2)

    @property
    def recent(self) -> int:
        return self.window

    def note(self, held: Held) -> Tensor:
        """(b, h, 2, n) float32: the place in its row of the last query to which each token was active, and the longest
        interval between two of them; exact up to 2**24 tokens.

        Raises:
            ValueError: no queries were gathered.
        """
        observed_queries(held, "lazyeviction watches", self.window)
        noted = torch.zeros(
            (*held.positions.shape[:2], 2, held.positions.shape[2]), device=held.keys.device, dtype=torch.float32
        )
        for row in range(held.keys.shape[0]):
            for head in range(held.keys.shape[1]):
                there = held.there(row, head)
                noted[row, head][:, there] = self._noted(held, row, head, there)
        return noted

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, from 0 to 2.

        Raises:
            ValueError: no queries were gathered.
        """
        active, longest = (self.note(held) if held.noted is None else held.noted).unbind(2)
        rests = (held.seen - 1 - held.first)[:, None, None] - active
        again = 2 * torch.sigmoid(-rests / longest.clamp_min(_LEAST))
        often = 2 * torch.sigmoid(1 - longest)
        return (again + torch.where(longest > 0, often, 0.0)).masked_fill(~held.valid, 0.0)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g w n (2 d + 4) + 12 n: logits and their softmax, two sigmoids of each token; all else are comparisons."""
        return tokens * (group * min(self.window, tokens) * (2 * size + 4) + 12)

    def _noted(self, held: Held, row: int, head: int, there: slice | Tensor) -> Tensor:
        """(2, n) of the n tokens of one row and kv head."""
        assert held.query_columns is not None
        given, _ = window_attention(held, row, head)
        columns = held.query_columns if held.holds_window else held.query_columns[held.held_by_any(row)]
        # Counted from the row's first token, so that padding changes nothing.
        columns = columns - held.first[row]
        positions = held.positions[row, head][there] - held.first[row]
        # What came before its observation began counts as active just before.
        start = columns[:1].amin() if columns.numel() else torch.zeros((), dtype=torch.int64, device=positions.device)
        active = torch.maximum(positions, start).float() - 1
        longest = torch.zeros_like(active)
        seen_before = torch.full((), -1.0, device=active.device, dtype=torch.float32)
        if held.previous is not None and positions.numel():
            known = held.previous[row, head][:, there]
            told = ~known[0].isnan()
            active, longest = torch.where(told, known[0], active), torch.where(told, known[1], longest)
            # The newest tokens are kept by all heads: those that were there before tell which queries were watched.
            seen_before = torch.where(told, positions, -1).amax().float()
        if not columns.numel() or not positions.numel():
            return torch.stack([active, longest])
        looked = (given.amax(0) >= self.threshold) & (columns > seen_before)[:, None]
        # (v, n): the newest active step up to each query; before it stands the one of the query before.
        upto = torch.where(looked, columns[:, None].float(), active).cummax(0).values
        before = torch.cat([active[None], upto[:-1]])
        intervals = torch.where(looked, columns[:, None] - before, 0.0)
        return torch.stack([upto[-1], torch.maximum(longest, intervals.amax(0))])
