"""One new token over lanes in 16 bits, by torch's fused CPU kernel: the query heads of a group are its query rows.

The kernel reads 16-bit keys without a float32 copy and gives the log-sum-exp with which parts are merged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtailor.ops.attention.lanes import Lanes
from kvtailor.types import PLAIN_SOFTMAX, Softmax

__all__ = ["folded", "merge", "over_owners", "suits"]


def suits(query: Tensor, part: Lanes, softmax: Softmax = PLAIN_SOFTMAX) -> bool:
    """Whether `folded` is the fast path of a plain part: bfloat16 on the CPU, one new token, one head size, no cap."""
    return (
        part.plain
        and softmax.softcap is None
        and part.keys.device.type == "cpu"
        and query.dtype == part.keys.dtype == torch.bfloat16
        and query.shape[2] == 1
        and part.keys.shape[-1] == part.values.shape[-1]
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def folded(query: Tensor, parts: Sequence[Lanes], scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of one new token over all slots of all parts.

    Args:
        query: (n, g, 1, d) in the parts' dtype, n = b * h.
        parts: see `Lanes`.
        scaling: factor before the softmax.

    Returns:
        out (n, g, 1, dv), in float32 or the parts' dtype, zeros where the query sees nothing; lse (n, g, 1) float32,
        -inf there.
    """
    found = [
        _fused(query, part, scaling) if part.owner is None else _paged(query, part, part.owner, scaling)
        for part in parts
    ]
    return merge(found)


def merge(found: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the union of what disjoint parts saw, from each part's out (..., dv) and lse (...).

    Args:
        found: at least one part.
        sinks: logits that broadcast to lse, each of a slot with the value 0; None: none.
    """
    if len(found) == 1:
        return found[0] if sinks is None else _with_sinks(*found[0], sinks)
    # Softmax over a union: part i counts exp(lse_i - lse). Where no part sees anything all are -inf; with 0 in place of
    # the sum the shares are exp(-inf) = 0, and not NaN.
    lses = torch.stack([lse for _, lse in found] + ([] if sinks is None else [sinks.expand_as(found[0][1])]))
    lse = lses.logsumexp(0)
    shares = (lses - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    out = shares[0][..., None] * found[0][0]
    # A sink is the last of the parts: it has a share, and adds 0 to the output.
    for share, (part, _) in zip(shares[1:], found[1:], strict=sinks is None):
        out.addcmul_(share[..., None], part.float())
    return out, lse


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` of one part and the sinks: the tokens keep exp(lse) / (exp(lse) + exp(sink)) of the probability."""
    return out * (lse - sinks).sigmoid_()[..., None], torch.logaddexp(lse, sinks.expand_as(lse))


def _paged(query: Tensor, part: Lanes, owner: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """`_fused` over each lane by itself, then merged over the lanes of an owner."""
    return over_owners(*_fused(query.index_select(0, owner), part, scaling), owner, query.shape[0])


def over_owners(outs: Tensor, lses: Tensor, owner: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Attention of each owner over all its lanes, from each lane's out (m, g, t, dv) and lse (m, g, t).

    Args:
        owner: (m,) int64 of each lane.
        owners: n.
    """
    # The same as `merge`, where the parts are an owner's lanes: how many there are differs, so they meet by scatter.
    top = lses.new_full((owners, *lses.shape[1:]), -torch.inf)
    top.scatter_reduce_(0, owner[:, None, None].expand_as(lses), lses, "amax")
    shift = top.masked_fill(top == -torch.inf, 0.0)
    share = (lses - shift.index_select(0, owner)).exp_()
    total = torch.zeros_like(top).index_add_(0, owner, share)
    out = top.new_zeros((*top.shape, outs.shape[-1])).index_add_(0, owner, outs.float() * share[..., None])
    return out / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None], shift + total.log()


def _fused(query: Tensor, part: Lanes, scaling: float) -> tuple[Tensor, Tensor]:
    bias = blind = None
    if part.visible is not None:
        seen = part.visible.expand(query.shape[0], 1, part.keys.shape[1])[:, None]
        bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        blind = ~seen.any(-1)
    # Each lane is a row of the kernel's batch with one head, whose g "tokens" are the query heads of the group: they
    # read the same keys, which the kernel then loads once and not g times.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(1, 2), part.keys[:, None], part.values[:, None], attn_mask=bias, scale=scaling
    )
    lse = lse.reshape(query.shape[:3])
    if blind is not None:
        # A row that sees nothing comes back with a log-sum-exp of 0, which would count as a slot with the logit 0.
        lse = lse.masked_fill(blind, -torch.inf)
    return out.transpose(1, 2), lse
