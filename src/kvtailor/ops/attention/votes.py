"""What the newest queries look at: the attention probabilities of an observation window."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.types import PLAIN_SOFTMAX, Held, Softmax

__all__ = ["head_votes", "window_votes"]


def head_votes(held: Held, head: int, voters: Tensor) -> Tensor:
    """`window_votes` (b, g, n) of the window that a layer observed, to the tokens of one of its kv heads."""
    assert held.queries is not None and held.query_columns is not None
    group = held.queries.shape[1] // held.keys.shape[1]
    return window_votes(
        held.queries[:, head * group : (head + 1) * group],
        held.query_columns,
        voters,
        held.keys[:, head],
        held.positions[:, head],
        held.valid[:, head],
        held.scaling,
        None if held.log_weight is None else held.log_weight[:, head],
        held.softmax_of(head),
    )


def window_votes(
    queries: Tensor,
    query_columns: Tensor,
    voters: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    scaling: float,
    log_weight: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Attention probability that a window's queries give to the tokens of one kv head, summed over the window.

    Args:
        queries: (b, g, w, d) post-RoPE queries of the head's group.
        query_columns: (w,) int64 their columns.
        voters: (b, w): how often each query counts; bool: whether it does.
        keys: (b, n, d) post-RoPE keys.
        positions: (b, n) int64 columns of the keys.
        valid: (b, n) bool: a real token sits here.
        scaling: factor before the softmax.
        log_weight: (b, n) see `Held.log_weight`.
        softmax: of the group's query heads, what it has besides the factor.

    Returns:
        (b, g, n) float32, 0 where `valid` is False for a query that sees anything. Scratch: (b, g * w, n) float32.
    """
    rows, _, window, _ = queries.shape
    # The group's heads and the window's queries are one axis of rows, (b, g * w, d) times (b, d, n): same keys for all.
    logits = (queries.float().flatten(1, 2) * scaling) @ keys.float().transpose(1, 2)
    logits = softmax.cap_(logits).view(rows, -1, window, keys.shape[1])
    if log_weight is not None:
        logits += log_weight[:, None, None]
    seen = valid[:, None] & (positions[:, None] <= query_columns[None, :, None])
    # A finite fill: a padding query sees nothing, and its row must not turn into NaN before it is left out.
    logits = logits.masked_fill_(~seen[:, None], torch.finfo(torch.float32).min)
    return torch.einsum("bgwn,bw->bgn", softmax.probabilities_(logits), voters.to(torch.float32))
