"""Tiles of one side of a segment, as the kernels read them: bytes, the scales that go with them, and the numbers that
they stand for.

How scales enter the sums (`FOLD` below; `sides.fold_of` chooses):

- PLAIN: there are none; the states are as the model made them.
- TOKEN: one scale for all channels of a token. It multiplies a logit, or a weight.
- RUN: one for each channel and run of tokens, and a tile lies in one run. It multiplies the query, or the output.
- BLOCKS: 8-bit ones for blocks of a token's channels, and maybe one above them for a run of tokens. Decoded likewise.
- VALUE: anything else. The tile is decoded in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtailor.ops.attention.triton.kernels.unpack import E2M1, elements, offset, unpack

__all__ = ["BLOCKS", "PLAIN", "RUN", "TOKEN", "VALUE", "capped", "power_of_two"]

PLAIN = tl.constexpr(0)
TOKEN = tl.constexpr(1)
RUN = tl.constexpr(2)
VALUE = tl.constexpr(3)
BLOCKS = tl.constexpr(4)


@triton.jit
def run_of(ROW, row_lane, lane, token, ok, GROUP: tl.constexpr):
    """Row of the tables that each token of a tile uses, within its lane's or, with ROW, among all."""
    if ROW is not None:
        return tl.load(ROW + lane * row_lane + token, mask=ok, other=0)
    else:
        return token // GROUP


@triton.jit
def bytes_of(CODES, start, token, ok, SLOT: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """(tokens, PAD) bytes, or plain states, of the lane that begins at `start`; zeros where there are no tokens."""
    at = tl.arange(0, PAD)
    mask = ok[:, None]
    if PAD != WIDTH:
        mask = mask & (at < WIDTH)[None, :]
    return tl.load(CODES + start + token[:, None] * SLOT + at[None, :], mask=mask, other=0)


@triton.jit
def of_run(
    TABLE, start, run, part: tl.constexpr, RUN_STRIDE: tl.constexpr, SIZE, WIDTH: tl.constexpr, PAD: tl.constexpr
):
    """(PAD,) float32 of a table for one part's channels in one run; zeros past the last channel."""
    at = tl.arange(0, PAD)
    channel = part * WIDTH + at
    mask = (at < WIDTH) & (channel < SIZE)
    return tl.load(TABLE + start + run * RUN_STRIDE + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def of_token(TABLE, lane_stride, run_stride, lane, run, ok, other):
    """(tokens,) float32 of a table with one number for each row."""
    return tl.load(TABLE + lane * lane_stride + run * run_stride, mask=ok, other=other).to(tl.float32)


@triton.jit
def decoded(
    packed,
    STEP,
    LOW,
    lane_stride,
    run_stride,
    lane,
    run,
    ok,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
):
    """The parts of a tile as float16 states, whatever its scales are shared by; zeros past the last channel."""
    at = tl.arange(0, PAD)
    codes = unpack(packed, BITS, False, ASM, False)
    parts = ()
    # Channels of a part that share scales, where they fill it: then scales are loaded once for all of them.
    SHARED: tl.constexpr = PER if PER < WIDTH else WIDTH
    FULL: tl.constexpr = PAD == WIDTH and WIDTH % SHARED == 0 and PER % SHARED == 0 and SIZE == 8 // BITS * WIDTH
    for part in tl.static_range(8 // BITS):
        number = codes[part] - (offset(part, BITS, False) + ZERO)
        if FULL and PER > 1:
            column = part * WIDTH // PER + tl.arange(0, PAD // SHARED)
            where = lane * lane_stride + run[:, None] * run_stride + column[None, :]
            number = tl.reshape(number.to(tl.float16), (BLOCK, PAD // SHARED, SHARED))
            states = number * tl.load(STEP + where, mask=ok[:, None], other=0.0).to(tl.float16)[:, :, None]
            if LOW is not None:
                states += tl.load(LOW + where, mask=ok[:, None], other=0.0).to(tl.float16)[:, :, None]
            states = tl.reshape(states, (BLOCK, PAD))
        else:
            channel = part * WIDTH + at
            mask = ok[:, None] & ((at < WIDTH) & (channel < SIZE))[None, :]
            where = lane * lane_stride + run[:, None] * run_stride + (channel // PER)[None, :]
            states = number.to(tl.float32) * tl.load(STEP + where, mask=mask, other=0.0).to(tl.float32)
            if LOW is not None:
                states = states + tl.load(LOW + where, mask=mask, other=0.0).to(tl.float32)
        parts = parts + (states.to(tl.float16),)
    return parts


@triton.jit
def decoded_blocks(
    packed,
    SCALES,
    OUTER,
    scales_lane,
    lane_stride,
    run_stride,
    lane,
    token,
    run,
    ok,
    SCALES_SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PER: tl.constexpr,
    FORM: tl.constexpr,
    EXPONENTS: tl.constexpr,
):
    """The parts of a tile of small floats as float16 states; zeros past the last channel.

    Args:
        SCALES: uint8, one for PER channels of a token: exponents (E8M0), or floats (E4M3) without a sign.
        OUTER: float32 of a run, by which its scales are multiplied; or None.
    """
    at = tl.arange(0, PAD)
    numbers = elements(packed, FORM)
    parts = ()
    for part in tl.static_range(2 if FORM == E2M1 else 1):
        channel = part * WIDTH + at
        mask = ok[:, None] & ((at < WIDTH) & (channel < SIZE))[None, :]
        where = lane * scales_lane + token[:, None] * SCALES_SLOT + (channel // PER)[None, :]
        byte = tl.load(SCALES + where, mask=mask, other=0)
        if EXPONENTS:
            # The least power of two, 2^-127, becomes 0: no logit and no sum can tell it from that.
            scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        else:
            scale = (byte.to(tl.uint16) << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        states = numbers[part] * scale
        if OUTER is not None:
            states = states * of_token(OUTER, lane_stride, run_stride, lane, run, ok, 0.0)[:, None]
        parts = parts + (states.to(tl.float16),)
    return parts


@triton.jit
def capped(logits, cap, ASM: tl.constexpr):
    """cap * tanh(logits / cap), of logits and a cap in the same unit; absolute error below 2e-7 of the cap."""
    # tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), which never overflows.
    e = power_of_two(tl.abs(logits) * (-2.8853900817779268 / cap), ASM)
    size = cap * (1.0 - e) / (1.0 + e)
    return tl.where(logits < 0, -size, size)


@triton.jit
def power_of_two(x, ASM: tl.constexpr):
    """2^x, 0 where that is below 2^-126."""
    if ASM:
        # What the compiler writes for exp2 keeps such small numbers, at four instructions for one.
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)
