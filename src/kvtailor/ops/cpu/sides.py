"""Keys or values of a part as C++ sees them, from the layout of their codes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.cpu import magnitudes
from kvtailor.ops.cpu.library import DTYPES, Side
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded

__all__ = ["MOST_WHOLE", "padded_levels", "pointer", "side_of", "unsuited"]

# Of keys and of values: as `MOST_OF_KEYS` and `MOST_OF_VALUES` in integers.h.
MOST_WHOLE = (8191, 4096)
# Types of the scales of `BLOCK_LEVELS`, see layouts.h.
_E4M3, _E8M0 = 3, 4
# By how many bits a byte's exponent and mantissa lie below those of a float32.
_SHIFTS = {"e2m1": 0, "e4m3": 20, "e5m2": 21}


def unsuited(keys: Coded, values: Coded) -> str | None:
    """Why these two sides cannot be read here, a clause; None where they can."""
    for side in (keys, values):
        layout = side.code_layout
        if layout is None or layout.kind not in _KINDS:
            return f"no C++ kernel reads {type(side).__name__}"
        if layout.magnitudes is not None and (why := magnitudes.unsuited(layout)) is not None:
            return why
        if layout.dtype not in DTYPES or layout.codes.device.type != "cpu":
            dtype, device = layout.dtype, layout.codes.device
            return f"the C++ kernels read float32, bfloat16 and float16 on the CPU, not {dtype} on {device}"
    return None


def side_of(layout: CodeLayout, held: list[Tensor], made: list[Any]) -> Side:
    """Return a side as C++ sees it, without its magnitudes.

    Args:
        layout: of the side.
        held: what it points to joins it.
        made: what was made for it alone joins it.
    """
    codes = layout.codes if layout.codes.stride(-1) == 1 else layout.codes.contiguous()
    held.append(codes)
    lane, slot, _ = codes.stride()
    element = codes.element_size()
    found = Side(data=codes.data_ptr(), lane_bytes=lane * element, slot_bytes=slot * element, size=layout.size)
    if layout.kind is CodeKind.WHOLE:
        found.kind = DTYPES[layout.dtype]
        return found
    found.kind, add = _KINDS[layout.kind]
    found.bits, found.scales = layout.bits, DTYPES[layout.dtype]
    assert layout.step is not None
    found.step = pointer(layout.step, layout.step.dtype if layout.kind is CodeKind.BLOCKS else layout.dtype, held)
    if layout.row is not None:
        found.row = pointer(layout.row, torch.int32, held)
    add(layout, found, held, made)
    return found


def _tokens(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    found.group = layout.block
    if layout.low is not None:
        found.low = pointer(layout.low, layout.dtype, held)


def _channels(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    assert layout.step is not None and layout.low is not None
    found.low = pointer(layout.low, layout.dtype, held)
    found.group, found.runs = layout.group, layout.step.shape[1]


def _levels(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    assert layout.levels is not None
    found.low = _kept(padded_levels(layout.levels), made).data_ptr()


def _points(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    assert layout.levels is not None
    found.low = _kept(_both_ways(layout.levels), made).data_ptr()


def _signs(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    assert layout.levels is not None and layout.signs is not None
    signs = layout.signs.signs if layout.signs.signs.stride(-1) == 1 else layout.signs.signs.contiguous()
    held.append(signs)
    # `Signs` of layouts.h: three addresses and two numbers.
    levels = _kept(padded_levels(layout.levels), made).data_ptr()
    rest = pointer(layout.signs.norm, layout.dtype, held)
    made.append((ctypes.c_int64 * 5)(levels, signs.data_ptr(), rest, *signs.stride()[:2]))
    # Of twice as many numbers as channels.
    found.low, found.size = ctypes.addressof(made[-1]), 2 * layout.size


def _blocks(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    assert layout.levels is not None and layout.element is not None
    found.scales, found.group = _E8M0 if layout.exponents else _E4M3, layout.block
    # `Blocks` of layouts.h: two addresses and three numbers.
    coarse = int(layout.dtype != torch.float32)
    blocks = [_kept(layout.levels, made).data_ptr(), 0, 0, _SHIFTS[layout.element], coarse]
    if layout.outer is not None:
        blocks[1:3] = pointer(layout.outer, torch.float32, held), layout.group
        found.runs = layout.outer.shape[1] if layout.row is None else 0
    made.append((ctypes.c_int64 * len(blocks))(*blocks))
    found.low = ctypes.addressof(made[-1])


def _fitted(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    assert layout.low is not None and layout.levels is not None and layout.aside is not None
    dtype, whole = layout.dtype, torch.uint8 if layout.size < 256 else torch.int16
    counts, channels, exact = layout.aside
    tables = [pointer(each, dtype, held) for each in (layout.low, layout.levels)]
    aside = [pointer(counts, whole, held), pointer(channels, whole, held), pointer(exact, dtype, held)]
    # `Fitted` of layouts.h: five addresses, one that the kernel writes, and a number.
    made.append((ctypes.c_int64 * 7)(*tables, *aside, 0, layout.block == layout.size))
    found.low, found.group = ctypes.addressof(made[-1]), layout.group
    found.runs = layout.levels.shape[1] if layout.row is None else 0


# The numbers of `Kind` of layouts.h, and what each kind adds to a side. What is not here is not read.
_KINDS: dict[CodeKind, tuple[int, Callable[[CodeLayout, Side, list[Tensor], list[Any]], None]]] = {
    CodeKind.WHOLE: (0, lambda *_: None),
    CodeKind.TOKENS: (3, _tokens),
    CodeKind.CHANNELS: (4, _channels),
    CodeKind.LEVELS: (5, _levels),
    CodeKind.BLOCKS: (6, _blocks),
    CodeKind.POINTS: (7, _points),
    CodeKind.SIGNS: (8, _signs),
    CodeKind.FITTED: (9, _fitted),
}


@cache
def padded_levels(levels: Tensor) -> Tensor:
    """Return ascending levels (n,), and zeros behind them until there are 16: a register of any width can load them.

    Behind 16 levels come the same twice as whole numbers, for keys and for values, and what one of either is worth.
    """
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        padded = torch.cat([levels, levels.new_zeros(max(0, 16 - levels.shape[0]))])
        if levels.shape[0] != 16:
            return padded
        whole = [_whole(levels, most) for most in MOST_WHOLE]
        return torch.cat(
            [padded, *(each for each, _ in whole), torch.tensor([unit for _, unit in whole], dtype=torch.float32)]
        )


def _whole(levels: Tensor, most: int) -> tuple[Tensor, float]:
    """The levels as whole numbers of at most `most`, and what one of them is worth.

    The squared error is the least for numbers that are spread as a bell.
    """
    exact = levels.double()
    borders = torch.special.ndtr((exact[1:] + exact[:-1]) / 2)
    share = torch.diff(borders, prepend=borders.new_zeros(1), append=borders.new_ones(1))
    units = exact.abs().max() / torch.arange(most // 2, most + 1, dtype=torch.float64)[:, None]
    errors = ((exact / units).round() * units - exact).square() @ share
    unit = units[errors.argmin(), 0]
    return (exact / unit).round().float(), float(unit)


@cache
def _both_ways(points: Tensor) -> Tensor:
    """Return points (n, 2) as one run of float32, and behind it all their first numbers and all their second ones."""
    with torch.inference_mode(False):
        return torch.cat([points.flatten(), points.mT.flatten()])


def _kept(table: Tensor, made: list[Any]) -> Tensor:
    """A table that is no part's own, which joins `made`."""
    made.append(table)
    return table


def pointer(tensor: Tensor, dtype: torch.dtype, held: list[Tensor]) -> int:
    """Address of the numbers in this dtype, one behind the other; what has them joins `held`."""
    own = tensor.to(dtype=dtype).contiguous()
    held.append(own)
    return own.data_ptr()
