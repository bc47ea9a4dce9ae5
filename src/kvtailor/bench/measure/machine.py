"""What ran, and on what: versions, processor, load, and the bandwidth and arithmetic that no model can beat."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from kvtailor.hf.model import processes
from kvtailor.ops import huge_pages
from kvtailor.version import __version__

__all__ = [
    "Neighbours",
    "code_of_others",
    "describe",
    "free_bytes",
    "matmul_flops",
    "read_bandwidth",
    "resident_bytes",
    "versions",
]

_PROBE_BYTES = 256 * 2**20
# An accelerator reads 256 MiB in less time than a kernel launch takes.
_PROBE_BYTES_OF_ACCELERATOR = 4 * 2**30
_PROBE_SECONDS = 0.4


def describe(
    *, bandwidth: bool = True, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, object]:
    """The machine as JSON values; None where it cannot be known.

    Keys: `python`, `torch`, `transformers`, `kvtailor` (versions), `commit` ("-dirty" behind it where files differ),
    `system`, `processor`, `cores` (that this process may use), `threads` (torch's), `memory_bytes`, `huge_pages` (bytes
    from which on tensors on the CPU ask for them; None: none does), `load` (average of one minute), `accelerator`,
    `accelerator_bytes` (its memory); and where asked, measured now, `read_bandwidth` (bytes per second,
    `read_bandwidth()`), `matmul_flops` (operations per second, `matmul_flops()`; on a CPU those of float32 where they
    are more) and `probes_disturbed` (other programs took processor time that these two needed: floors made of them are
    too high).

    Args:
        bandwidth: measure what is measured.
        device: of the model; None: CPU.
        dtype: of the model.
    """
    device = device or torch.device("cpu")
    cuda = torch.cuda.is_available()
    meter = Neighbours()
    # Whatever the dtype, products can be made in float32, and some processors are slower in 16 bits.
    dtypes = {dtype, torch.float32} if device.type == "cpu" else {dtype}
    measured: tuple[float | None, float | None] = (None, None)
    if bandwidth:
        measured = (read_bandwidth(device), max(matmul_flops(device, each) for each in dtypes))
    return {
        **versions(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "processes": processes.started().size,
        "memory_bytes": _memory(),
        "huge_pages": huge_pages.size_asked_for(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "accelerator": torch.cuda.get_device_name(device if device.type == "cuda" else None) if cuda else None,
        "accelerator_bytes": torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
        "read_bandwidth": measured[0],
        "matmul_flops": measured[1],
        "probes_disturbed": meter.disturbed() if bandwidth and meter.metered else None,
    }


def versions() -> dict[str, str | None]:
    """The keys `python`, `torch`, `transformers`, `kvtailor` and `commit` of `describe`."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        # Of the code that runs: what pip knows of an editable install is the version of the day it was installed.
        "kvtailor": __version__,
        "commit": _commit(),
    }


def code_of_others(methods: Iterable[object]) -> dict[str, str | None]:
    """Digests of the code of methods that kvtailor does not have itself, by module.

    Of all files of a method's package that are loaded now; None: its class comes from no file, as in a notebook, so
    that nothing tells one version of it from another.
    """
    modules = {type(each).__module__ for each in methods}
    return {each: _digest(each) for each in sorted(modules) if not each.startswith("kvtailor.")}


def _digest(module: str) -> str | None:
    package = module.partition(".")[0]
    loaded = {name: sys.modules.get(name) for name in {*sys.modules} if name.partition(".")[0] == package}
    files = {name: getattr(each, "__file__", None) for name, each in loaded.items()}
    if not files.get(module):
        return None
    found = hashlib.sha256()
    for name in sorted(name for name, file in files.items() if file):
        try:
            found.update(f"{name}\n".encode() + Path(str(files[name])).read_bytes())
        except OSError:
            return None
    return found.hexdigest()[:16]


def read_bandwidth(device: torch.device | None = None, rounds: int = 5) -> float:
    """Bytes per second of the fastest of some plain reads of more than a cache keeps: 256 MiB, 4 GiB on an accelerator.

    The best and not the median: this is a floor under times, and a disturbed read would make it look kinder. On a CPU
    the memory is such as a cache has, in huge pages where these are asked for. Where an accelerator has less than 8 GiB
    left, half of what is left is read.
    """
    size = _PROBE_BYTES
    if device is not None and device.type == "cuda":
        size = min(_PROBE_BYTES_OF_ACCELERATOR, torch.cuda.mem_get_info(device)[0] // 2) // 4 * 4
    on_cpu = device is None or device.type == "cpu"
    shape = (size // 4,)
    probe = huge_pages.empty(shape, torch.float32) if on_cpu else torch.empty(shape, dtype=torch.float32, device=device)
    probe.fill_(1.0)
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        probe.sum().item()
        best = min(best, time.perf_counter() - begin)
    return size / best


def matmul_flops(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of the fastest of some products of square matrices, in about half a second.

    Sizes of 512 and then 1024 on the CPU, 4096 and then 8192 on an accelerator; the larger only where the smaller was
    quick. The best, for the reason that `read_bandwidth` gives.
    """
    best, begin = 0.0, time.perf_counter()
    for share, size in enumerate((512, 1024) if device is None or device.type == "cpu" else (4096, 8192), start=1):
        if best and 2 * size**3 / best > _PROBE_SECONDS / 4:
            break
        a, b = (torch.randn((size, size), device=device, dtype=dtype) for _ in range(2))
        _seconds_of_product(a, b)
        best = max(best, 2 * size**3 / _seconds_of_product(a, b))
        while time.perf_counter() - begin < _PROBE_SECONDS * share / 2:
            best = max(best, 2 * size**3 / _seconds_of_product(a, b))
    return best


def _seconds_of_product(a: Tensor, b: Tensor) -> float:
    begin = time.perf_counter()
    # One number of the product travels back, so that an accelerator has finished.
    torch.mm(a, b)[0, 0].item()
    return time.perf_counter() - begin


def resident_bytes() -> tuple[int, int] | None:
    """Resident bytes of this process now, and the most since the last reset of the high-water mark; None off Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return (found["VmRSS"], found["VmHWM"]) if len(found) == 2 else None


def free_bytes(device: torch.device) -> int | None:
    """Bytes that a device has left for this process; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


@dataclass
class Neighbours:
    """Tells whether other programs took processor time that a measurement needed.

    Other programs may use the cores that our threads leave free; what they use beyond that, as a share of the elapsed
    time, disturbs. Where the system does not report it (no /proc/stat), nothing is called disturbed and `metered` is
    False.

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

    def notes(self) -> list[str]:
        """Return the notes of a record about samples that could not be checked."""
        return [] if self.metered else ["This system does not report what other programs do: no sample was checked."]

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
                # user nice system idle iowait irq softirq steal: all but the two idle ones are work.
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
