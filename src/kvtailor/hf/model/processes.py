"""The processes that torchrun started this program in: all run the same, and one of them speaks."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kvtailor.errors import KvtailorError

__all__ = ["ALONE", "Processes", "same_seed", "started"]

_T = TypeVar("_T")
# A process that does not come to where the others wait ends them after this time.
_PATIENCE = timedelta(minutes=30)


class Processes:
    """Processes that run the same program on one model. This class is the case of one process.

    Attributes:
        rank: number of this process.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def broadcast(self, value: _T) -> _T:
        """Return the first process's value; all of them call it."""
        return value

    def sum(self, number: int) -> int:
        """Return the sum of all processes' numbers; all of them call it."""
        return number


class _Torchrun(Processes):
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def broadcast(self, value: _T) -> _T:
        found: list[Any] = [value]
        dist.broadcast_object_list(found, src=0)
        answer: _T = found[0]
        return answer

    def sum(self, number: int) -> int:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, number)
        return sum(found)


ALONE = Processes()
"""One process."""
_started: Processes = ALONE


def started(device: torch.device | str | None = None, *, begin: bool = False) -> Processes:
    """Return the processes of this program.

    Args:
        device: on which the model is to run, for the way in which they talk.
        begin: connect them where torchrun says that there are several (`WORLD_SIZE`), and they are not connected yet.

    Raises:
        KvtailorError: torchrun's variables are incomplete, or this machine has fewer GPUs than processes.
    """
    global _started
    if _started is not ALONE or not begin or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _started
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise KvtailorError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so torchrun should have started this, but {', '.join(missing)} "
            "is not set: start it as torchrun --nproc-per-node N -m kvtailor ..., or unset WORLD_SIZE"
        )
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if on_gpu:
        own, here = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if own >= here:
            raise KvtailorError(
                f"torchrun started process {own} of this machine (from 0), and it has {here} GPUs: start at most {here}"
            )
        torch.cuda.set_device(own)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    _started = _Torchrun()
    return _started


def same_seed(seed: int | None) -> int | None:
    """Return a random state that all processes share: the one that was given, or a new one where there are several."""
    if seed is not None or _started.size == 1:
        return seed
    return _started.broadcast(secrets.randbits(63))
