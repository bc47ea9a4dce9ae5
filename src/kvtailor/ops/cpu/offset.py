"""The constant that was taken off keys before they were stored, as C++ sees it: what it adds to each logit."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvtailor.ops.cpu.library import Offset
from kvtailor.ops.segments.turned import Offsetting

__all__ = ["offset_of"]

# As in offset.h.
_SPAN, _WIDE = 256, 32
# How far what the functions add up to is from the cosines and sines, as a length over all planes.
_NEAR = 1e-6


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
    if layout.positions is not None:
        held.append(layout.positions.to(device="cpu", dtype=torch.int32).contiguous())
        found.positions = held[-1].data_ptr()
    if shift.first is not None:
        held.append(shift.first.to(device="cpu", dtype=torch.int64).contiguous())
        found.first = held[-1].data_ptr()
    return found


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
