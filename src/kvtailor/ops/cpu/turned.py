"""Keys that were stored before their rotary embedding, as C++ sees them: it turns each block of them as it reads it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.codes.grids import GridCodes
from kvtailor.ops.codes.residual import ResidualCodes
from kvtailor.ops.cpu.coordinates import map_of
from kvtailor.ops.cpu.library import Turn
from kvtailor.ops.segments.coded import Coded
from kvtailor.ops.segments.pair_sides import Magnified
from kvtailor.ops.segments.turned import Turned
from kvtailor.types import Coordinates

__all__ = ["turn_of", "unsuited"]

# As in attention.cpp: slots that are read at once, of which a piece of work has some.
_BLOCK = 256


def unsuited(keys: Coded) -> str | None:
    """Why these keys cannot be turned by kernels that can turn keys, a clause; None where they can."""
    return (
        f"no C++ kernel turns {type(keys).__name__}"
        if isinstance(keys, GridCodes | ResidualCodes | Magnified)
        else None
    )


def turn_of(turned: Turned, size: int, slots: int, held: list[Tensor], made: list[Any]) -> Turn:
    """Return how keys are turned as C++ sees it.

    Args:
        turned: of the part.
        size: channels of a query.
        slots: of a lane.
        held, made: as of `attention.side_of`.
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
        one = turned.keys_in[0]
        if len(turned.keys_in) > 1:
            one = _composed(turned.keys_in)
            held.extend(each for each in (one.matrix, one.mean) if each is not None)
        # The codec has the tensors of a single one.
        made.append(map_of(one))
        found.map = ctypes.addressof(made[-1])
    elif layout.positions is None and layout.owner is None:
        # Sines and cosines take as long as the keys of a lane; a few pieces must be left for each thread.
        blocks, most = -(-slots // _BLOCK), 2 * torch.get_num_threads()
        divisors = [each for each in range(1, layout.heads + 1) if layout.heads % each == 0]
        found.alike = max((each for each in divisors if layout.lanes // each * blocks >= most), default=1)
    return found


def _composed(maps: tuple[Coordinates, ...]) -> Coordinates:
    """Return one map for several, the model's side first."""
    matrix, mean = _dense(maps[0]), maps[0].mean
    for each in maps[1:]:
        if each.mean is not None:
            shift = (matrix @ each.mean[..., None])[..., 0]
            mean = shift if mean is None else mean + shift
        matrix = matrix @ _dense(each)
    return Coordinates(matrix=matrix.contiguous(), mean=None if mean is None else mean.contiguous())


def _dense(one: Coordinates) -> Tensor:
    """(k, blocks * c, blocks * r), the scale included."""
    if one.blocks == 1:
        return one.matrix * one.scale
    return torch.stack([torch.block_diag(*[each] * one.blocks) for each in one.matrix]) * one.scale


def _kept(number: Any, numbers: list[Any], made: list[Any]) -> int:
    made.append((number * len(numbers))(*numbers))
    return ctypes.addressof(made[-1])


def _pointer(tensor: Tensor, dtype: torch.dtype, held: list[Tensor]) -> int:
    own = tensor.to(device="cpu", dtype=dtype).contiguous()
    held.append(own)
    return own.data_ptr()
