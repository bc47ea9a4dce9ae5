"""Functions that tests run in workers; importable there by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ray


def process(shared: str = "") -> tuple[int, str, int]:
    """The process, its node, and how long a shared text is there."""
    import torch

    assert torch.get_num_threads() == 1
    return os.getpid(), ray.get_runtime_context().get_node_id(), len(shared)


def dies() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


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
