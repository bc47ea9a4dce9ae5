"""Sides whose states are directions times magnitudes, but for tokens that are whole, as C++ sees them."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from kvtailor.ops.codes.residual import ResidualCodes
from kvtailor.ops.cpu.library import DTYPES, Call, Magnitudes
from kvtailor.ops.segments.coded import Coded, Whole
from kvtailor.ops.segments.pair_sides import Magnified

__all__ = ["directions_of", "unsuited"]


def unsuited(side: Magnified) -> str | None:
    """Why a side cannot be read so, whatever its directions are, a clause; None where it can."""
    if isinstance(side.directions, ResidualCodes | Magnified):
        return f"no C++ kernel reads {type(side.directions).__name__} and magnitudes"
    own = side.own
    if own.whole.dtype not in DTYPES or own.magnitudes.dtype != own.whole.dtype:
        return f"magnitudes are float32, bfloat16 or float16 to be read in C++, not {own.magnitudes.dtype}"
    return None if own.whole.device.type == "cpu" else f"the C++ kernels run on the CPU, not on {own.whole.device}"


def directions_of(call: Call, keys: Coded, values: Coded, held: list[Tensor], made: list[Any]) -> tuple[Coded, Coded]:
    """Return the sides of a call without their magnitudes, which it is told of.

    Args:
        call: of these sides.
        keys, values: (m, s, d) and (m, s, r).
        held, made: as of `attention.side_of`.
    """
    found = []
    for name, side in (("key", keys), ("value", values)):
        if isinstance(side, Magnified):
            made.append(_magnitudes_of(side, held))
            setattr(call, f"{name}_magnitudes", ctypes.addressof(made[-1]))
            side = side.directions
        found.append(side)
    return found[0], found[1]


def _magnitudes_of(side: Magnified, held: list[Tensor]) -> Magnitudes:
    own, directions = side.own, side.directions
    size = directions.states.shape[-1] if isinstance(directions, Whole) else getattr(directions, "size", None)
    if own.whole.shape[-1] != size:
        raise ValueError(f"tokens that are whole have {own.whole.shape[-1]} channels, and directions {size}")
    tensors = [each.contiguous() for each in (own.magnitudes, own.places, own.whole)]
    held += tensors
    return Magnitudes(*(each.data_ptr() for each in tensors), own.places.shape[0], DTYPES[own.whole.dtype])
