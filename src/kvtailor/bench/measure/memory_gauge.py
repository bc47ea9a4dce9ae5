"""How much memory a process has taken: the kernel's counters on the CPU, the allocator's on an accelerator.

Both are read the same way: `now`, a `reset` of the high-water mark, `highest` since then, and `spilled`, a sentence
where the counters are wrong, because memory was moved to a place that they do not count. `is_out_of_memory` tells the
errors that come where there is too little of it.
"""

from __future__ import annotations

import ctypes
import gc
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvtailor.bench.measure.machine import resident_bytes
from kvtailor.errors import KvtailorError

__all__ = ["AllocatorGauge", "Gauge", "ResidentGauge", "gauge_of", "is_out_of_memory", "out_of_memory"]

_CLEAR = Path("/proc/self/clear_refs")
# What torch's allocator of the CPU says in a plain RuntimeError.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that a processor's or an accelerator's memory did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def out_of_memory(error: BaseException) -> str:
    """Return the sentence on such an error, with the first line of what it says."""
    said = str(error).strip().split("\n")[0]
    return f"the memory did not suffice{f' ({said})' if said else ''}: a shorter context or fewer rows need less"


class Gauge(ABC):
    """Counters of one process; made before the process loads anything.

    Attributes:
        free: bytes that could be taken when the gauge was made; None where the system has no such number.
        resets: whether `highest` is of the time since `reset`; without that there is no peak.
    """

    free: int | None = None
    resets: bool = True

    @abstractmethod
    def now(self) -> int:
        """Bytes that are taken, after garbage was given back."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets the high-water mark."""

    @abstractmethod
    def highest(self) -> int:
        """Most bytes that were taken since `reset`."""

    @abstractmethod
    def spilled(self) -> str | None:
        """Why the counters cannot be believed, one sentence; None where they can."""


class ResidentGauge(Gauge):
    """Resident memory of this process, of which weights and libraries are a part.

    Raises:
        KvtailorError: the system has no such number.
    """

    def __init__(self) -> None:
        if resident_bytes() is None:
            raise KvtailorError("This system does not report a process's resident memory.")
        self.free = _kilobytes("/proc/meminfo", "MemAvailable")
        self.resets = os.access(_CLEAR, os.W_OK)

    def now(self) -> int:
        """See `Gauge`."""
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        return _resident()[0]

    def reset(self) -> None:
        """See `Gauge`."""
        if self.resets:
            _CLEAR.write_text("5")

    def highest(self) -> int:
        """See `Gauge`."""
        return _resident()[1]

    def spilled(self) -> str | None:
        """See `Gauge`: swap."""
        swapped = _kilobytes("/proc/self/status", "VmSwap")
        if not swapped:
            return None
        return (
            f"The system moved {swapped} bytes of the measuring process to swap, so its resident memory does not show "
            "what it took: free some memory and run again."
        )


class AllocatorGauge(Gauge):
    """Bytes that torch's allocator gave out on one accelerator; the driver's own context is not among them.

    Args:
        device: a CUDA device.
        counters: `torch.cuda`, or what counts in its place.
    """

    def __init__(self, device: torch.device, counters: Any = torch.cuda) -> None:
        self.device, self.counters = device, counters
        self.free = int(counters.mem_get_info(device)[0])

    def now(self) -> int:
        """See `Gauge`."""
        gc.collect()
        self.counters.synchronize(self.device)
        self.counters.empty_cache()
        return int(self.counters.memory_allocated(self.device))

    def reset(self) -> None:
        """See `Gauge`."""
        self._note()
        self.counters.reset_peak_memory_stats(self.device)

    def highest(self) -> int:
        """See `Gauge`."""
        self._note()
        return int(self.counters.max_memory_allocated(self.device))

    def spilled(self) -> str | None:
        """See `Gauge`: some drivers go on in the host's memory where the device's is full."""
        self._note()
        if self.free is None or self._reserved <= self.free:
            return None
        return (
            f"The allocator reserved {self._reserved} bytes on {self.device}, of which {self.free} were free: the "
            "driver moved the rest to the host, so no number of this process is one of the device."
        )

    _reserved = 0

    def _note(self) -> None:
        self.counters.synchronize(self.device)
        self._reserved = max(self._reserved, int(self.counters.max_memory_reserved(self.device)))


def gauge_of(device: torch.device) -> Gauge:
    """The gauge of a device.

    Raises:
        KvtailorError: there is none for it here.
    """
    if device.type == "cpu":
        return ResidentGauge()
    if device.type == "cuda":
        return AllocatorGauge(device)
    raise KvtailorError(f"Memory is measured on the CPU and on CUDA devices, and the model is on {device}.")


def _resident() -> tuple[int, int]:
    found = resident_bytes()
    assert found is not None
    return found


def _kilobytes(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
