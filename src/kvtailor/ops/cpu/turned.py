"""Keys that were stored before their rotary embedding, as C++ sees them: it turns each block of them as it reads it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.cpu.coordinates import map_of
from kvtailor.ops.cpu.library import Turn
from kvtailor.ops.segments.code_layout import CodeKind
from kvtailor.ops.segments.coded import Coded
from kvtailor.ops.segments.turned import Turned

__all__ = ["turn_of", "unsuited"]

# As in attention.cpp: slots that are read at once, of which a piece of work has some.
_BLOCK = 256


def unsuited(keys: Coded) -> str | None:
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
        frequencies=_kept(ctypes.c_float, frequencies, made),
        planes=len(frequencies),
        interleaved=int(rotation.interleaved),
        start=layout.start or 0,
        joined=turned.joined,
        size=size,
        alike=1,
    )
    if layout.positions is not None:
        found.positions = _pointer(layout.positions, torch.int32, held)
    if turned.first is not None and turned.joined > 1:
        # A tensor of the layer's own has more lanes.
        found.first = _kept(ctypes.c_int64, turned.first.tolist(), made)
    elif turned.first is not None:
        found.first = _pointer(turned.first, torch.int64, held)
    if turned.keys_in:
        # The codec has their tensors.
        maps = [map_of(each) for each in turned.keys_in]
        before = (ctypes.c_void_p * (len(maps) - 1))(*map(ctypes.addressof, maps[1:]))
        made += [*maps, before]
        found.map, found.before, found.count_before = ctypes.addressof(maps[0]), ctypes.addressof(before), len(before)
    elif layout.positions is None and layout.owner is None:
        # Sines and cosines take as long as the keys of a lane; a few pieces must be left for each thread.
        blocks, most = -(-slots // _BLOCK), 2 * torch.get_num_threads()
        divisors = [each for each in range(1, layout.heads + 1) if layout.heads % each == 0]
        found.alike = max((each for each in divisors if layout.lanes // each * blocks >= most), default=1)
    return found


def _kept(number: Any, numbers: list[Any], made: list[Any]) -> int:
    made.append((number * len(numbers))(*numbers))
    return ctypes.addressof(made[-1])


def _pointer(tensor: Tensor, dtype: torch.dtype, held: list[Tensor]) -> int:
    own = tensor.to(device="cpu", dtype=dtype).contiguous()
    held.append(own)
    return own.data_ptr()
