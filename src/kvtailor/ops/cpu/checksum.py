"""CRC-32 at the speed of memory where the machine can, and zlib's everywhere else: the same number either way."""

from __future__ import annotations

import ctypes
import zlib

from torch import Tensor

from kvtailor.ops.cpu.library import Library, library

__all__ = ["crc32"]


def crc32(data: Tensor, value: int = 0, *, using: Library | None = None) -> int:
    """What `zlib.crc32` gives for these bytes; other threads run meanwhile.

    Args:
        data: (n,) uint8, contiguous, on the CPU.
        value: of the bytes before.
        using: the variant; None: the best.
    """
    used = using or library()
    step = 0 if used is None else used.functions.kvtailor_crc32_step()
    size = data.numel() // step * step if step else 0
    if size and used is not None:
        pointer = ctypes.c_void_p(data.data_ptr())
        value = used.functions.kvtailor_crc32(ctypes.c_uint32(value), pointer, ctypes.c_int64(size)) & 0xFFFFFFFF
    return zlib.crc32(data[size:].numpy().data, value)
