"""How much attention each slot received, once the log-sum-exp of the queries is known, on a GPU.

Slots are outermost: a program holds some keys of one kv head, goes over the queries that may see them, and adds
exp(logit - lse) up in registers. So nothing of n x n is ever held, and no two programs write to the same place. No
weights are written down: keys are read once more, and their logits made again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvtailor.ops.attention.folded import merge
from kvtailor.ops.attention.triton.attend import attend_coded
from kvtailor.ops.attention.triton.kernels.mass import mass_kernel
from kvtailor.ops.segments.attention_inputs import AttentionInputs
from kvtailor.ops.segments.coded import Whole
from kvtailor.ops.triton_launch import LOG2E, Launch, interpreting, unfit

__all__ = ["attend_with_mass", "column_mass", "mass_call", "unsuited", "ReadPart", "attend_and_keep"]


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
) -> tuple[Launch, Tensor]:
    """The launch of `column_mass`, and what it writes."""
    rows, heads, slots, size = keys.shape
    new = query.shape[2]
    out = torch.empty((rows, heads, slots), dtype=torch.float32, device=query.device)
    if query.dtype != keys.dtype or query.stride(-1) != 1 or keys.stride(-1) != 1:
        found = f"{query.dtype} of strides {query.stride()} and {keys.dtype} of strides {keys.stride()}"
        raise ValueError(f"queries and keys need one dtype and channels side by side in memory, found {found}")
    block = 128 if slots >= 128 and size <= 128 and query.dtype != torch.float32 else 32
    call = Launch(
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


@dataclass(frozen=True, kw_only=True)
class ReadPart:
    """What was read of one part.

    Attributes:
        inputs: as they were given.
        query: (n, g, t, d) of the keys' dtype. keys: (m, s, d).
    """

    inputs: AttentionInputs
    query: Tensor
    keys: Tensor

    def mass(self, lse: Tensor, counts: Tensor) -> Tensor:
        """(m, s) float32: the attention that each slot received, 0 past what is filled.

        Args:
            lse: (n, g, t) float32 over all parts that were read, and the sinks.
            counts: (n, t) float32: how much each query counts.
        """
        lanes, slots, _ = self.keys.shape
        new = self.query.shape[2]
        filled = None
        if self.inputs.lengths is not None:
            filled = torch.arange(slots, device=lse.device) < self.inputs.lengths[:, None]
        alike = self.inputs.visible is None or self.inputs.visible.ndim < 2 or self.inputs.visible.shape[-2] == 1
        total = None
        # Where queries see different slots, each has a launch of its own.
        for now in [slice(0, new)] if alike else [slice(i, i + 1) for i in range(new)]:
            mass = self._of(lse[:, :, now], counts[:, now], now)
            if self.inputs.visible is not None:
                seen = self.inputs.visible.expand(lanes, new, slots)[:, now][:, 0]
                mass = mass.masked_fill(~seen, 0.0)
            if filled is not None:
                mass = mass.masked_fill(~filled, 0.0)
            total = mass if total is None else total + mass
        assert total is not None
        return total if self.inputs.log_weight is None else total * self.inputs.log_weight.exp()

    def _of(self, lse: Tensor, counts: Tensor, now: slice) -> Tensor:
        """(m, s) sums over some queries, as if each saw every slot."""
        query = self.query[:, :, now]
        weight = counts[:, None].expand_as(lse)
        query, lse, weight = (
            (each if self.inputs.owner is None else each.index_select(0, self.inputs.owner)).flatten(1, 2)
            for each in (query, lse, weight)
        )
        # The heads of a group are so many new tokens of one head, and share a tile.
        rows, keys = query[:, None].contiguous(), self.keys[:, None]
        return column_mass(
            rows, keys, lse[:, None], self.inputs.scaling, softcap=self.inputs.softcap, weight=weight, causal=False
        )[:, 0]


def attend_and_keep(inputs: AttentionInputs) -> tuple[Tensor, Tensor, ReadPart]:
    """As `attend_coded` over plain keys, and what mass can be made of."""
    assert isinstance(inputs.keys, Whole), "mass is made of plain keys"
    keys = inputs.keys.states
    return *attend_coded(inputs), ReadPart(inputs=inputs, query=inputs.query.to(keys.dtype), keys=keys)
