"""Functions that tests run in workers; importable there by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import ray

from kvtailor.cluster.contract import Shared


def process(shared: Shared | None = None) -> tuple[int, str, int]:
    """The process, its node, and the identity of a shared value there."""
    import torch

    assert torch.get_num_threads() == 1
    return os.getpid(), ray.get_runtime_context().get_node_id(), id(shared.get()) if shared is not None else 0


def dies(folder: str, times: int) -> int:
    """Kill this process as often; then return how often that was."""
    mark = Path(folder) / str(time.time_ns())
    if len(list(Path(folder).iterdir())) >= times:
        return times
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def span(seconds: float) -> tuple[float, float, str]:
    """When it began and ended, and on which node."""
    begin = time.time()
    time.sleep(seconds)
    return begin, time.time(), ray.get_runtime_context().get_node_id()


def fails(what: str) -> Any:
    raise RuntimeError(what)


def fills(size: int, seconds: float) -> int:
    """Take memory, and hold it."""
    held = bytearray(os.urandom(2**20)) * (size // 2**20)
    time.sleep(seconds)
    return len(held)


def devices(seconds: float) -> tuple[list[str], int]:
    """The accelerators of this call, and its process, after a while."""
    time.sleep(seconds)
    return list(map(str, ray.get_gpu_ids())), os.getpid()
