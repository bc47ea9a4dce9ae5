"""Sums over queries of the attention that each slot received: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtailor.ops.attention.triton.kernels.tiles import capped, power_of_two

__all__ = ["mass_kernel"]


@triton.jit
def mass_kernel(
    Q,
    K,
    LSE,
    COUNTS,
    START,
    OUT,
    new,
    slots,
    factor,
    cap,
    q_row,
    q_head,
    q_new,
    k_row,
    k_head,
    k_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    ASM: tl.constexpr,
):
    """One (block of slots, batch row and kv head).

    Args:
        Q: (b, q, new, SIZE) by strides. K: (b, HEADS, slots, SIZE) by strides.
        LSE: (b, q, new) contiguous, natural logarithm, -inf for a query that sees nothing.
        COUNTS: (b, new) float32, or None. START: (b,) first slot that is seen, or None.
        OUT: (b, HEADS, slots).
        factor: scaling * log2(e). cap: of the logits, times log2(e); or None.
    """
    block = tl.program_id(0)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    channel = tl.arange(0, PAD)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    some = channel < SIZE
    keys = tl.load(
        K + row * k_row + head * k_head + slot[:, None] * k_slot + channel[None, :],
        mask=(slot < slots)[:, None] & some[None, :],
        other=0.0,
    )
    ok = slot < slots
    if START is not None:
        ok = ok & (slot >= tl.load(START + row))
    first = 0
    if CAUSAL:
        # The first query that sees the first slot of this block.
        first = tl.maximum(0, block * BLOCK - (slots - new)) // QUERIES * QUERIES
    mass = tl.zeros([BLOCK], tl.float32)
    for member in range(GROUP):
        query_head = head * GROUP + member
        for start in range(first, new, QUERIES):
            query = start + tl.arange(0, QUERIES)
            real = query < new
            at = row * q_row + query_head * q_head + query[:, None] * q_new
            queries = tl.load(Q + at + channel[None, :], mask=real[:, None] & some[None, :], other=0.0)
            at = (row * HEADS * GROUP + query_head) * new + query
            lse = tl.load(LSE + at, mask=real, other=float("-inf"))
            real = real & (lse > float("-inf"))
            lse = tl.where(real, lse, 0.0)
            logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * factor
            if cap is not None:
                logits = capped(logits, cap, ASM)
            sees = real[:, None] & ok[None, :]
            if CAUSAL:
                sees = sees & (slot[None, :] <= query[:, None] + (slots - new))
            weights = power_of_two(logits - (lse * 1.4426950408889634)[:, None], ASM)
            if COUNTS is not None:
                counts = tl.load(COUNTS + row * new + query, mask=real, other=0.0)
                weights = weights * counts[:, None]
            mass += tl.sum(tl.where(sees, weights, 0.0), 0)
    tl.store(OUT + tl.program_id(1).to(tl.int64) * slots + slot, mass, mask=slot < slots)
