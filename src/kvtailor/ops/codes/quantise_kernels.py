"""Codes, steps, minima and bytes of states in one pass: the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["channel_kernel", "token_kernel"]

# The value of `FLAT` in ops.codes.quant.
_FLAT = tl.constexpr(2.0**-14)


@triton.jit
def _codes(x, low, step, ok, MOST: tl.constexpr):
    """Codes (x - low) / step, rounded half to even and cut to 0..MOST, 0 where there is no channel."""
    number = tl.div_rn(x - low, step)
    # The sum has no bits left below 1, and is rounded as a float is.
    number = (number + 12582912.0) - 12582912.0
    number = tl.minimum(tl.maximum(number, 0.0), MOST * 1.0)
    return tl.where(ok, number.to(tl.int32), 0)


@triton.jit
def token_kernel(
    X,
    CODES,
    STEP,
    LOW,
    count,
    slots,
    lane_stride,
    slot_stride,
    limit,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_PAD: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """TOKENS tokens of X (m, slots, SIZE): the channels of a part are PIECES pieces that each lie in one group.

    Args:
        CODES (count, WIDTH), STEP and LOW (count, GROUPS) contiguous, count = m * slots; no LOW with SYMMETRIC.
        limit: the largest step of symmetric codes.
    """
    PARTS: tl.constexpr = 8 // BITS
    # Parts over which one group runs.
    SPAN: tl.constexpr = PER // WIDTH if PER > WIDTH else 1
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    piece = tl.arange(0, PIECES_PAD)
    inside = tl.arange(0, PIECE_PAD)
    place = piece[:, None] * PIECE + inside[None, :]
    fits = (piece < PIECES)[:, None] & (inside < PIECE)[None, :]
    start = (token // slots) * lane_stride + (token % slots) * slot_stride
    parts, lows, highs = (), (), ()
    for part in tl.static_range(PARTS):
        ok = (token < count)[:, None, None] & (fits & (part * WIDTH + place < SIZE))[None]
        x = tl.load(X + start[:, None, None] + (part * WIDTH + place)[None], mask=ok, other=0.0).to(tl.float32)
        parts = parts + (x,)
        if SYMMETRIC:
            highs = highs + (tl.max(tl.where(ok, tl.abs(x), 0.0), 2),)
        else:
            lows = lows + (tl.min(tl.where(ok, x, float("inf")), 2),)
            highs = highs + (tl.max(tl.where(ok, x, float("-inf")), 2),)
    packed = tl.zeros([TOKENS, PIECES_PAD, PIECE_PAD], tl.int32)
    for part in tl.static_range(PARTS):
        high = highs[part // SPAN * SPAN]
        for other in tl.static_range(1, SPAN):
            high = tl.maximum(high, highs[part // SPAN * SPAN + other])
        if SYMMETRIC:
            HALF: tl.constexpr = (1 << (BITS - 1)) - 1
            step = tl.minimum(tl.div_rn(high, tl.zeros_like(high) + HALF * 1.0), limit)
        else:
            low = lows[part // SPAN * SPAN]
            for other in tl.static_range(1, SPAN):
                low = tl.minimum(low, lows[part // SPAN * SPAN + other])
            step = tl.div_rn(high - low, tl.zeros_like(high) + ((1 << BITS) - 1) * 1.0)
        step = step.to(X.dtype.element_ty)
        step = tl.where(step > 0, step, _FLAT).to(X.dtype.element_ty)
        if part % SPAN == 0:
            group = part * WIDTH // PER + piece
            at = token[:, None] * GROUPS + group[None, :]
            ok = (token < count)[:, None] & ((piece < PIECES) & (group < GROUPS))[None, :]
            tl.store(STEP + at, step, mask=ok)
            if not SYMMETRIC:
                tl.store(LOW + at, low.to(X.dtype.element_ty), mask=ok)
        ok = (token < count)[:, None, None] & (fits & (part * WIDTH + place < SIZE))[None]
        step = step.to(tl.float32)[:, :, None]
        if SYMMETRIC:
            number = tl.div_rn(parts[part], step + tl.zeros_like(parts[part]))
            number = (number + 12582912.0) - 12582912.0
            number = tl.minimum(tl.maximum(number, -HALF * 1.0), HALF * 1.0) + HALF * 1.0
            codes = tl.where(ok, number.to(tl.int32), 0)
        else:
            codes = _codes(parts[part], low[:, :, None], step + tl.zeros_like(parts[part]), ok, (1 << BITS) - 1)
        packed = packed | (codes << (part * BITS))
    at = token[:, None, None] * WIDTH + place[None]
    tl.store(CODES + at, packed.to(tl.uint8), mask=(token < count)[:, None, None] & fits[None])


@triton.jit
def channel_kernel(
    X,
    CODES,
    STEP,
    LOW,
    slots,
    runs,
    lane_stride,
    slot_stride,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One run of GROUP tokens of a lane of X (m, slots, SIZE), CHANNELS bytes of each.

    Args:
        CODES (m, slots, WIDTH), STEP and LOW (m, runs, SIZE) contiguous.
    """
    lane = (tl.program_id(0) // runs).to(tl.int64)
    run = tl.program_id(0) % runs
    inside = tl.arange(0, GROUP_PAD)
    token = run * GROUP + inside
    place = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = (inside < GROUP) & (token < slots)
    packed = tl.zeros([GROUP_PAD, CHANNELS], tl.int32)
    for part in tl.static_range(8 // BITS):
        channel = part * WIDTH + place
        some = (place < WIDTH) & (channel < SIZE)
        ok = real[:, None] & some[None, :]
        x = tl.load(X + lane * lane_stride + token[:, None] * slot_stride + channel[None, :], mask=ok, other=0.0)
        x = x.to(tl.float32)
        low = tl.min(tl.where(real[:, None], x, float("inf")), 0)
        high = tl.max(tl.where(real[:, None], x, float("-inf")), 0)
        step = tl.div_rn(high - low, tl.zeros_like(high) + ((1 << BITS) - 1) * 1.0).to(X.dtype.element_ty)
        step = tl.where(step > 0, step, _FLAT).to(X.dtype.element_ty)
        at = (lane * runs + run) * SIZE + channel
        tl.store(STEP + at, step, mask=some)
        tl.store(LOW + at, low.to(X.dtype.element_ty), mask=some)
        step = step.to(tl.float32)[None, :] + tl.zeros_like(x)
        packed = packed | (_codes(x, low[None, :], step, ok, (1 << BITS) - 1) << (part * BITS))
    at = (lane * slots + token[:, None]) * WIDTH + place[None, :]
    tl.store(CODES + at, packed.to(tl.uint8), mask=real[:, None] & (place < WIDTH)[None, :])
