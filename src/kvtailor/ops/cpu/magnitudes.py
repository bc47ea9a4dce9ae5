"""Sides whose states are directions times magnitudes, but for tokens that are whole, as C++ sees them."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from kvtailor.ops.cpu.library import DTYPES, Magnitudes
from kvtailor.ops.segments.code_layout import CodeKind, CodeLayout

__all__ = ["address_of", "unsuited"]


def unsuited(layout: CodeLayout) -> str | None:
    """Why a side with magnitudes cannot be read so, a clause; None where it can."""
    assert layout.magnitudes is not None
    if layout.kind is CodeKind.SIGNS:
        return "no C++ kernel reads signs and magnitudes"
    magnitudes, _, whole = layout.magnitudes
    if whole.dtype not in DTYPES or magnitudes.dtype != whole.dtype:
        return f"magnitudes are float32, bfloat16 or float16 to be read in C++, not {magnitudes.dtype}"
    return None if whole.device.type == "cpu" else f"the C++ kernels run on the CPU, not on {whole.device}"


def address_of(layout: CodeLayout, held: list[Tensor], made: list[Any]) -> int:
    """Return where C++ finds the magnitudes of a side that has some; `held` and `made` as of `sides.side_of`."""
    assert layout.magnitudes is not None
    magnitudes, places, whole = layout.magnitudes
    if whole.shape[-1] != layout.size:
        raise ValueError(f"tokens that are whole have {whole.shape[-1]} channels, and directions {layout.size}")
    tensors = [each.contiguous() for each in (magnitudes, places, whole)]
    held += tensors
    made.append(Magnitudes(*(each.data_ptr() for each in tensors), places.shape[0], DTYPES[whole.dtype]))
    return ctypes.addressof(made[-1])
