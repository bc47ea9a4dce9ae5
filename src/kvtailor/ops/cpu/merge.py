"""One softmax over parts that were read one by one, in C++: the sums that a decoded token's one call makes, bit by bit.

`ops.attention.folded.merge` is the same in torch, in nine operations for two parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kvtailor.ops.cpu.library import Call, Library, Union

__all__ = ["merge", "unsuited"]


def unsuited(found: Sequence[tuple[Tensor, Tensor]]) -> str | None:
    """Why these parts cannot be merged here, a clause; None where they can."""
    if any(each.dtype != torch.float32 or each.device.type != "cpu" for part in found for each in part):
        return "the C++ kernels merge float32 on the CPU"
    return None


def merge(found: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None, used: Library) -> tuple[Tensor, Tensor]:
    """Attention over the union of what disjoint parts saw, from each part's out (..., dv) and lse (...) float32.

    Args:
        found: at least one part.
        sinks: logits that broadcast to lse, each of a slot with the value 0; None: none.
        used: the variant.
    """
    shape, size = found[0][1].shape, found[0][0].shape[-1]
    held = [(out.contiguous(), lse.contiguous()) for out, lse in found]
    calls = [Call(out=out.data_ptr(), lse=lse.data_ptr()) for out, lse in held]
    parts = (ctypes.c_void_p * len(calls))(*map(ctypes.addressof, calls))
    out, lse = torch.empty((*shape, size), dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    scratch = torch.empty(size + len(calls), dtype=torch.float32)
    own = None if sinks is None else sinks.to(torch.float32).expand(shape).contiguous()
    used.functions.kvtailor_merge(
        ctypes.byref(
            Union(
                parts=ctypes.addressof(parts),
                sinks=None if own is None else own.data_ptr(),
                merged=scratch.data_ptr(),
                out=out.data_ptr(),
                lse=lse.data_ptr(),
                count=len(calls),
                rows=lse.numel(),
                size=size,
            )
        )
    )
    return out, lse
