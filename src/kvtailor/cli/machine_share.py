"""What the program sets before torch is loaded: the cores that it may use, and threads that sleep while they wait.

OpenMP's threads wait for each other at the end of every operation. By default they spin, each on a core. Where another
program keeps one of the cores busy, a spinning thread holds the core that the thread it waits for needs, and each of
many short operations takes a time slice of the other program. Threads that sleep instead leave the core at once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["WAITING", "granted_cores", "share_machine"]

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def share_machine(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets how OpenMP's threads wait, and how many there are where a container grants fewer cores than it shows.

    What the user has set stays. Nothing happens once torch is loaded, since it has read the environment then. Only for
    the program's own process: a library leaves the environment of the process that imports it alone.
    """
    if "torch" in sys.modules:
        return
    if not any(name in environment for name in WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    granted = granted_cores()
    if granted is not None:
        environment.setdefault("OMP_NUM_THREADS", str(granted))


def granted_cores(quota: Path = _QUOTA) -> int | None:
    """Whole cores that a container's quota grants, at least 1; None without a quota below the cores that are shown.

    Args:
        quota: the file of Linux's control groups (version 2): microseconds of processor time in each period, and the
            period.
    """
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        # No Linux, no control groups of version 2, or none for this process.
        return None
    shown = len(os.sched_getaffinity(0))
    if allowed == "max":
        return None
    granted = max(1, math.floor(int(allowed) / int(period)))
    return granted if granted < shown else None
