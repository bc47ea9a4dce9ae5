"""Keys and values of a part as C++ sees them, from the layout of their codes, and what becomes of them on the way.

On the way keys may be turned by their positions or get a constant that was taken off them, states may be directions
times magnitudes, and queries and sums may change between the model's coordinates and those in which states are stored.
The maps of queries and sums are those of `types.Coordinates`, by the sums that a decoded token's one call makes, bit by
bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.codes.floats import levels_of
from kvtailor.ops.cpu.library import DTYPES, Library, Magnitudes, Map, Offset, Side, Turn
from kvtailor.ops.segments.around import positions_of
from kvtailor.ops.segments.attention_inputs import Offsetting, Turned
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout
from kvtailor.ops.segments.coded import Coded
from kvtailor.types import Coordinates, Layout, PickedChannels

__all__ = [
    "MOST_WHOLE",
    "padded_levels",
    "pointer",
    "side_of",
    "unsuited",
    "magnitudes_of",
    "unsuited_magnitudes",
    "turn_of",
    "unsuited_turned",
    "offset_of",
    "map_of",
    "map_queries",
    "map_sums",
    "unsuited_coordinates",
]


# Of keys and of values: as `MOST_OF_KEYS` and `MOST_OF_VALUES` in shorts.h.
MOST_WHOLE = (8191, 4096)
# Types of the scales of `BLOCK_LEVELS`, see layouts.h.
_E4M3, _E8M0 = 3, 4
# 1 as a power of two of E8M0.
_ONE = 127
# By how many bits a byte's exponent and mantissa lie below those of a float32.
_SHIFTS = {"e2m1": 0, "e4m3": 20, "e5m2": 21}
# As in attention.cpp: slots that are read at once, of which a piece of work has some.
_BLOCK = 256
# As in offset.h.
_SPAN, _WIDE = 256, 32
# How far what the functions add up to is from the cosines and sines, as a length over all planes.
_NEAR = 1e-6


def unsuited(keys: Coded, values: Coded) -> str | None:
    """Why these two sides cannot be read here, a clause; None where they can."""
    for side in (keys, values):
        layout = side.code_layout
        if layout is None or layout.kind not in _KINDS:
            return f"no C++ kernel reads {type(side).__name__}"
        if layout.magnitudes is not None and (why := unsuited_magnitudes(layout)) is not None:
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
    found.group, found.zero, found.signed_steps = layout.block, layout.zero, int(layout.steps == "any")
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
    assert layout.levels is not None
    found.scales = _E8M0 if layout.exponents else _E4M3
    _small_floats(layout, found, held, made, layout.levels, layout.outer)


def _floats(layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any]) -> None:
    # Blocks as wide as a token, all of scale 1, under the scale of a run.
    assert layout.element is not None
    found.scales = _E8M0
    found.step = _kept(torch.full(layout.codes.shape[:2], _ONE, dtype=torch.uint8), made).data_ptr()
    _small_floats(layout, found, held, made, levels_of(layout.element), layout.step)


def _small_floats(
    layout: CodeLayout, found: Side, held: list[Tensor], made: list[Any], levels: Tensor, outer: Tensor | None
) -> None:
    assert layout.element is not None
    found.group = layout.block
    # `Blocks` of layouts.h: two addresses and four numbers.
    coarse = int(layout.dtype != torch.float32)
    blocks = [_kept(levels, made).data_ptr(), 0, 0, 0, _SHIFTS[layout.element], coarse]
    if outer is not None:
        blocks[1:4] = pointer(outer, outer.dtype, held), DTYPES[outer.dtype], layout.group
        found.runs = outer.shape[1] if layout.row is None else 0
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
    CodeKind.FLOATS: (6, _floats),
}


@cache
def padded_levels(levels: Tensor) -> Tensor:
    """Return ascending levels (n,), and zeros behind them until there are 16: a register of any width can load them.

    Behind 16 come the same twice as whole numbers, for keys and for values, and what one of either is worth.
    """
    # Made outside of any inference mode: a cached tensor must serve all callers.
    with torch.inference_mode(False):
        if levels.shape[0] > 16:
            return levels.clone()
        nothing, whole = levels.new_zeros(16 - levels.shape[0]), [_whole(levels, most) for most in MOST_WHOLE]
        units = torch.tensor([unit for _, unit in whole], dtype=torch.float32)
        tables = (levels, *(each for each, _ in whole))
        return torch.cat([*(each for table in tables for each in (table, nothing)), units])


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


def unsuited_magnitudes(layout: CodeLayout) -> str | None:
    """Why a side with magnitudes cannot be read so, a clause; None where it can."""
    assert layout.magnitudes is not None
    if layout.kind is CodeKind.SIGNS:
        return "no C++ kernel reads signs and magnitudes"
    magnitudes, _, whole = layout.magnitudes
    if whole.dtype not in DTYPES or magnitudes.dtype != whole.dtype:
        return f"magnitudes are float32, bfloat16 or float16 to be read in C++, not {magnitudes.dtype}"
    return None if whole.device.type == "cpu" else f"the C++ kernels run on the CPU, not on {whole.device}"


def magnitudes_of(layout: CodeLayout, held: list[Tensor], made: list[Any]) -> int:
    """Return where C++ finds the magnitudes of a side that has some; `held` and `made` as of `sides.side_of`."""
    assert layout.magnitudes is not None
    magnitudes, places, whole = layout.magnitudes
    if whole.shape[-1] != layout.size:
        raise ValueError(f"tokens that are whole have {whole.shape[-1]} channels, and directions {layout.size}")
    tensors = [each.contiguous() for each in (magnitudes, places, whole)]
    held += tensors
    made.append(Magnitudes(*(each.data_ptr() for each in tensors), places.shape[0], DTYPES[whole.dtype]))
    return ctypes.addressof(made[-1])


def unsuited_turned(keys: Coded) -> str | None:
    """Why these keys cannot be turned here, a clause; None where they can."""
    layout = keys.code_layout
    if layout is None or layout.kind in (CodeKind.POINTS, CodeKind.SIGNS) or layout.magnitudes is not None:
        return f"no C++ kernel turns {type(keys).__name__}"
    return None


def turn_of(turned: Turned, size: int, slots: int, held: list[Tensor], made: list[Any]) -> Turn:
    """Return how keys are turned as C++ sees it.

    Args:
        turned: of the part.
        size: channels of a query.
        slots: of a lane.
        held, made: as of `sides.side_of`.
    """
    rotation, layout = turned.rotation, turned.layout
    frequencies = rotation.frequencies.tolist()
    found = Turn(
        frequencies=_array_of(ctypes.c_float, frequencies, made),
        planes=len(frequencies),
        interleaved=int(rotation.interleaved),
        start=layout.start or 0,
        joined=turned.joined,
        size=size,
        alike=1,
    )
    positions, first = _counted(layout, turned.first)
    if positions is not None:
        found.positions = _pointer_on_cpu(positions, torch.int32, held)
    if first is not None and turned.joined > 1:
        # A tensor of the layer's own has more lanes.
        found.first = _array_of(ctypes.c_int64, first.tolist(), made)
    elif first is not None:
        found.first = _pointer_on_cpu(first, torch.int64, held)
    if turned.keys_in:
        # The codec has their tensors.
        maps = [map_of(each) for each in turned.keys_in]
        before = (ctypes.c_void_p * (len(maps) - 1))(*map(ctypes.addressof, maps[1:]))
        made += [*maps, before]
        found.map, found.before, found.count_before = ctypes.addressof(maps[0]), ctypes.addressof(before), len(before)
    elif positions is None and layout.owner is None:
        # Sines and cosines take as long as the keys of a lane; a few pieces must be left for each thread.
        blocks, most = -(-slots // _BLOCK), 2 * torch.get_num_threads()
        divisors = [each for each in range(1, layout.heads + 1) if layout.heads % each == 0]
        found.alike = max((each for each in divisors if layout.lanes // each * blocks >= most), default=1)
    return found


def _array_of(number: Any, numbers: list[Any], made: list[Any]) -> int:
    made.append((number * len(numbers))(*numbers))
    return ctypes.addressof(made[-1])


def _pointer_on_cpu(tensor: Tensor, dtype: torch.dtype, held: list[Tensor]) -> int:
    own = tensor.to(device="cpu", dtype=dtype).contiguous()
    held.append(own)
    return own.data_ptr()


def offset_of(shift: Offsetting, query: Tensor | None, held: list[Tensor], made: list[Any]) -> Offset:
    """Return the constant of a part's keys as C++ sees it.

    Args:
        shift: of the part.
        query: (n, g, t, d) in the model's channels; None: who calls says where it is.
        held, made: as of `sides.side_of`.
    """
    offset, layout = shift.offset, shift.layout
    vectors, rotation = offset.vectors.to(device="cpu", dtype=torch.float32).contiguous(), offset.rotation
    frequencies = () if rotation is None else tuple(rotation.frequencies.tolist())
    weights, functions = _functions(frequencies)
    of_planes = (ctypes.c_double * len(frequencies))(*frequencies)
    found = Offset(
        vectors=vectors.data_ptr(),
        frequencies=ctypes.addressof(of_planes),
        weights=weights.data_ptr(),
        functions=functions.data_ptr(),
        planes=len(frequencies),
        interleaved=int(rotation is not None and rotation.interleaved),
        start=layout.start or 0,
        size=vectors.shape[1],
        heads=layout.heads,
        rank=len(functions) - 1,
        wide=weights.shape[1],
    )
    made += [vectors, of_planes]
    if query is not None:
        asked = query.to(torch.float32).contiguous()
        made.append(asked)
        found.query = asked.data_ptr()
    positions, first = _counted(layout, shift.first)
    if positions is not None:
        found.positions = _pointer_on_cpu(positions, torch.int32, held)
    if first is not None:
        found.first = _pointer_on_cpu(first, torch.int64, held)
    return found


def _counted(layout: Layout, first: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Columns (m, s) of the slots, None where they follow one another, and where each lane's positions count from.

    Where positions count from a column of each slot's own, they are in the place of columns.
    """
    if first is None or first.ndim == 1:
        return layout.positions, first
    return positions_of(layout, first, first.device), None


@cache
def _functions(frequencies: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Few functions of 256 neighbouring positions that cosines and sines of these frequencies are sums of.

    Returns:
        What each cosine, then each sine, has of each function, (2 f, w), zeros past the function r; and the functions
        (r, 256) and a row of zeros. Both float32.
    """
    angles = torch.arange(_SPAN, dtype=torch.float64) * torch.tensor(frequencies, dtype=torch.float64)[:, None]
    waves = torch.cat([angles.cos(), angles.sin()])
    directions, rank = torch.linalg.svd(waves, full_matrices=False)[0], 0
    while rank < len(waves):
        some = directions[:, :rank]
        if float((waves - some @ (some.T @ waves)).norm(dim=0).max()) <= _NEAR:
            break
        rank += 1
    wide = -(-max(rank, 1) // _WIDE) * _WIDE
    weights = torch.zeros(len(waves), wide, dtype=torch.float32)
    functions = torch.zeros(rank + 1, _SPAN, dtype=torch.float32)
    weights[:, :rank], functions[:rank] = directions[:, :rank], directions[:, :rank].T @ waves
    return weights, functions


def unsuited_coordinates(query: Tensor) -> str | None:
    """Why queries like this one cannot be mapped here, a clause; None where they can."""
    return None if query.device.type == "cpu" else f"the C++ kernels run on the CPU, not on {query.device.type}"


def map_of(coordinates: Coordinates) -> Map:
    """Return the map as C++ sees it. It has addresses of the coordinates' own tensors, which must stay alive.

    Raises:
        ValueError: a tensor is not one run of float32 on the CPU, or channels are no dense rows there.
    """
    heads, wide, narrow = coordinates.matrix.shape
    if isinstance(coordinates, PickedChannels):
        picked = coordinates.channels
        if picked.device.type != "cpu" or picked.stride(1) != 1 or picked.dtype not in (torch.uint8, torch.int16):
            raise ValueError(
                f"channels must be uint8 or int16 in dense rows on the CPU, found {picked.dtype} on {picked.device}"
            )
        return Map(
            picked=picked.data_ptr(),
            picked_row=picked.stride(0),
            picked_bytes=picked.element_size(),
            heads=heads,
            wide=wide,
            narrow=narrow,
            blocks=1,
            scale=1.0,
        )
    matrix, mean = coordinates.matrix, coordinates.mean
    for each in (matrix,) if mean is None else (matrix, mean):
        if each.dtype != torch.float32 or each.device.type != "cpu" or not each.is_contiguous():
            raise ValueError(f"coordinates must be contiguous float32 on the CPU, found {each.dtype} on {each.device}")
    return Map(
        matrix=matrix.data_ptr(),
        mean=None if mean is None else mean.data_ptr(),
        heads=heads,
        wide=wide,
        narrow=narrow,
        blocks=coordinates.blocks,
        scale=coordinates.scale,
    )


def map_queries(coordinates: Coordinates, query: Tensor, used: Library) -> Tensor:
    """See `Coordinates.of_queries`."""
    return _map(coordinates, query, None, used)


def map_sums(coordinates: Coordinates, sums: Tensor, lse: Tensor, used: Library) -> Tensor:
    """See `Coordinates.of_sums`; lse (n, g, t) is -inf where nothing is seen."""
    return _map(coordinates, sums, lse.to(torch.float32).contiguous(), used)


def _map(coordinates: Coordinates, states: Tensor, lse: Tensor | None, used: Library) -> Tensor:
    states = states.to(torch.float32).contiguous()
    n, g, t, _ = states.shape
    to = coordinates.blocks * coordinates.matrix.shape[2 if lse is None else 1]
    found = torch.empty((n, g, t, to), dtype=torch.float32)
    used.functions.kvtailor_map(
        ctypes.byref(map_of(coordinates)),
        ctypes.c_void_p(states.data_ptr()),
        ctypes.c_void_p(None if lse is None else lse.data_ptr()),
        ctypes.c_void_p(found.data_ptr()),
        ctypes.c_int64(n * g * t),
        # Queries of one kv head follow one another.
        ctypes.c_int64(g * t),
    )
    return found
