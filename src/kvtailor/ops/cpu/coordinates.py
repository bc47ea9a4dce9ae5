"""Queries and sums between the model's coordinates and those in which states are stored, in C++.

The same as `types.Coordinates` does with torch, by the sums that a decoded token's one call makes, bit by bit.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvtailor.ops.cpu.library import Library, Map
from kvtailor.types import Coordinates, PickedChannels

__all__ = ["map_of", "of_queries", "of_sums", "unsuited"]


def unsuited(query: Tensor) -> str | None:
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


def of_queries(coordinates: Coordinates, query: Tensor, used: Library) -> Tensor:
    """See `Coordinates.of_queries`."""
    return _mapped(coordinates, query, None, used)


def of_sums(coordinates: Coordinates, sums: Tensor, lse: Tensor, used: Library) -> Tensor:
    """See `Coordinates.of_sums`; lse (n, g, t) is -inf where nothing is seen."""
    return _mapped(coordinates, sums, lse.to(torch.float32).contiguous(), used)


def _mapped(coordinates: Coordinates, states: Tensor, lse: Tensor | None, used: Library) -> Tensor:
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
