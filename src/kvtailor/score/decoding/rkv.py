"""R-KV: the tokens that the newest queries look at and whose keys are not said again.

*Idea*: a chain of thought repeats itself, and repeated tokens attend to each other, so attention alone keeps many
copies of one thought. A token's importance (attention of the newest queries) is weighed against its redundancy (how
alike its key is to all others), from which the newest of the tokens that are alike is spared.

*Paper*: "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv 2505.24133; our `window` = its alpha
observation tokens, our `weight` = its lambda, our slack = its buffer of 128 decoded tokens.

*Source*: the paper and a reading of its repository (Apache-2.0); nothing was taken.

*Departs*: where a token is alike to no other, the repository still spares the first token once; here nothing is spared.
Query heads of a group are reduced by the largest logit before the softmax, and the softmax runs over the tokens before
the window, as there. Rows with padding and lanes with gaps pool over what is held. The prompt is evicted like all
else, as there. `weight` is the paper's 0.1; the repository's scripts have 0.07, and arXiv 2609.03430 found 0.5 better.

*Cost*: the last `window` queries; time O(q * window * n * d + h * n^2 * d), and float32 scratch (b, 128, n).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtailor.method import Serves
from kvtailor.ops import dispatch
from kvtailor.ops.attention.observed import observed_queries
from kvtailor.ops.lanes.pool import pool_members
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs

__all__ = ["RKV"]

# Tokens whose keys are compared at once: on a device _BLOCK with all others; on a CPU _ROWS, with as many others as
# make _PAIRS pairs, and _BLOCK at the least.
_BLOCK = 128
_ROWS = 2048
_PAIRS = 1 << 18
# Tokens without an answer go on alone where they are at most such a share of those that looked.
_FEW = 0.75


@dataclass(frozen=True, kw_only=True)
class RKV(Scorer):
    """Importance less redundancy.

    Attributes:
        window: newest queries that vote, and newest tokens that always stay.
        weight: of the importance, 0 to 1; the redundancy has the rest.
        alike: cosine of two keys above which the newer token stands for the older one.
        kernel: odd width of the maximum of importance along the text, in tokens; 1: none.
    """

    window: int = 8
    weight: float = 0.1
    alike: float = 0.5
    kernel: int = 7
    slack: ClassVar[int | None] = 128
    serves: ClassVar[Serves] = Serves(
        latents="it compares keys by their direction, and the direction of a latent is that of no head's key",
        sinks=False,
    )

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"rkv: window must be at least 1 query, found {self.window}; the paper uses 8")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"rkv: weight must be from 0 to 1, found {self.weight}; the paper uses 0.1")
        if not -1 <= self.alike <= 1:
            raise ValueError(f"rkv: alike is a cosine, from -1 to 1, found {self.alike}; the paper uses 0.5")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"rkv: kernel must be odd and at least 1, found {self.kernel}; the paper uses 7")

    @property
    def needs(self) -> Needs:
        return Needs(window=self.window)

    @property
    def recent(self) -> int:
        return self.window

    def score(self, held: Held) -> Tensor:
        """(b, h, n) float32, from -1 to 1; inside the window, which stays anyway, the redundancy alone.

        Raises:
            ValueError: no queries were gathered.
        """
        _, columns = observed_queries(held, "rkv scores by", self.window)
        heads = range(held.keys.shape[1])
        history = held.valid & (held.positions < columns[0])
        voters = held.held_by_first()
        votes = torch.stack([self._votes(held, head, history[:, head], voters) for head in heads], 1)
        importance = pool_members(votes, history, self.kernel, "max")
        each = [_redundancy(held.keys[:, head], held.valid[:, head], self.alike) for head in heads]
        return self.weight * importance - (1 - self.weight) * torch.stack(each, 1)

    def flops(self, *, tokens: int, group: int, size: int) -> int:
        """g w n 2 d + w n 5 + n^2 (2 d + 1) + n (3 d + 9).

        For each query of the window and token: 2 d for the logit of each query head, and for the largest of them 4 for
        its softmax and 1 for the mean. For each pair of tokens: 2 d for the cosine, 1 for the mean. For each token: 3 d
        for its key's direction, 4 for the softmax of the redundancy, 5 for the two means and what is made of both.
        """
        window = min(self.window, tokens)
        pairs = tokens * tokens * (2 * size + 1)
        return window * tokens * (2 * group * size + 5) + pairs + tokens * (3 * size + 9)

    def _votes(self, held: Held, head: int, history: Tensor, voters: Tensor) -> Tensor:
        """(b, n) float32: mean probability that the `voters` (b, w) give to a kv head's `history` (b, n)."""
        assert held.queries is not None
        rows, window = voters.shape
        group = held.queries.shape[1] // held.keys.shape[1]
        queries = held.queries[:, head * group : (head + 1) * group].float() * held.scaling
        # (b, g * w, d) times (b, d, n): all query heads of the group read the same keys.
        logits = queries.flatten(1, 2) @ held.keys[:, head].float().transpose(1, 2)
        logits = held.softmax_of(head).cap_(logits).view(rows, group, window, -1).amax(1)
        if held.log_weight is not None:
            logits += held.log_weight[:, head, None]
        # A finite fill: with no token before the window a row must not turn into NaN.
        logits = logits.masked_fill_(~history[:, None], torch.finfo(torch.float32).min)
        given = torch.einsum("bwn,bw->bn", torch.softmax(logits, -1, out=logits), voters.to(torch.float32))
        return given / voters.sum(-1, keepdim=True).clamp_min(1)


def _redundancy(keys: Tensor, valid: Tensor, alike: float) -> Tensor:
    """(b, n) float32 of one kv head from keys (b, n, d): softmax over its tokens of their mean cosine to the others.

    Of each token's cosines the newest above `alike` is left out, so that of tokens that are alike the newest seems to
    be alone.
    """
    directions = torch.nn.functional.normalize(keys.float(), dim=-1).masked_fill(~valid[..., None], 0.0)
    newest = _newest_alike(directions, valid, alike)
    at = (newest - 1).clamp_min(0)
    their = directions.gather(1, at[..., None].expand_as(directions))
    left_out = (directions * their).sum(-1).masked_fill_(newest == 0, 0.0)
    # What all tokens have in common gives each the sum of its cosines without the table of pairs.
    total = (directions @ directions.sum(1)[..., None]).squeeze(-1) - directions.square().sum(-1)
    total.scatter_add_(1, at, -left_out)
    mean = (total / valid.sum(-1, keepdim=True).clamp_min(1)).masked_fill(~valid, torch.finfo(torch.float32).min)
    return torch.softmax(mean, -1)


def _newest_alike(directions: Tensor, valid: Tensor, alike: float) -> Tensor:
    """(b, n) int64: the newest other token whose cosine to each is above `alike`, counted from 1; 0 where none is.

    From directions (b, n, d) of length 1, 0 where not `valid` (b, n). On a CPU each token first looks at newer ones. Of
    those that saw none alike, no two are alike, so that they need only look at older ones that did.
    """
    slots = valid.shape[1]
    slot = torch.arange(slots, device=directions.device)
    across = directions.transpose(1, 2).contiguous()
    newest = torch.zeros(valid.shape, dtype=torch.float32, device=directions.device)
    if directions.device.type != "cpu":
        # It would wait for the host each time that only some tokens go on.
        places = (slot + 1).to(torch.float32).where(valid, 0.0)[:, None]
        for rows in slot.split(_BLOCK):
            cosines = (directions[:, rows] @ across).masked_fill_(rows[:, None] == slot, -2.0)
            newest[:, rows] = cosines.gt_(alike).mul_(places).amax(-1)
        return newest.long()
    if (look := dispatch.newest_alike(directions)) is not None:
        return torch.stack([_by_kernel(look, *lane, alike) for lane in zip(directions, valid, strict=True)])
    for rows in valid.any(0).nonzero()[:, 0].split(_ROWS):
        _look(directions, valid, across, rows, slot, alike, newest, newer=True)
    answered = newest > 0
    older = answered.any(0).nonzero()[:, 0]
    across = across[..., older]
    for rows in (valid & ~answered).any(0).nonzero()[:, 0].split(_ROWS):
        _look(directions, valid, across, rows, older, alike, newest, newer=False)
    return newest.long()


def _by_kernel(look: Callable[..., Tensor], directions: Tensor, valid: Tensor, alike: float) -> Tensor:
    """`_newest_alike` of one lane, directions (n, d) and `valid` (n,)."""
    newest = torch.zeros(valid.shape, dtype=torch.int64)
    slots = valid.nonzero()[:, 0]
    newest[slots] = look(directions, slots, slots, alike, newer=True)
    waiting = slots[newest[slots] == 0]
    newest[waiting] = look(directions, waiting, newest.nonzero()[:, 0], alike, newer=False)
    return newest


def _look(
    directions: Tensor,
    valid: Tensor,
    across: Tensor,
    rows: Tensor,
    columns: Tensor,
    alike: float,
    newest: Tensor,
    *,
    newer: bool,
) -> None:
    """Put into `newest` (b, n) what some slots find in others.

    A model's keys are mostly alike, so that the newest columns come first, and only rows without an answer go on.

    Args:
        directions: (b, n, d). valid: (b, n).
        across: (b, d, k) directions of the columns.
        rows: (r,) ascending slots that look. columns: (k,) ascending slots that are looked at.
        alike: see `RKV`.
        newest: what was found before.
        newer: of the columns those count that are newer than the row, else those that are older.
    """
    end, its = len(columns), directions[:, rows]
    # Written over again and again: new memory would take longer than what is put there.
    scratch = its.new_empty(its.shape[0] * max(_PAIRS, _BLOCK * len(rows)))
    while end and len(rows):
        begin = max(0, end - max(_BLOCK, _PAIRS // len(rows)))
        some = columns[begin:end]
        # Rows that have any of these columns before or behind them.
        first, last = (0, _below(rows, some[-1])) if newer else (_below(rows, some[0] + 1), len(rows))
        looks = rows[first:last]
        shape = its.shape[0], len(looks), len(some)
        cosines = torch.bmm(its[:, first:last], across[..., begin:end], out=scratch[: math.prod(shape)].view(shape))
        if newer and _below(looks, some[0]) < len(looks):
            cosines.masked_fill_(some <= looks[:, None], -2.0)
        elif not newer and _below(looks, some[-1] + 1):
            cosines.masked_fill_(some >= looks[:, None], -2.0)
        end = begin
        # Most often none is alike, or nearly all are.
        if bool((cosines.amax(-1) > alike).any()):
            # Float32 holds the numbers of slots exactly.
            places = ((some + 1) * valid[:, some]).to(torch.float32)[:, None]
            # Of rows of a batch one may have its answer, and an older one than that is none.
            found = torch.maximum(newest[:, looks], cosines.gt_(alike).mul_(places).amax(-1))
            newest[:, looks] = found
            waiting = ((found == 0) & valid[:, looks]).any(0)
            # What has its answer finds none that is newer. To pick a few out would take longer than to let them look.
            if waiting.sum() <= _FEW * len(looks):
                rows = torch.cat([rows[:first], looks[waiting], rows[last:]])
                its = directions[:, rows]
        if newer:
            stay = _below(rows, some[0])
            rows, its = rows[:stay], its[:, :stay]


def _below(rows: Tensor, slot: Tensor) -> int:
    """Return how many of the ascending rows stand before a slot."""
    return int(torch.searchsorted(rows, slot))
