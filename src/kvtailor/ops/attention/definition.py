"""Attention as it is defined: the reference of every faster form."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtailor.types import PLAIN_SOFTMAX, Softmax

__all__ = ["reference"]


def reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    log_weight: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with the whole matrix in memory, in float64 where the inputs are, in float32 otherwise.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv).
        mask: bool, broadcasts to (b, h, t, n); None: every query sees every key.
        scaling: factor before the softmax.
        log_weight: (b, h, n) added to the logits; None: nothing.
        softmax: what the softmax has besides.

    Returns:
        out (b, q, t, dv), zeros where a query sees nothing; lse (b, q, t) over what it sees and its sink, -inf where
        there is neither; the probabilities (b, h, g, t, n).
    """
    b, q, t, d = query.shape
    h, n = keys.shape[1:3]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Query heads of one kv head follow each other: query head j reads kv head j // g.
    grouped = query.to(exact).reshape(b, h, q // h, t, d)
    logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped, keys.to(exact)) * scaling
    logits = softmax.cap_(logits)
    if log_weight is not None:
        logits = logits + log_weight.to(exact)[:, :, None, None]
    if mask is not None:
        logits = logits.masked_fill(~mask.expand(b, h, t, n)[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    if softmax.sinks is not None:
        lse = torch.logaddexp(lse, softmax.sinks.to(exact).view(h, q // h, 1).expand_as(lse))
    # exp(logit - lse) is the softmax. A row of -inf alone has that log-sum-exp too; less 0 its weights are 0, not NaN.
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = torch.einsum("bhgtn,bhnd->bhgtd", weights, values.to(exact))
    return out.reshape(b, q, t, -1), lse.reshape(b, q, t), weights
