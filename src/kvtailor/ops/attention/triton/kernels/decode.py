"""Attention of few queries over one split of a lane: the kernel.

A program holds the queries of all heads of one kv head and goes over its share of a lane's slots once. What it leaves
is a sum of weighted values, the sum of weights and their common exponent; `merge` adds the programs up.

Products are taken in float16 (codes) or the states' own dtype, and summed in float32. Codes enter them as whole numbers
(see `unpack`); queries and weights are scaled first so that float16 neither overflows nor loses small ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtailor.ops.attention.triton.kernels.tiles import (
    BLOCKS,
    PLAIN,
    RUN,
    TOKEN,
    VALUE,
    bytes_of,
    capped,
    decoded,
    decoded_blocks,
    of_run,
    of_token,
    power_of_two,
    run_of,
)
from kvtailor.ops.attention.triton.kernels.unpack import PAIRS, WHOLE, looked_up, offset, second_of, unpack

__all__ = ["split_kernel"]

# Weights are at most 2^15 as float16, so that one of 2^-39 of the largest is not yet 0.
_LIFT = tl.constexpr(15.0)
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _queries(
    Q,
    row,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
):
    at = tl.arange(0, PAD)
    parts = ()
    for part in tl.static_range(PARTS):
        channel = part * WIDTH + at
        if FORM == PAIRS and part >= PARTS // 2:
            channel = second_of(at, part, PARTS, WIDTH, SIZE)
        mask = ((at < WIDTH) & (channel < SIZE))[:, None] & (row < ROWS)[None, :]
        parts = parts + (tl.load(Q + row[None, :] * SIZE + channel[:, None], mask=mask, other=0.0),)
    return parts


@triton.jit(do_not_specialize=["slots", "capacity", "weight_lane", "seen_lane", "seen_new", "pages_lane"])
def split_kernel(
    Q,
    OWNER,
    LENGTHS,
    SEEN,
    WEIGHT,
    PAGES,
    K,
    K_STEP,
    K_LOW,
    K_ROW,
    K_TABLE,
    K_SCALES,
    V,
    V_STEP,
    V_LOW,
    V_ROW,
    V_TABLE,
    V_SCALES,
    SUM,
    TOP,
    TOTAL,
    slots,
    capacity,
    factor,
    cap,
    k_lane,
    k_table,
    k_row,
    k_scales,
    v_lane,
    v_table,
    v_row,
    v_scales,
    seen_lane,
    seen_new,
    seen_slot,
    weight_lane,
    pages_lane,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SEEN_NEW: tl.constexpr,
    CAUSAL: tl.constexpr,
    ASM: tl.constexpr,
    K_FOLD: tl.constexpr,
    K_SIZE: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_PAD: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_PER: tl.constexpr,
    K_ZERO: tl.constexpr,
    K_FLOAT: tl.constexpr,
    K_FORM: tl.constexpr,
    K_EXPONENTS: tl.constexpr,
    K_SCALES_SLOT: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_RUN: tl.constexpr,
    K_ALIGN: tl.constexpr,
    K_TABLE_ALIGN: tl.constexpr,
    V_FOLD: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_BITS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_PAD: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_PER: tl.constexpr,
    V_ZERO: tl.constexpr,
    V_FLOAT: tl.constexpr,
    V_FORM: tl.constexpr,
    V_EXPONENTS: tl.constexpr,
    V_SCALES_SLOT: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_RUN: tl.constexpr,
    V_ALIGN: tl.constexpr,
    V_TABLE_ALIGN: tl.constexpr,
):
    """One (lane, split).

    Args:
        Q: (n, ROWS, K_SIZE) contiguous; row = query head of the group * NEW + new token.
        OWNER, LENGTHS: (m,), or None.
        K_TABLE: float16 that codes are looked up in, or None. K_SCALES: of BLOCKS, or None; K_STEP is above them then.
        SEEN: uint8 (m, NEW or 1, s) by strides, or None. WEIGHT: (m, s) float32 added to the logits, or None.
        PAGES: (m, p) int32 pages of PAGE slots that are read, -1 where there is none; or None.
        SUM: (m, splits, ROWS, V_SIZE). TOP, TOTAL: (m, splits, ROWS). All float32.
        slots: that a lane reads: capacity, or those of its pages. capacity: slots of a lane. factor: scaling * log2(e).
        cap: of the logits, times log2(e); or None.
        CAUSAL: the last NEW tokens of a lane are the queries' own.
    """
    lane = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    owner = lane
    if OWNER is not None:
        owner = tl.load(OWNER + lane).to(tl.int64)
    length = capacity
    if LENGTHS is not None:
        length = tl.load(LENGTHS + lane)
    end = slots
    if PAGES is None:
        end = tl.minimum(length, slots)
    share = tl.cdiv(end, tl.num_programs(1) * BLOCK) * BLOCK
    first = split * share
    last = tl.minimum(first + share, end)

    # Stated here, since the compiler finds no divisor of a stride below 16.
    k_start = tl.multiple_of(lane * k_lane, K_ALIGN)
    v_start = tl.multiple_of(lane * v_lane, V_ALIGN)
    k_tables = tl.multiple_of(lane * k_table, K_TABLE_ALIGN)
    v_tables = tl.multiple_of(lane * v_table, V_TABLE_ALIGN)

    # Numbers that come out as they are, with nothing added to them.
    K_BARE: tl.constexpr = K_FLOAT or K_FORM != WHOLE
    V_BARE: tl.constexpr = V_FLOAT or V_FORM != WHOLE
    K_PARTS: tl.constexpr = 1 if K_FOLD == PLAIN else 8 // K_BITS
    V_PARTS: tl.constexpr = 1 if V_FOLD == PLAIN else 8 // V_BITS
    row = tl.arange(0, M)
    given = _queries(Q + owner * ROWS * K_SIZE, row, K_SIZE, ROWS, K_WIDTH, K_PAD, K_PARTS, K_FORM)
    queries = ()
    # What each logit loses for what `unpack` adds, and what the minimum of a token is multiplied with.
    excess = tl.zeros([M], tl.float32)
    whole = tl.zeros([M], tl.float32)
    for part in tl.static_range(K_PARTS):
        if K_FOLD == PLAIN:
            queries = queries + (given[part].to(K.dtype.element_ty),)
        elif K_FOLD == RUN:
            queries = queries + (given[part].to(tl.float32) * factor,)
        else:
            # Not scaled before it is rounded, since a 16-bit query is exact as it is.
            scaled = given[part].to(tl.float16)
            each = tl.sum(scaled.to(tl.float32), 0)
            excess += (offset(part, K_BITS, K_BARE) + K_ZERO) * each
            whole += each
            queries = queries + (scaled,)

    top = tl.full([M], _LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    weights = tl.zeros([M], tl.float32)
    lows = tl.zeros([M], tl.float32)
    sums = ()
    for _part in tl.static_range(V_PARTS):
        sums = sums + (tl.zeros([V_PAD, M], tl.float32),)

    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ok = index < last
        token = index
        tile = start
        if PAGES is not None:
            if PAGE % BLOCK == 0:
                page = tl.load(PAGES + lane * pages_lane + start // PAGE)
                token = page * PAGE + start % PAGE + tl.arange(0, BLOCK)
                tile = tl.maximum(page, 0) * PAGE + start % PAGE
            else:
                pages = tl.load(PAGES + lane * pages_lane + index // PAGE, mask=ok, other=-1)
                token = pages * PAGE + index % PAGE
            ok = ok & (token < length) & (token >= 0)

        packed = bytes_of(K, k_start, token, ok, K_SLOT, K_WIDTH, K_PAD)
        if K_FOLD == PLAIN:
            logits = tl.dot(packed, queries[0], input_precision="tf32x3") * factor
        elif K_FOLD == VALUE:
            run = run_of(K_ROW, k_row, lane, token, ok, K_GROUP)
            states = decoded(
                packed,
                K_STEP,
                K_LOW,
                k_table,
                K_RUN,
                lane,
                run,
                ok,
                BLOCK,
                K_SIZE,
                K_BITS,
                K_WIDTH,
                K_PAD,
                K_PER,
                K_ZERO,
                ASM,
            )
            logits = tl.zeros([BLOCK, M], tl.float32)
            for part in tl.static_range(K_PARTS):
                logits = tl.dot(states[part], queries[part], logits)
            logits = logits * factor
        elif K_FOLD == BLOCKS:
            run = run_of(K_ROW, k_row, lane, token, ok, K_GROUP)
            states = decoded_blocks(
                packed,
                K_SCALES,
                K_STEP,
                k_scales,
                k_table,
                K_RUN,
                lane,
                token,
                run,
                ok,
                K_SCALES_SLOT,
                K_SIZE,
                K_WIDTH,
                K_PAD,
                K_PER,
                K_FORM,
                K_EXPONENTS,
            )
            logits = tl.zeros([BLOCK, M], tl.float32)
            for part in tl.static_range(K_PARTS):
                logits = tl.dot(states[part], queries[part], logits)
            logits = logits * factor
        else:
            if K_TABLE is not None:
                codes = looked_up(packed, K_TABLE, K_BITS, K_FORM)
            else:
                codes = unpack(packed, K_BITS, K_FLOAT, ASM, True)
            if K_FOLD == TOKEN:
                run = run_of(K_ROW, k_row, lane, token, ok, K_GROUP)
                logits = tl.zeros([BLOCK, M], tl.float32) - excess[None, :]
                for part in tl.static_range(K_PARTS):
                    logits = tl.dot(codes[part], queries[part], logits)
                # 8-bit floats come out as 1 / 256 of themselves.
                unit = factor * 256.0 if K_FLOAT else factor
                logits = logits * (of_token(K_STEP, k_table, K_RUN, lane, run, ok, 0.0) * unit)[:, None]
                if K_LOW is not None:
                    low = of_token(K_LOW, k_table, K_RUN, lane, run, ok, 0.0) * factor
                    logits = logits + whole[None, :] * low[:, None]
            else:
                folded = ()
                bias = tl.zeros([M], tl.float32)
                for part in tl.static_range(K_PARTS):
                    step = of_run(K_STEP, k_tables, tile // K_GROUP, part, K_RUN, K_SIZE, K_WIDTH, K_PAD)
                    low = of_run(K_LOW, k_tables, tile // K_GROUP, part, K_RUN, K_SIZE, K_WIDTH, K_PAD)
                    scaled = (queries[part] * step[:, None]).to(tl.float16)
                    excess_of = offset(part, K_BITS, K_BARE)
                    bias += tl.sum(queries[part] * low[:, None] - scaled.to(tl.float32) * excess_of, 0)
                    folded = folded + (scaled,)
                logits = tl.zeros([BLOCK, M], tl.float32) + bias[None, :]
                for part in tl.static_range(K_PARTS):
                    logits = tl.dot(codes[part], folded[part], logits)
        if cap is not None:
            logits = capped(logits, cap, ASM)
        if WEIGHT is not None:
            more = tl.load(WEIGHT + lane * weight_lane + token, mask=ok, other=0.0)
            logits = logits + (more * 1.4426950408889634)[:, None]
        if SEEN is not None:
            if SEEN_NEW:
                at = lane * seen_lane + (row % NEW)[None, :] * seen_new + token[:, None] * seen_slot
                logits = tl.where(tl.load(SEEN + at, mask=ok[:, None], other=0) != 0, logits, float("-inf"))
            else:
                ok = ok & (tl.load(SEEN + lane * seen_lane + token * seen_slot, mask=ok, other=0) != 0)
        if CAUSAL:
            sees = ok[:, None] & (token[:, None] <= (length - NEW + row % NEW)[None, :])
            logits = tl.where(sees, logits, float("-inf"))
        else:
            logits = tl.where(ok[:, None], logits, float("-inf"))

        packed = bytes_of(V, v_start, token, ok, V_SLOT, V_WIDTH, V_PAD)
        run = run_of(V_ROW, v_row, lane, token, ok, V_GROUP)
        if V_FOLD == TOKEN:
            # Steps go into the exponents, so that what is rounded to float16 is what the sum is made of.
            step = of_token(V_STEP, v_table, V_RUN, lane, run, ok, 1.0)
            if V_TABLE is not None:
                # A value of zeros has the step 0, and no level is 0: its weight counts, and adds nothing.
                real = step > 0
                step = tl.where(real, step, 1.0)
            logits = logits + tl.log2(step)[:, None]
        highest = tl.maximum(top, tl.max(logits, 0))
        fade = power_of_two(top - highest, ASM)
        top = highest
        if V_FOLD == PLAIN and V.dtype.element_ty != tl.float16:
            share_of = power_of_two(logits - highest[None, :], ASM)
            rounded = share_of.to(V.dtype.element_ty)
        else:
            rounded = power_of_two(logits - (highest - _LIFT)[None, :], ASM).to(tl.float16)
            share_of = rounded.to(tl.float32)
        if V_FOLD == TOKEN:
            total = total * fade + tl.sum(share_of * (1.0 / step)[:, None], 0)
            if V_TABLE is not None:
                rounded = tl.where(real[:, None], rounded, 0.0).to(tl.float16)
        else:
            total = total * fade + tl.sum(share_of, 0)

        added = ()
        if V_FOLD == PLAIN:
            added = (tl.dot(tl.trans(packed), rounded, sums[0] * fade[None, :], input_precision="tf32x3"),)
        elif V_FOLD == VALUE:
            states = decoded(
                packed,
                V_STEP,
                V_LOW,
                v_table,
                V_RUN,
                lane,
                run,
                ok,
                BLOCK,
                V_SIZE,
                V_BITS,
                V_WIDTH,
                V_PAD,
                V_PER,
                V_ZERO,
                ASM,
            )
            for part in tl.static_range(V_PARTS):
                added = added + (tl.dot(tl.trans(states[part]), rounded, sums[part] * fade[None, :]),)
        elif V_FOLD == BLOCKS:
            states = decoded_blocks(
                packed,
                V_SCALES,
                V_STEP,
                v_scales,
                v_table,
                V_RUN,
                lane,
                token,
                run,
                ok,
                V_SCALES_SLOT,
                V_SIZE,
                V_WIDTH,
                V_PAD,
                V_PER,
                V_FORM,
                V_EXPONENTS,
            )
            for part in tl.static_range(V_PARTS):
                added = added + (tl.dot(tl.trans(states[part]), rounded, sums[part] * fade[None, :]),)
        else:
            if V_TABLE is not None:
                codes = looked_up(packed, V_TABLE, V_BITS, V_FORM)
            else:
                codes = unpack(packed, V_BITS, V_FLOAT, ASM, False)
            now = tl.sum(share_of, 0)
            if V_FOLD == TOKEN:
                weights = weights * fade + now
                if V_LOW is not None:
                    low = of_token(V_LOW, v_table, V_RUN, lane, run, ok, 0.0)
                    lows = lows * fade + tl.sum(share_of * (low / step)[:, None], 0)
                for part in tl.static_range(V_PARTS):
                    added = added + (tl.dot(tl.trans(codes[part]), rounded, sums[part] * fade[None, :]),)
            else:
                for part in tl.static_range(V_PARTS):
                    step = of_run(V_STEP, v_tables, tile // V_GROUP, part, V_RUN, V_SIZE, V_WIDTH, V_PAD)
                    low = of_run(V_LOW, v_tables, tile // V_GROUP, part, V_RUN, V_SIZE, V_WIDTH, V_PAD)
                    low = low - step * offset(part, V_BITS, V_BARE)
                    product = tl.dot(tl.trans(codes[part]), rounded) * step[:, None] + now[None, :] * low[:, None]
                    added = added + (sums[part] * fade[None, :] + product,)
        sums = added

    at = (lane * tl.num_programs(1) + split) * ROWS + row
    some = row < ROWS
    if V_FOLD == PLAIN and V.dtype.element_ty != tl.float16:
        tl.store(TOP + at, top, mask=some)
    else:
        tl.store(TOP + at, top - _LIFT, mask=some)
    tl.store(TOTAL + at, total, mask=some)
    channel = tl.arange(0, V_PAD)
    for part in tl.static_range(V_PARTS):
        out = sums[part]
        if V_FOLD == TOKEN:
            out = out + (lows - (offset(part, V_BITS, V_BARE) + V_ZERO) * weights)[None, :]
            if V_FLOAT:
                out = out * 256.0
        mask = (some & (first + tl.zeros([M], tl.int32) < end))[None, :]
        to = part * V_WIDTH + channel
        if V_FORM == PAIRS and part >= V_PARTS // 2:
            to = second_of(channel, part, V_PARTS, V_WIDTH, V_SIZE)
        mask = mask & ((channel < V_WIDTH) & (to < V_SIZE))[:, None]
        tl.store(SUM + at[None, :] * V_SIZE + to[:, None], out, mask=mask)
