"""Attention of many queries over one uniform part: a prompt, or a chunk of it after what is already held.

A chunk sees all that was held before it, and itself causally: two calls that need no mask, merged by their
log-sum-exps, where torch's kernel gives them. Under any other mask queries are taken in blocks, and each block stops at
the last slot that it may see, so that no t x n matrix or mask is ever held and the causal half of the work is not done.

torch's fused kernels know neither a cap nor sinks. Sinks need only the log-sum-exp of what a query sees, which the
kernel for the CPU gives; where it cannot be asked for, and where logits are capped, a block's logits are written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtailor.ops import dispatch
from kvtailor.ops.attention.folded import merge
from kvtailor.types import PLAIN_SOFTMAX, Softmax

__all__ = ["causal", "masked", "query_blocks", "with_mass"]

# Elements of one block's mask, or of its float32 probabilities (16 MiB).
_BLOCK = 1 << 22


def causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """Causal attention where the queries are the last of the held tokens, or all of them.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv). All of one dtype.
        scaling: factor before the softmax.
        softmax: what the softmax has besides.

    Returns:
        (b, q, t, dv) in the query's dtype.
    """
    older = keys.shape[2] - query.shape[2]
    if softmax.softcap is not None:
        return _blockwise(query, keys, values, scaling, softmax, None, None)[0]
    if older == 0 and softmax.plain:
        return _sdpa(query, keys, values, scaling, None, is_causal=True)
    # The plain form of a chunk is that of every device.
    if _gives_lse(query, keys, values) and (older == 0 or dispatch.forced() != "reference"):
        own = _with_lse(query, keys[:, :, older:], values[:, :, older:], scaling, None, is_causal=True)
        if older == 0:
            return _sunk(*own, softmax)
        # What stands before the queries is seen by all of them.
        before = _with_lse(query, keys[:, :, :older], values[:, :, :older], scaling, None, is_causal=False)
        return merge([before, own], None if softmax.sinks is None else softmax.sinks[:, None])[0].to(query.dtype)
    if not softmax.plain:
        return _blockwise(query, keys, values, scaling, softmax, None, None)[0]

    def sees(first: int, end: int) -> Tensor:
        # Query `first` stands at slot older + first.
        return torch.ones((1, end - first, keys.shape[2]), dtype=torch.bool, device=query.device).tril(older + first)

    return masked(query, keys, values, scaling, sees)


def masked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    sees: Callable[[int, int], Tensor],
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Attention under any mask.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv). All of one dtype.
        scaling: factor before the softmax.
        sees: for the queries first..end a bool (b or 1, end - first, n).
        softmax: what the softmax has besides.

    Returns:
        (b, q, t, dv) in the query's dtype; zeros where a query sees nothing.
    """
    b, q, t, _ = query.shape
    fused = softmax.plain or (softmax.softcap is None and _gives_lse(query, keys, values))
    # Laid out as (b, t, q, dv), in which order the model joins the heads of a token.
    out = query.new_empty((b, t, q, values.shape[-1])).transpose(1, 2)
    # A mask has b * n elements for each query of a block.
    for first, end in query_blocks(t, b * keys.shape[2], most=256):
        mask = sees(first, end)
        some = mask.any(-1)
        reach = _reach(mask)
        if reach == 0:
            out[:, :, first:end] = 0
            continue
        if not fused:
            block = query[:, :, first:end]
            out[:, :, first:end] = _blockwise(block, keys, values, scaling, softmax, None, _of_rows(mask))[0]
            continue
        mask = mask[:, None, :, :reach]
        # Kernels differ on a query that sees nothing: zeros, an average of all values, or NaN.
        sides = query[:, :, first:end], keys[:, :, :reach], values[:, :, :reach]
        if softmax.plain:
            block = _sdpa(*sides, scaling, mask, is_causal=False)
        else:
            block = _sunk(*_with_lse(*sides, scaling, mask, is_causal=False), softmax)
        out[:, :, first:end] = block.masked_fill(~some[:, None, :, None], 0.0)
    return out


def with_mass(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    weight: Tensor,
    sees: Callable[[int, int, int], Tensor] | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> tuple[Tensor, Tensor]:
    """Attention that also gives how much of it each slot received, in one pass.

    Args:
        query: (b, q, t, d). keys: (b, h, n, d). values: (b, h, n, dv). All of one dtype; the last t slots are the
            queries' own.
        scaling: factor before the softmax.
        weight: (b, t) float32: how much each query counts for the mass.
        sees: for a row and its queries first..end a bool (h or 1, end - first, n); None: causality alone.
        softmax: what the softmax has besides.

    Returns:
        out (b, q, t, dv) in the query's dtype, zeros where a query sees nothing; mass (b, h, n) float32.
    """
    fast = None if sees is not None or softmax.softcap is not None else dispatch.prompt_mass(query, keys, values)
    if fast is not None:
        return fast(query, keys, values, scaling, weight, softmax.sinks)
    out, mass = _blockwise(query, keys, values, scaling, softmax, weight, sees)
    assert mass is not None
    return out, mass


def _blockwise(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    softmax: Softmax,
    weight: Tensor | None,
    sees: Callable[[int, int, int], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """`with_mass` with the logits of a block of queries and one kv head at a time; no mass where there is no weight."""
    b, q, t, d = query.shape
    h, n, dv = values.shape[1:]
    group = q // h
    out = query.new_empty((b, t, q, dv)).transpose(1, 2)
    mass = None if weight is None else torch.zeros((b, h, n), dtype=torch.float32, device=query.device)
    lowest = torch.finfo(torch.float32).min
    for first, end in query_blocks(t, group * n, most=128):
        new = end - first
        # Among the block's own columns, those above the diagonal are still to come; all older columns are seen.
        future = torch.ones((new, new), dtype=torch.bool, device=query.device).triu(1)
        for row in range(b):
            mask = None if sees is None else sees(row, first, end)
            # Slots past the block's last query are seen by none of it.
            reach = n - t + end if mask is None else _reach(mask)
            if reach == 0:
                out[row, :, first:end] = 0
                continue
            some = None if mask is None else mask.any(-1)
            for head in range(h):
                mine = slice(head * group, (head + 1) * group)
                # (g, new, d) as g * new rows; the weights of a block, (g, new, reach) float32, are all that is held.
                rows = (query[row, mine, first:end].float() * scaling).reshape(group * new, d)
                weights = softmax.cap_(torch.mm(rows, keys[row, head, :reach].float().t()).view(group, new, reach))
                share = None if weight is None else weight[row, first:end]
                if mask is None or some is None:
                    weights[..., n - t + first :].masked_fill_(future, lowest)
                else:
                    # A query that sees nothing would share itself out evenly; it counts for nothing instead.
                    weights.masked_fill_(~mask[head % mask.shape[0], :, :reach], lowest)
                    share = None if share is None else share * some[head % mask.shape[0]]
                # `lowest` and not -inf, whose softmax over a row of nothing else would be NaN.
                own = softmax.of_heads(head * group, group)
                weights = own.probabilities_(weights).view(group * new, reach)
                if mass is not None and share is not None:
                    # (1, g * new) times (g * new, reach): each query counts as often as the group has heads.
                    mass[row, head, :reach] += torch.mm(share.repeat(group)[None], weights)[0]
                block = _mixed(weights, values[row, head, :reach]).view(group, new, dv)
                if some is not None:
                    block.masked_fill_(~some[head % some.shape[0], :, None], 0.0)
                out[row, mine, first:end] = block
    return out, mass


def query_blocks(count: int, width: int, *, most: int) -> Iterator[tuple[int, int]]:
    """Slices (first, end) of `count` queries, each at most `most` long and such that length * width stays bounded."""
    size = max(1, min(most, _BLOCK // max(1, width)))
    for first in range(0, count, size):
        yield first, min(first + size, count)


def _of_rows(mask: Tensor) -> Callable[[int, int, int], Tensor]:
    """What `_blockwise` asks for, of a mask (b or 1, t, n)."""
    return lambda row, first, end: mask[row % mask.shape[0], first:end][None]


def _reach(mask: Tensor) -> int:
    """Slots up to the last one that any query sees."""
    slot = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return int((mask.flatten(0, -2).any(0) * slot).max()) if mask.shape[-1] else 0


def _mixed(weights: Tensor, values: Tensor) -> Tensor:
    if values.dtype == torch.float16 and values.device.type == "cpu":
        return torch.mm(weights, values.float())
    return torch.mm(weights.to(values.dtype), values)


def _gives_lse(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch's kernel for the CPU reads these states, which gives their log-sum-exp beside the output."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == keys.dtype
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def _with_lse(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """`_sdpa` with the log-sum-exp (b, q, t) float32 of what each query sees. See `_gives_lse`."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    # It wants keys and values of one size, as in `_sdpa`.
    size, width = keys.shape[-1], values.shape[-1]
    query, keys, values = (_widened(each, max(size, width)) for each in (query, keys, values))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, is_causal=is_causal, attn_mask=bias, scale=scaling
    )
    return out[..., :width], lse


def _sunk(out: Tensor, lse: Tensor, softmax: Softmax) -> Tensor:
    """An output over the tokens alone, in place, less the shares of the sinks."""
    assert softmax.sinks is not None
    return out.mul_((lse - softmax.sinks[:, None]).sigmoid_()[..., None].to(out.dtype))


def _sdpa(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    size, width = keys.shape[-1], values.shape[-1]
    if size != width and query.device.type == "cpu":
        # torch's fused kernel on the CPU wants keys and values of one size; its other form holds the n x n matrix.
        # Channels of 0 change no product, and their sums are left out.
        query, keys, values = (_widened(each, max(size, width)) for each in (query, keys, values))
        return _sdpa(query, keys, values, scaling, mask, is_causal=is_causal)[..., :width]
    grouped = query.shape[1] != keys.shape[1]
    if query.dtype != torch.float16 or query.device.type != "cpu":
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling, enable_gqa=grouped
        )
    # torch's float16 kernel on the CPU is three times slower than its float32 one; head by head the copies stay small.
    group = query.shape[1] // keys.shape[1]
    out = query.new_empty((*query.shape[:3], values.shape[-1]))
    for head in range(keys.shape[1]):
        mine, its = slice(head * group, (head + 1) * group), slice(head, head + 1)
        out[:, mine] = F.scaled_dot_product_attention(
            query[:, mine].float(),
            keys[:, its].float(),
            values[:, its].float(),
            attn_mask=mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=group > 1,
        )
    return out


def _widened(states: Tensor, size: int) -> Tensor:
    """States (..., d) with channels of 0 behind theirs, (..., size)."""
    return states if states.shape[-1] == size else F.pad(states, (0, size - states.shape[-1]))
