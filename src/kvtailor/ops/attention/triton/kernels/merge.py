"""The programs of `decode` added up: over the splits of a lane, the lanes of an owner, and all parts."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_kernel"]


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    SUM,
    TOP,
    TOTAL,
    FIRST,
    OUT,
    LSE,
    splits,
    parts,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One (owner, row).

    Args:
        SUM (e, ROWS, SIZE), TOP, TOTAL (e, ROWS): what e programs left, see `decode`, part by part, lane by lane and
            split by split. A program that saw nothing has a total of 0 and may have left its sum unwritten.
        FIRST: (parts, n + 1) first program of each owner, and the end of the part's; None where there is one part,
            whose lane i is owner i's and has `splits` programs.
        OUT: (n, ROWS, SIZE). LSE: (n, ROWS), natural logarithm.
    """
    owner = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    channel = tl.arange(0, PAD)
    top = -1e30
    total = 0.0
    out = tl.zeros([PAD], tl.float32)
    for part in range(parts):
        first = owner * splits
        last = first + splits
        if FIRST is not None:
            place = FIRST + part * (tl.num_programs(0) + 1) + owner
            first = tl.load(place).to(tl.int64)
            last = tl.load(place + 1).to(tl.int64)
        for start in range(first, last, BLOCK):
            at = (start + tl.arange(0, BLOCK)) * ROWS + row
            ok = start + tl.arange(0, BLOCK) < last
            tops = tl.load(TOP + at, mask=ok, other=-1e30)
            totals = tl.load(TOTAL + at, mask=ok, other=0.0)
            some = totals > 0
            highest = tl.maximum(top, tl.max(tl.where(some, tops, -1e30), 0))
            shares = tl.where(some, tl.exp2(tops - highest), 0.0)
            sums = tl.load(
                SUM + at[:, None] * SIZE + channel[None, :], mask=some[:, None] & (channel < SIZE)[None, :], other=0.0
            )
            fade = tl.exp2(top - highest)
            total = total * fade + tl.sum(shares * totals, 0)
            out = out * fade + tl.sum(sums * shares[:, None], 0)
            top = highest
    at = owner * ROWS + row
    tl.store(
        LSE + at,
        tl.where(total > 0, (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf")),
    )
    tl.store(OUT + at * SIZE + channel, out / tl.where(total > 0, total, 1.0), mask=channel < SIZE)
