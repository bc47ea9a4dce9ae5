"""Memory to read into, used again as soon as no tensor refers to it: fresh pages cost more than the reading itself."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Lock

import numpy
import torch
from torch import Tensor

__all__ = ["Buffers"]


class Buffers:
    """Lends memory, and takes it back when the last tensor over it is gone; what is idle serves one reading more."""

    def __init__(self) -> None:
        self._idle: list[numpy.ndarray] = []
        self._lock = Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next reading."""
        with self._lock:
            return sum(each.nbytes for each in self._idle)

    def expect(self, sizes: Sequence[int]) -> None:
        """The next reading takes buffers of these sizes in bytes; other idle ones are given back to the system."""
        with self._lock:
            missing, kept = list(sizes), []
            for each in self._idle:
                if each.nbytes in missing:
                    missing.remove(each.nbytes)
                    kept.append(each)
            self._idle[:] = kept

    def take(self, size: int) -> Tensor:
        """(size,) uint8 with anything in it."""
        with self._lock:
            at = next((i for i, each in enumerate(self._idle) if each.nbytes == size), None)
            own = numpy.empty(size, numpy.uint8) if at is None else self._idle.pop(at)
        # A tensor holds the array that it was made from, and so do all tensors over the same memory. What takes it back
        # needs no lock: the garbage collector may call it in the middle of `expect` or `take`.
        lent = own[:]
        weakref.finalize(lent, self._idle.append, own).atexit = False
        return torch.from_numpy(lent)
