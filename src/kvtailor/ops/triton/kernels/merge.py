"""The programs of `decode` added up: over the splits of a lane, and over the lanes of an owner."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_kernel"]


@triton.jit
def merge_kernel(
    SUM, TOP, TOTAL, FIRST, OUT, LSE, splits,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One (owner, row).

    Args:
        SUM (m, splits, ROWS, SIZE), TOP, TOTAL (m, splits, ROWS): see `decode`. A program that saw nothing has a total
            of 0 and may have left its sum unwritten.
        FIRST: (n + 1,) first lane of each owner, and m; None where lane i is owner i's.
        OUT: (n, ROWS, SIZE). LSE: (n, ROWS), natural logarithm.
    """
    owner = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    first = owner * splits
    last = first + splits
    if FIRST is not None:
        first = tl.load(FIRST + owner).to(tl.int64) * splits
        last = tl.load(FIRST + owner + 1).to(tl.int64) * splits
    channel = tl.arange(0, PAD)
    top = -1e30
    total = 0.0
    out = tl.zeros([PAD], tl.float32)
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
