"""How much attention each slot of a prompt received, from the log-sum-exp of its queries.

Slots are outermost: a program holds some keys of one kv head, goes over the queries that may see them, and adds
exp(logit - lse) up in registers. So nothing of n x n is ever held, and no two programs write to the same place.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kvtailor.ops.attention.folded import merge
from kvtailor.ops.triton.call import LOG2E, Call
from kvtailor.ops.triton.installed import interpreting, unfit
from kvtailor.ops.triton.kernels.mass import mass_kernel

__all__ = ["attend_with_mass", "column_mass", "mass_call", "unsuited"]


def unsuited(query: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Why `attend_with_mass` cannot take these; None where it can.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv).
    """
    dtypes = {query.dtype, keys.dtype, values.dtype}
    if len(dtypes) > 1:
        return f"queries, keys and values need one dtype, found {' and '.join(sorted(map(str, dtypes)))}"
    size = keys.shape[-1]
    if size != values.shape[-1] or size % 8 or size > 256:
        return f"torch's kernel takes heads of 8, 16, ... 256 channels, found {size} and {values.shape[-1]}"
    if any(states.stride(-1) != 1 for states in (query, keys, values)):
        return "the channels of a token must lie side by side in memory"
    if query.device.type == "cuda" and query.dtype not in (torch.float16, torch.bfloat16):
        return f"torch's kernel takes states of 16 bits, found {query.dtype}"
    return unfit(query.device, query.dtype)


def attend_with_mass(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, weight: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of a prompt or of its next piece, and the attention that each slot received.

    Args:
        query: (b, q, t, d). keys, values: (b, h, n, d), of which the last t are the queries' own; see `unsuited`.
        scaling: factor before the softmax.
        weight: (b, t) float32 how much each query counts for the mass.
        sinks: (q,) float32 logits that belong to no slot; None: none.

    Returns:
        out (b, q, t, d) in the query's dtype; mass (b, h, n) float32.
    """
    old = keys.shape[2] - query.shape[2]
    found = [_fused(query, keys[:, :, old:], values[:, :, old:], scaling, is_causal=True)]
    if old:
        found.append(_fused(query, keys[:, :, :old], values[:, :, :old], scaling, is_causal=False))
    out, lse = merge(found, None if sinks is None else sinks[:, None])
    return out.to(query.dtype), column_mass(query, keys, lse, scaling, weight=weight)


def _fused(query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp by torch's kernel, whose public function keeps the latter to itself."""
    name = "_scaled_dot_product_flash_attention" + ("" if query.device.type == "cuda" else "_for_cpu")
    out, lse, *_ = getattr(torch.ops.aten, name)(query, keys, values, is_causal=is_causal, scale=scaling)
    return out, lse


def column_mass(
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    weight: Tensor | None = None,
    start: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Sum over queries of the attention that each slot received.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d) of the query's dtype. Channels lie side by side in memory.
        lse: (b, q, t) float32 log-sum-exp of each query's logits over the slots that it sees and its sink, -inf where
            there is neither.
        scaling: factor before the softmax.
        softcap: of the logits; None: none.
        weight: (b, t) float32 how much each query counts; None: all by 1.
        start: (b,) int32 first slot of each row that any query sees, for prompts padded on the left; None: 0.
        causal: query i sees the slots up to n - t + i.

    Returns:
        (b, h, n) float32, summed over the queries of the new tokens and over the heads of a group.
    """
    call, out = mass_call(query, keys, lse, scaling, softcap=softcap, weight=weight, start=start, causal=causal)
    call()
    return out


def mass_call(
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    weight: Tensor | None = None,
    start: Tensor | None = None,
    causal: bool = True,
) -> tuple[Call, Tensor]:
    """The launch of `column_mass`, and what it writes."""
    rows, heads, slots, size = keys.shape
    new = query.shape[2]
    out = torch.empty((rows, heads, slots), dtype=torch.float32, device=query.device)
    if query.dtype != keys.dtype or query.stride(-1) != 1 or keys.stride(-1) != 1:
        found = f"{query.dtype} of strides {query.stride()} and {keys.dtype} of strides {keys.stride()}"
        raise ValueError(f"queries and keys need one dtype and channels side by side in memory, found {found}")
    block = 128 if slots >= 128 and size <= 128 and query.dtype != torch.float32 else 32
    call = Call(
        kernel=mass_kernel,
        grid=(triton.cdiv(slots, block), rows * heads),
        arguments={
            "Q": query,
            "K": keys,
            "LSE": lse.contiguous(),
            "COUNTS": None if weight is None else weight.contiguous(),
            "START": start,
            "OUT": out,
            "new": new,
            "slots": slots,
            "factor": scaling * LOG2E,
            "cap": None if softcap is None else softcap * LOG2E,
            **dict(zip(("q_row", "q_head", "q_new"), query.stride()[:3], strict=True)),
            **dict(zip(("k_row", "k_head", "k_slot"), keys.stride()[:3], strict=True)),
            "HEADS": heads,
            "GROUP": query.shape[1] // heads,
            "SIZE": size,
            "PAD": max(16, triton.next_power_of_2(size)),
            "BLOCK": block,
            "QUERIES": min(64 if block == 128 else 32, max(16, triton.next_power_of_2(new))),
            "CAUSAL": causal,
            "ASM": not interpreting(),
        },
        warps=4,
        stages=3 if block == 128 else 2,
    )
    return call, out
