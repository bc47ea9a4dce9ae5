"""Codes in bytes as float16 numbers, without a conversion: the bits of a code are the low mantissa bits of a float.

A float16 from 2^(10 - i) on counts in steps of 2^-i, so the bits of code * 2^i below it make that number plus the code.
A code that sits i bits up in its byte needs a mask and a constant high byte then, and no shift; what is added is taken
off where sums are at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "LEVELS",
    "PAIRS",
    "WHOLE",
    "second_of",
    "elements",
    "looked_up",
    "offset",
    "unpack",
]

# What codes stand for: whole numbers; a level each; a point each, for two channels; floats of 4 and of 8 bits.
WHOLE = tl.constexpr(0)
LEVELS = tl.constexpr(1)
PAIRS = tl.constexpr(2)
E2M1 = tl.constexpr(3)
E4M3 = tl.constexpr(4)
E5M2 = tl.constexpr(5)


@triton.jit
def offset(part: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """What `unpack` adds to the codes of a part; 0 for numbers that come out as they are, such as 8-bit floats."""
    if FLOAT:
        return 0.0
    else:
        return (1 << (10 - part * BITS)) * 1.0


@triton.jit
def unpack(packed, BITS: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr, MOVABLE: tl.constexpr):
    """The 8 / BITS parts of packed bytes (see `ops.codes.quant.pack`), each a float16 tensor of the bytes' shape.

    Args:
        packed: uint8 tile.
        BITS: of a code, 2, 4 or 8.
        FLOAT: the bytes are 8-bit floats (e4m3), which come out as 1 / 256 of what they stand for.
        ASM: write PTX; not for the interpreter.
        MOVABLE: let the compiler bring bytes into the order of the matrix unit before they are unpacked. That is best
            for keys. Values would have to be transposed byte by byte (three times the instructions); as float16 they
            are transposed by the load from shared memory.
    """
    if ASM:
        if FLOAT:
            return _floats_ptx(packed, MOVABLE)
        elif BITS == 8:
            return _eights_ptx(packed, MOVABLE)
        elif BITS == 4:
            return _fours_ptx(packed, MOVABLE)
        else:
            return _twos_ptx(packed, MOVABLE)
    elif FLOAT:
        wide = packed.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True),)
    else:
        wide = packed.to(tl.uint16)
        parts = ()
        for part in tl.static_range(8 // BITS):
            bits = (wide & (((1 << BITS) - 1) << (part * BITS))) | ((25 - part * BITS) << 10)
            parts = parts + (bits.to(tl.uint16).to(tl.float16, bitcast=True),)
        return parts


@triton.jit
def looked_up(packed, TABLE, BITS: tl.constexpr, FORM: tl.constexpr):
    """The 8 / BITS parts of packed bytes, each a float16 tensor of the bytes' shape, out of a table.

    Args:
        packed: uint8 tile.
        TABLE: float16 levels, or with PAIRS points, two numbers each.
        BITS: for each channel. With PAIRS a code has twice as many, and stands for the channels i and SIZE - 1 - i: the
            first half of the parts has first numbers, the other one second numbers (`second_of`).
        FORM: LEVELS or PAIRS.
    """
    wide = packed.to(tl.int32)
    parts = ()
    if FORM == LEVELS:
        for part in tl.static_range(8 // BITS):
            parts = parts + (tl.load(TABLE + ((wide >> (part * BITS)) & ((1 << BITS) - 1))),)
    else:
        CODES: tl.constexpr = 4 // BITS
        for part in tl.static_range(8 // BITS):
            code = (wide >> (part % CODES * 2 * BITS)) & ((1 << (2 * BITS)) - 1)
            parts = parts + (tl.load(TABLE + 2 * code + part // CODES),)
    return parts


@triton.jit
def second_of(at, part: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The channels of the second numbers that the bytes `at` have in a part of PAIRS; SIZE where there is none."""
    # Of an odd number of channels the middle one is no other's second.
    pair = (part - PARTS // 2) * WIDTH + at
    return tl.where((at < WIDTH) & (SIZE - 1 - pair > pair), SIZE - 1 - pair, SIZE)


@triton.jit
def elements(packed, FORM: tl.constexpr):
    """The parts of packed bytes as float32 numbers: two of E2M1, or one of E4M3 or E5M2."""
    wide = packed.to(tl.uint16)
    if FORM == E2M1:
        parts = ()
        for part in tl.static_range(2):
            # The two bits of exponent are the lowest of a float16's, whose bias is 15 and not 1.
            bits = ((wide << (12 - part * 4)) & 0x8000) | (((wide >> (part * 4)) & 7) << 9)
            parts = parts + (bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0,)
        return parts
    elif FORM == E4M3:
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0,)
    else:
        return ((wide << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),)


@triton.jit
def _floats_ptx(packed, MOVABLE: tl.constexpr):
    halves = tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y;
        prmt.b32 x, $2, 0, 0x1404;
        shr.b32 y, x, 1;
        and.b32 y, y, 0x3F803F80;
        lop3.b32 $0, x, 0x80008000, y, 0xEA;
        prmt.b32 x, $2, 0, 0x3424;
        shr.b32 y, x, 1;
        and.b32 y, y, 0x3F803F80;
        lop3.b32 $1, x, 0x80008000, y, 0xEA;
        }""",
        "=r,=r,r",
        [packed],
        dtype=tl.float16,
        is_pure=MOVABLE,
        pack=4,
    )
    return (halves,)


@triton.jit
def _eights_ptx(packed, MOVABLE: tl.constexpr):
    halves = tl.inline_asm_elementwise(
        """{
        .reg .b32 c;
        mov.b32 c, 0x64646464;
        prmt.b32 $0, $2, c, 0x4140;
        prmt.b32 $1, $2, c, 0x4342;
        }""",
        "=r,=r,r",
        [packed],
        dtype=tl.float16,
        is_pure=MOVABLE,
        pack=4,
    )
    return (halves,)


@triton.jit
def _fours_ptx(packed, MOVABLE: tl.constexpr):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, c;
        mov.b32 c, 0x54546464;
        and.b32 t, $4, 0x0F0F0F0F;
        prmt.b32 $0, t, c, 0x4140;
        prmt.b32 $1, t, c, 0x4342;
        and.b32 t, $4, 0xF0F0F0F0;
        prmt.b32 $2, t, c, 0x6160;
        prmt.b32 $3, t, c, 0x6362;
        }""",
        "=r,=r,=r,=r,r",
        [packed],
        dtype=(tl.float16, tl.float16),
        is_pure=MOVABLE,
        pack=4,
    )


@triton.jit
def _twos_ptx(packed, MOVABLE: tl.constexpr):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, c;
        mov.b32 c, 0x4C545C64;
        and.b32 t, $8, 0x03030303;
        prmt.b32 $0, t, c, 0x4140;
        prmt.b32 $1, t, c, 0x4342;
        and.b32 t, $8, 0x0C0C0C0C;
        prmt.b32 $2, t, c, 0x5150;
        prmt.b32 $3, t, c, 0x5352;
        and.b32 t, $8, 0x30303030;
        prmt.b32 $4, t, c, 0x6160;
        prmt.b32 $5, t, c, 0x6362;
        and.b32 t, $8, 0xC0C0C0C0;
        prmt.b32 $6, t, c, 0x7170;
        prmt.b32 $7, t, c, 0x7372;
        }""",
        "=r,=r,=r,=r,=r,=r,=r,=r,r",
        [packed],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=MOVABLE,
        pack=4,
    )
