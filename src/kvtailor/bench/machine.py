"""What ran, and on what: versions, processor, load, and the bandwidth that no decoding step can beat."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["Neighbours", "describe", "read_bandwidth", "resident_bytes", "versions"]

_PROBE_BYTES = 256 * 2**20


def describe(*, bandwidth: bool = True) -> dict[str, object]:
    """The machine as JSON values; None where it cannot be known.

    Keys: `python`, `torch`, `transformers`, `kvtailor` (versions), `commit` ("-dirty" behind it where files differ),
    `system`, `processor`, `cores` (that this process may use), `threads` (torch's), `memory_bytes`, `load` (average of
    one minute), `accelerator`, `read_bandwidth` (bytes per second, `read_bandwidth()`; None if not asked).
    """
    return {
        **versions(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "read_bandwidth": read_bandwidth() if bandwidth else None,
    }


def versions() -> dict[str, str | None]:
    """The keys `python`, `torch`, `transformers`, `kvtailor` and `commit` of `describe`."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "kvtailor": _version("kvtailor"),
        "commit": _commit(),
    }


def read_bandwidth(device: torch.device | None = None, rounds: int = 5) -> float:
    """Bytes per second of the fastest of some plain reads of 256 MiB, which is more than a cache keeps.

    The best and not the median: this is a floor under times, and a disturbed read would make it look kinder.
    """
    probe = torch.ones(_PROBE_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        probe.sum().item()
        best = min(best, time.perf_counter() - begin)
    return _PROBE_BYTES / best


def resident_bytes() -> tuple[int, int] | None:
    """Resident bytes of this process now, and the most since the last reset of the high-water mark; None off Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return (found["VmRSS"], found["VmHWM"]) if len(found) == 2 else None


@dataclass
class Neighbours:
    """Tells whether other programs took processor time that a measurement needed.

    Other programs may use the cores that our threads leave free; what they use beyond that, as a share of the elapsed
    time, disturbs. Where the system does not say (no /proc/stat), nothing is called disturbed and `metered` is False.

    Attributes:
        limit: share of one core above which a sample counts as disturbed.
    """

    limit: float = 0.15

    def __post_init__(self) -> None:
        self._last = self._now()

    @property
    def metered(self) -> bool:
        """Whether this system lets us look."""
        return self._last is not None

    def start(self) -> None:
        """Begins a sample."""
        self._last = self._now()

    def disturbed(self) -> bool:
        """Whether the sample that began at `start` was disturbed."""
        now = self._now()
        if now is None or self._last is None:
            return False
        elapsed, busy, own = (b - a for a, b in zip(self._last, now, strict=True))
        # Busy time is counted in ticks of 10 ms on each core: that much foreign time may be rounding.
        rounding = 0.01 * _cores()
        free = max(0, _cores() - torch.get_num_threads()) * elapsed
        return busy - own - free - rounding > self.limit * elapsed

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return None
        mine = {f"cpu{i}" for i in _affinity()}
        busy = 0
        for line in lines:
            name, *rest = line.split()
            if name in mine:
                # user nice system idle iowait irq softirq steal: all but the two idle ones are somebody's work.
                ticks = [int(value) for value in rest[:8]]
                busy += sum(ticks) - ticks[3] - ticks[4]
        return time.perf_counter(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()


def _affinity() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cores() -> int:
    return len(_affinity())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def _processor() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
