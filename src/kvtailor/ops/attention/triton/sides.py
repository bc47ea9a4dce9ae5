"""One side of a segment as arguments of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kvtailor.ops.attention.triton.kernels.tiles import BLOCKS, PLAIN, RUN, TOKEN, VALUE
from kvtailor.ops.attention.triton.kernels.unpack import E2M1, E4M3, E5M2, LEVELS, PAIRS, WHOLE
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded
from kvtailor.types.late_checks import send

__all__ = ["SideArguments", "block_of", "side_of", "why_not"]

_STATES = (torch.float32, torch.float16, torch.bfloat16)
# Tokens of a tile: with 4 warps 128 need no spilling for heads of 128 channels, 64 none for heads of 256.
_BLOCK = 64
_FORMS = {"e2m1": int(E2M1.value), "e4m3": int(E4M3.value), "e5m2": int(E5M2.value)}
_PACKED = {CodeKind.TOKENS, CodeKind.CHANNELS, CodeKind.LEVELS}
_KINDS = {*_PACKED, CodeKind.WHOLE, CodeKind.POINTS, CodeKind.BLOCKS, CodeKind.FLOATS}


@cache
def _table(levels: Tensor, device: torch.device) -> Tensor:
    """Levels, or points one behind the other, as float16: as they enter the products."""
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        return send(levels.half().reshape(-1), device)


@dataclass(frozen=True, kw_only=True)
class SideArguments:
    """Keys or values of a segment.

    Attributes:
        codes: (m, s, bytes), or (m, s, c) plain states.
        step, low: tables of scales and minima, or None.
        row: (m, s) row of the tables of each token; None where it is slot // group.
        size: c.
        bits: of a code; 8 where states are plain.
        group: tokens that share scales.
        per: channels that share scales.
        zero: the code of zero where there are no minima.
        any_steps: steps may be 0 or negative, so that nothing may be divided by them.
        float8: codes are 8-bit floats.
        form: what codes stand for, see `kernels.unpack`.
        table: (levels,) or (2 * points,) float16 that codes are looked up in; None: they are not.
        scales: (m, s, blocks) uint8 of blocks of `per` channels; `step` is then above them, or None.
        exponents: scales are exponents, and not floats.
    """

    codes: Tensor
    size: int
    bits: int = 8
    step: Tensor | None = None
    low: Tensor | None = None
    row: Tensor | None = None
    group: int = 1
    per: int = 1
    zero: int = 0
    any_steps: bool = False
    float8: bool = False
    form: int = int(WHOLE.value)
    table: Tensor | None = None
    scales: Tensor | None = None
    exponents: bool = False

    @property
    def plain(self) -> bool:
        """Whether states are as the model made them."""
        return self.step is None and self.scales is None

    @property
    def dtype(self) -> torch.dtype:
        """Of plain states, or of the tables of scales; uint8 where these are of the format's own."""
        return (self.codes if self.step is None else self.step).dtype

    @property
    def width(self) -> int:
        """Channels of one part: the bytes of a token, or all channels where states are plain."""
        return int(self.codes.shape[-1])

    def fold(self, block: int, page: int | None) -> int:
        """How scales enter the sums (see `tiles`) where a tile is `block` tokens, of pages of `page` tokens."""
        if self.plain:
            return int(PLAIN.value)
        if self.scales is not None:
            return int(BLOCKS.value)
        if self.per >= self.size and not self.any_steps:
            return int(TOKEN.value)
        together = self.group % block == 0 and (page is None or page % block == 0)
        if self.per == 1 and self.low is not None and self.row is None and together:
            return int(RUN.value)
        return int(VALUE.value)

    def arguments(self, name: str, block: int, page: int | None) -> dict[str, Any]:
        """Arguments of `split_kernel` for this side; `name` is K or V."""
        table, run = 0, 0
        if self.step is not None:
            table, run = (self.step.stride(0), self.step.stride(1)) if self.row is None else (0, self.step.stride(0))
        lane, slot = self.codes.stride(0), self.codes.stride(1)
        return {
            name: self.codes,
            f"{name}_STEP": self.step,
            f"{name}_LOW": self.low,
            f"{name}_ROW": self.row,
            f"{name.lower()}_lane": lane,
            f"{name.lower()}_table": table,
            f"{name.lower()}_row": 0 if self.row is None else self.row.stride(0),
            f"{name}_SLOT": slot,
            f"{name}_RUN": run,
            f"{name}_ALIGN": _shared_power(lane, slot),
            f"{name}_TABLE_ALIGN": _shared_power(table, run),
            f"{name}_FOLD": self.fold(block, page),
            f"{name}_SIZE": self.size,
            f"{name}_BITS": self.bits,
            f"{name}_WIDTH": self.width,
            f"{name}_PAD": max(16, triton.next_power_of_2(self.width)),
            f"{name}_GROUP": self.group,
            f"{name}_PER": self.per,
            f"{name}_ZERO": self.zero,
            f"{name}_FLOAT": self.float8,
            f"{name}_FORM": self.form,
            f"{name}_TABLE": self.table,
            f"{name}_SCALES": self.scales,
            f"{name.lower()}_scales": 0 if self.scales is None else self.scales.stride(0),
            f"{name}_SCALES_SLOT": 0 if self.scales is None else self.scales.stride(1),
            f"{name}_EXPONENTS": self.exponents,
        }


def side_of(layout: CodeLayout) -> SideArguments:
    """What the kernels read of a side that `why_not` found nothing against."""
    kind, codes, size, bits, step = layout.kind, layout.codes, layout.size, layout.bits, layout.step
    if kind is CodeKind.WHOLE:
        return SideArguments(codes=codes, size=size)
    if kind is CodeKind.TOKENS:
        return SideArguments(
            codes=codes,
            size=size,
            bits=bits,
            step=step,
            low=layout.low,
            per=layout.block,
            zero=layout.zero,
            any_steps=layout.steps != "above 0",
        )
    if kind is CodeKind.CHANNELS:
        return SideArguments(
            codes=codes, size=size, bits=bits, step=step, low=layout.low, row=layout.row, group=layout.group
        )
    if kind is CodeKind.FLOATS:
        return SideArguments(
            codes=codes, size=size, step=step, row=layout.row, group=layout.group, per=size, float8=True
        )
    if kind is CodeKind.BLOCKS:
        assert layout.element is not None
        return SideArguments(
            codes=codes,
            size=size,
            bits=bits,
            per=layout.block,
            form=_FORMS[layout.element],
            scales=step,
            exponents=layout.exponents,
            step=layout.outer,
            row=layout.row,
            group=layout.group,
        )
    points = kind is CodeKind.POINTS
    assert layout.levels is not None
    return SideArguments(
        codes=codes,
        size=size,
        bits=bits // 2 if points else bits,
        step=step,
        per=size,
        form=int(PAIRS.value if points else LEVELS.value),
        table=_table(layout.levels, codes.device),
    )


def why_not(coded: Coded) -> str | None:
    """Why the kernels cannot read this side; None where they can."""
    layout = coded.code_layout
    if layout is None or layout.kind not in _KINDS or layout.magnitudes is not None:
        return f"no kernel reads {type(coded).__name__}"
    if layout.kind in _PACKED and layout.bits not in (2, 4, 8):
        return f"codes of 2, 4 or 8 bits are read, found {layout.bits}"
    if layout.kind is CodeKind.POINTS:
        if layout.bits not in (4, 8):
            return f"points of 2 or 4 bits for each channel are read, found {layout.bits // 2}"
        if layout.bits == 4 and -(-layout.size // 2) % 2:
            return f"points of 2 bits are read where two pairs fill each byte, found {-(-layout.size // 2)} pairs"
    side = side_of(layout)
    if side.dtype not in _STATES and side.scales is None:
        return f"states of 32 or 16 bits are read, found {side.dtype}"
    if side.width > 256:
        return f"heads of at most 256 channels are read, found {side.size}"
    if any(x is not None and x.stride(-1) != 1 for x in (side.codes, side.step, side.low, side.row, side.scales)):
        return "the channels of a token must lie side by side in memory"
    if side.step is not None and side.low is not None and side.step.stride() != side.low.stride():
        return "steps and minima must have the same strides"
    return None


def block_of(keys: SideArguments, values: SideArguments, rows: int, page: int | None) -> int:
    """Tokens of a tile: as many as share scales, so that scales can be folded, within what registers hold."""
    wide = max(keys.width * (8 // keys.bits), values.width * (8 // values.bits))
    most = _BLOCK if wide <= 128 and rows <= 16 else 32
    for side in (keys, values):
        if side.plain and side.dtype == torch.float32:
            # Three products for one, on parts of the numbers.
            most = min(most, 32)
        if side.step is not None and side.per == 1 and side.row is None:
            power = side.group & -side.group
            if page is not None:
                power = min(power, page & -page)
            if power >= 16:
                most = min(most, power)
    return most


def warps_of(block: int, keys: SideArguments, values: SideArguments, rows: int) -> int:
    """Warps of a program: one for 32 tokens of codes, so that each keeps the order of the matrix unit in registers.

    From 4 warps and 64 tokens on the compiler takes Hopper's larger products, whose operands lie in another order: that
    is best for plain states, and costs codes half as many instructions again.
    """
    if rows > 16 or (keys.plain and values.plain):
        return 4
    return max(1, block // 32) * (2 if max(keys.size, values.size) > 128 else 1)


def _shared_power(*strides: int) -> int:
    """The largest power of two up to 16 that divides all of them."""
    return math.gcd(16, *strides)
