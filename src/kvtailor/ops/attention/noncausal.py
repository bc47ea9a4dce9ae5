"""Attention without a causal mask, inside runs of adjacent tokens: what queries of a text look at, before or behind."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.ops.lanes.packed import pack

__all__ = ["attention_in_runs"]

# Logits of one block of runs (8 MiB).
_BLOCK = 1 << 21


def attention_in_runs(
    queries: Tensor,
    columns: Tensor,
    keys: Tensor,
    positions: Tensor,
    member: Tensor,
    size: int,
    factor: float,
    log_weight: Tensor | None = None,
) -> Tensor:
    """What the tokens of one kv head get from the queries of their own run, whichever comes first.

    Runs are `size` members in time order; the last may be shorter. A query takes part in the run that its own token is
    in, and in none where that token is no member. With a query of each member, a token's number is the sum of the
    probabilities that it gets, averaged over the query heads. Where some of a run's queries are missing, it is that of
    the others, scaled up to as many as the run has members; 1, an even share, where all are.

    Args:
        queries: (b, g, m, d) of the head's group, after rotation.
        columns: (b, m) int64 their columns; -1 for filler.
        keys: (b, n, d) after rotation.
        positions: (b, n) int64 columns of the keys, ascending among the members.
        member: (b, n) bool.
        size: c, members of a run.
        factor: before the softmax.
        log_weight: (b, n) see `Held.log_weight`.

    Returns:
        (b, n) float32, 0 for what is no member.
    """
    b, group, _, d = queries.shape
    packed = pack(member, size)
    slots = packed.runs * size
    there, of_keys = packed.filled(), packed.states_in_runs(keys.float())
    far = torch.iinfo(torch.int64).max
    at = packed.in_runs(positions).masked_fill(~there, far).flatten(1)
    slot = torch.searchsorted(at, columns.contiguous()).clamp(max=slots - 1)
    slot = torch.where(at.gather(1, slot) == columns, slot, slots)
    asks = (
        torch.zeros(b, slots + 1, device=keys.device, dtype=torch.float32)
        .scatter(1, slot, 1.0)[:, :-1]
        .view(b, packed.runs, 1, size)
    )
    bias = (
        torch.zeros(there.shape, device=keys.device, dtype=torch.float32)
        if log_weight is None
        else packed.in_runs(log_weight.float())
    )
    # A finite fill: a run without members must not turn into NaN before it is left out.
    bias = bias.masked_fill(~there, torch.finfo(torch.float32).min)[:, :, None]
    mass = torch.zeros(b, packed.runs, size, device=keys.device, dtype=torch.float32)
    step = max(1, _BLOCK // (b * size * size))
    for head in range(group):
        asked = torch.zeros(b, slots + 1, d, device=keys.device, dtype=torch.float32)
        asked.scatter_(1, slot[..., None].expand(-1, -1, d), queries[:, head].float() * factor)
        asked = asked[:, :-1].view(b, packed.runs, size, d)
        for first in range(0, packed.runs, step):
            here = slice(first, first + step)
            logits = asked[:, here] @ of_keys[:, here].transpose(-1, -2)
            logits += bias[:, here]
            torch.softmax(logits, -1, out=logits)
            mass[:, here] += (asks[:, here] @ logits)[:, :, 0]
    count, given = there.sum(-1, keepdim=True), asks.sum(-1)
    return packed.back(torch.where(given > 0, mass * count / (group * given.clamp(min=1)), 1.0))
